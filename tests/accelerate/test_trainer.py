"""Models of Hugging Face transformers, accelerated and trained by its Trainer: losses are those of the plain models.

The vocabulary is large enough that the fused loss runs: 4 x 48 tokens of 8,192 words.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate import lazy_logits, output_layer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which its Trainer needs

V, D, ROWS, LENGTH, PAD = 8192, 16, 4, 48, 1
STEPS, ACCUMULATED = 2, 2
SPECIAL = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def model(kind: str, **fields: Any) -> nn.Module:
    """A model of the paper's vocabulary and a tiny width, with every dropout 0."""
    made = getattr(transformers, kind)
    config = made.config_class(vocab_size=V, **fields)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return made(config)


def coder(kind: str) -> Callable[[], nn.Module]:
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
    each = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    return functools.partial(model, kind, d_model=D, max_position_embeddings=64, **each, **SPECIAL)


def bert(kind: str) -> Callable[[], nn.Module]:
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return functools.partial(model, kind, max_position_embeddings=64, pad_token_id=PAD, **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BART": coder("BartForConditionalGeneration"),
    "Marian": coder("MarianMTModel"),
    "MBart": coder("MBartForConditionalGeneration"),
    "Pegasus": coder("PegasusForConditionalGeneration"),
    "M2M100": coder("M2M100ForConditionalGeneration"),
    "Blenderbot": coder("BlenderbotForConditionalGeneration"),
    "T5": functools.partial(
        model, "T5ForConditionalGeneration", d_model=D, d_kv=8, d_ff=32, num_layers=1, num_heads=2, **SPECIAL
    ),
    "BERT": bert("BertForMaskedLM"),
    "RoBERTa": bert("RobertaForMaskedLM"),
    "DistilBERT": functools.partial(
        model, "DistilBertForMaskedLM", dim=D, n_layers=1, n_heads=2, hidden_dim=32, pad_token_id=PAD
    ),
    "GPT-2": functools.partial(model, "GPT2LMHeadModel", n_embd=D, n_layer=1, n_head=2, n_positions=64, **SPECIAL),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation and clipping": {"gradient_accumulation_steps": ACCUMULATED, "max_grad_norm": 0.1},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": ACCUMULATED},
    "bf16": {"bf16": True, "max_grad_norm": 0.1},
}


def data(seq2seq: bool) -> list[dict[str, Tensor]]:
    """Sequences of 24 to 48 ids that are their own labels, padded; of a text, every other id is to be predicted."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(ROWS * STEPS * ACCUMULATED):
        ids = torch.randint(3, V, (LENGTH,), generator=generator)
        kept = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (1,), generator=generator)
        given = {"input_ids": ids.where(kept, PAD), "attention_mask": kept.long(), "labels": ids.where(kept, -100)}
        if seq2seq:
            given["decoder_input_ids"] = given["input_ids"].roll(1)
        examples.append(given)
    return examples


class Recorder(transformers.Trainer):
    """Keeps the loss of each batch, and each norm of gradients before it is clipped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train(model: nn.Module, folder: Path, settings: dict[str, Any]) -> tuple[list[float], nn.Module]:
    model = copy.deepcopy(model)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Recorder(
        model, arguments, train_dataset=data(model.config.is_encoder_decoder), optimizers=(optimizer, None)
    )
    trainer.train()
    assert len(trainer.losses) == STEPS * settings.get("gradient_accumulation_steps", 1)
    return trainer.losses, model


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_plain_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[Any] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        fused.append(options)
        return tfast.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(lazy_logits.ops, "linear_cross_entropy", counted)
    assert ROWS * (LENGTH - 1) * V >= output_layer.WORTH_IT
    torch.manual_seed(0)
    plain = MODELS[name]()
    ours, with_loss = copy.deepcopy(plain), copy.deepcopy(plain)
    assert "fused loss" not in {row.now for row in tfast.accelerate(ours).swapped}
    assert [row.now for row in tfast.accelerate(with_loss, fused_loss=True).swapped].count("fused loss") == 1
    for setting, options in SETTINGS.items():
        expected, trained = train(plain, tmp_path, options)
        for fast in (ours, with_loss):
            fused.clear()
            losses, changed = train(fast, tmp_path, options)
            # Under autocast, and with the smoothing that Trainer computes of the logits, nothing is fused.
            fuses = fast is with_loss and setting in ("default", "accumulation and clipping")
            assert len(fused) == (len(losses) if fuses else 0), setting
            close = {"rtol": 2e-3, "atol": 2e-3} if setting == "bf16" else {"rtol": 2e-6, "atol": 2e-6}
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **close)
            close = close if setting == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
            for a, b in zip(changed.parameters(), trained.parameters(), strict=True):
                torch.testing.assert_close(a, b, **close)
