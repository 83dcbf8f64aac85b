"""Gradient accumulation in transformers' Trainer: how many times too large the gradient is, per kind of model.

The page docs/models/transformers.md has these figures. A plain model is measured as well: the fault is not ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which its Trainer needs
import huggingface_models as models  # noqa: E402

BATCHES, ROWS, LENGTH = 4, 8, 6
TOO_LARGE, RIGHT = float(BATCHES), 1.0
FIGURES = {
    "MarianMTModel": TOO_LARGE, "BartForConditionalGeneration": TOO_LARGE, "MBartForConditionalGeneration": TOO_LARGE,
    "M2M100ForConditionalGeneration": TOO_LARGE, "PegasusForConditionalGeneration": TOO_LARGE,
    "T5ForConditionalGeneration": TOO_LARGE, "BartForCausalLM": TOO_LARGE, "BertForMaskedLM": TOO_LARGE,
    "RobertaForMaskedLM": TOO_LARGE, "DistilBertForMaskedLM": TOO_LARGE, "BertForSequenceClassification": TOO_LARGE,
    "BertForTokenClassification": TOO_LARGE, "LlamaForSequenceClassification": TOO_LARGE,
    "BertForQuestionAnswering": RIGHT, "ModernBertForMaskedLM": RIGHT, "BertLMHeadModel": RIGHT,
    "GPT2LMHeadModel": RIGHT, "LlamaForCausalLM": RIGHT, "ViTForImageClassification": RIGHT,
}  # fmt: skip
PAGE = "docs/models/transformers.md says otherwise: change its section on gradient accumulation, and FIGURES here"


def rows(name: str) -> list[dict[str, Tensor]]:
    """Rows with equally many labels, for the head of a class."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(ROWS):
        ids = torch.randint(4, models.VOCABULARY, (LENGTH,), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if name.endswith("SequenceClassification"):
            row["labels"] = ids[0] % 2
        elif name.endswith("TokenClassification"):
            row["labels"] = ids % 2
        elif name.endswith("QuestionAnswering"):
            row |= {"start_positions": ids[0] % LENGTH, "end_positions": ids[1] % LENGTH}
            del row["labels"]
        elif name.endswith("ImageClassification"):
            pixels = torch.randn(3, models.IMAGE, models.IMAGE, generator=generator)
            row = {"pixel_values": pixels, "labels": ids[0] % 2}
        elif models.named(name).kind == "causal":
            row["labels"] = ids.where(torch.arange(LENGTH) > 0, -100)  # Trainer counts the first one for GPT-2
        elif models.named(name).kind == "seq2seq":
            row["decoder_input_ids"] = ids.roll(1)
        made.append(row)
    return made


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def accumulated(model: nn.Module, name: str, folder: Path, **settings: Any) -> tuple[Tensor, float]:
    """Return the gradient of Trainer's step over the rows in equal batches, and its loss."""
    model = copy.deepcopy(model)
    before = flat(trained(model))
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS // BATCHES, gradient_accumulation_steps=BATCHES, max_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        dataloader_pin_memory=False, max_grad_norm=0.0, **settings,
    )  # fmt: skip
    optimizers = torch.optim.SGD(model.parameters(), lr=1e-3), None
    loss = transformers.Trainer(model, arguments, train_dataset=rows(name), optimizers=optimizers).train().training_loss
    return (before - flat(trained(model))) / 1e-3, loss


def ratios(model: nn.Module, name: str, folder: Path) -> list[float]:
    """Return Trainer's gradient and loss as multiples of those of one batch with the same rows."""
    loss = model(**torch.utils.data.default_collate(rows(name))).loss
    exact = flat(torch.autograd.grad(loss, trained(model), materialize_grads=True))
    found, losses = accumulated(model, name, folder)
    return [float(found @ exact / exact.square().sum()), losses / loss.item()]


@pytest.mark.parametrize("name", FIGURES)
def test_how_many_times_too_large_an_accumulated_gradient_is(name: str, tmp_path: Path) -> None:
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < (5, 23):
        pytest.skip("the page speaks of transformers 5.23 and later")
    found = ratios(models.make(models.named(name)).double(), name, tmp_path)
    expected = pytest.approx([FIGURES[name]] * 2, rel=0.01)
    assert found == expected, f"transformers {transformers.__version__} makes {found} of {name}: {PAGE}"


@pytest.mark.parametrize("name", ["MarianMTModel", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_accelerated_models_do_the_same_and_the_setting_of_the_page_helps(name: str, tmp_path: Path) -> None:
    model = models.make(models.named(name)).double()
    fast = copy.deepcopy(model)
    tfast.accelerate(fast)
    (expected, loss), (found, losses) = (accumulated(m, name, tmp_path) for m in (model, fast))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert losses == pytest.approx(loss)
    fast.accepts_loss_kwargs = False
    assert ratios(fast, name, tmp_path) == pytest.approx([1.0, 1.0], rel=0.01)


@pytest.mark.parametrize("name", ["MarianMTModel", "BertForMaskedLM"])
def test_label_smoothing_is_right(name: str, tmp_path: Path) -> None:
    model = models.make(models.named(name)).double()
    smoothed = [accumulated(model, name, tmp_path, label_smoothing_factor=0.1)]
    model.accepts_loss_kwargs = False
    smoothed.append(accumulated(model, name, tmp_path, label_smoothing_factor=0.1))
    torch.testing.assert_close(*(gradient for gradient, _ in smoothed), rtol=1e-6, atol=1e-8)
