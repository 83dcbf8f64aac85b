"""Accelerated models of transformers in its Trainer: the losses are those of the plain models.

The vocabulary is large enough that the fused loss runs: 4 x 48 tokens of 8,192 words.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.swap import output_layer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which its Trainer needs
import huggingface_models as models  # noqa: E402

V, ROWS, LENGTH, STEPS, ACCUMULATED = 8192, 4, 48, 2, 2
MODELS = [
    "BartForConditionalGeneration", "MarianMTModel", "MBartForConditionalGeneration", "PegasusForConditionalGeneration",
    "M2M100ForConditionalGeneration", "BlenderbotForConditionalGeneration", "T5ForConditionalGeneration",
    "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "GPT2LMHeadModel",
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation and clipping": {"gradient_accumulation_steps": ACCUMULATED, "max_grad_norm": 0.1},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": ACCUMULATED},
    "bf16": {"bf16": True, "max_grad_norm": 0.1},
}


def data(seq2seq: bool) -> list[dict[str, Tensor]]:
    """Sequences of 24 to 48 ids that are their own labels, padded."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(ROWS * STEPS * ACCUMULATED):
        ids = torch.randint(4, V, (LENGTH,), generator=generator)
        kept = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (1,), generator=generator)
        padded = ids.where(kept, models.PAD)
        given = {"input_ids": padded, "attention_mask": kept.long(), "labels": ids.where(kept, -100)}
        examples.append(given | ({"decoder_input_ids": padded.roll(1)} if seq2seq else {}))
    return examples


class Recorder(transformers.Trainer):
    """Callback that records the loss of each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train(model: nn.Module, folder: Path, settings: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Train a copy for some steps; return the losses and the trained parameters."""
    model = copy.deepcopy(model)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    optimizers = torch.optim.SGD(model.parameters(), lr=0.5), None
    trainer = Recorder(model, arguments, train_dataset=data(model.config.is_encoder_decoder), optimizers=optimizers)
    trainer.train()
    assert len(trainer.losses) == STEPS * settings.get("gradient_accumulation_steps", 1)
    return torch.tensor(trainer.losses), list(model.parameters())


@pytest.mark.cover(4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_plain_model(name: str, setting: str, tmp_path: Path, fused: list[Any]) -> None:
    assert ROWS * (LENGTH - 1) * V >= output_layer.WORTH_IT
    plain = models.make(models.named(name), vocab_size=V, decoder_start_token_id=2)
    options, (ours, with_loss) = SETTINGS[setting], (copy.deepcopy(plain) for _ in range(2))
    assert "fused loss" not in {row.now for row in tfast.accelerate(ours).swapped}
    assert [row.now for row in tfast.accelerate(with_loss, fused_loss=True).swapped].count("fused loss") == 1
    expected, trained = train(plain, tmp_path, options)
    for fast in (ours, with_loss):
        fused.clear()
        losses, changed = train(fast, tmp_path, options)
        # Under autocast, and with the smoothing that Trainer computes of the logits, nothing is fused.
        fuses = fast is with_loss and setting in ("default", "accumulation and clipping")
        assert len(fused) == (len(losses) if fuses else 0)
        close = {"rtol": 2e-3, "atol": 2e-3} if setting == "bf16" else {"rtol": 2e-6, "atol": 2e-6}
        torch.testing.assert_close(losses, expected, **close)
        close = close if setting == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(changed, trained, **close)


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "Mamba"])
def test_trainer_decays_the_same_parameters(name: str) -> None:
    """Trainer chooses by the class of a module and by names; of Mamba it decays the last norm and D."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    given = {
        "T5": {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        "Mamba": {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    }
    plain = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**given.get(name, sizes)))
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model).swapped
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    chosen = trainer.get_decay_parameter_names(plain)
    assert trainer.get_decay_parameter_names(model) == chosen
    assert any("norm" in parameter for parameter in chosen) == (name == "Mamba")
