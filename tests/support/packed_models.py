"""Models of transformers with and without padding: compared outputs, and tolerances."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import accelerated
import huggingface_models as models
import torch
from huggingface_sweep import softmax_in_the_dtype_of_its_input
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.testing import ULPS, errors

LENGTH, TARGET = 9, 7
PADDING = {
    "right": ("xxxxxxxxx", "xxx......", "xxxxx...."),
    "left": ("xxxxxxxxx", "......xxx", "....xxxxx"),
    "between": ("xx..xxxxx", "xxxx.xx..", "xxxxxxxxx"),
    "a whole row": ("xxxxxxxxx", ".........", "xxxx....."),
    "none": ("xxxxxxxxx",) * 3,
}
TARGETS = ("xxxxxxx", "xxxx...", "xx.....")
IGNORED = -100
SETTINGS: dict[str, dict[str, Any]] = {
    "M2M100ForConditionalGeneration": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 1},
    "MT5ForConditionalGeneration": {"decoder_start_token_id": 1},
}
"""Settings without which a tiny model has no training step, or draws which layers it skips."""


def kept(rows: tuple[str, ...]) -> Tensor:
    """Return bool (rows, length), True at an x."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


@dataclass(frozen=True)
class Batch:
    """Arguments of a model, and bool (B, L) or (B, L_trg), True where its output is at a token."""

    given: dict[str, Tensor]
    tokens: Tensor


def batch(name: str, padding: str, seed: int = 3) -> Batch:
    """Return three rows for a model of this class, with labels per token or per row."""
    generator = torch.Generator().manual_seed(seed)
    keep = kept(PADDING[padding])
    ids = _ids(LENGTH, generator).masked_fill(~keep, models.PAD)
    given = {"input_ids": ids, "attention_mask": keep.long()}
    if name.endswith(("ForConditionalGeneration", "MTModel")):
        tokens = kept(TARGETS)
        return Batch(given | {"labels": _ids(TARGET, generator).where(tokens, IGNORED)}, tokens)
    if name.endswith("ForMultipleChoice"):
        given = {key: value.unsqueeze(1).repeat(1, 2, 1) for key, value in given.items()}
    if name.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        given["labels"] = torch.tensor([0, 1, 0])
    elif name.endswith("ForTokenClassification"):
        given["labels"] = (ids % 2).where(keep, IGNORED)
    elif name.endswith(("ForCausalLM", "LMHeadModel")):  # a token after padding is not predicted from a token
        before = torch.cat([torch.ones(3, 1, dtype=torch.bool), keep[:, :-1]], dim=1)
        given["labels"] = ids.where(keep & before, IGNORED)
    elif name.endswith("ForMaskedLM"):
        given["labels"] = ids.where(keep, IGNORED)
    return Batch(given, keep)


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(4, models.VOCABULARY - 4, (3, length), generator=generator)


def make(name: str, attention: str | None = "eager", **settings: Any) -> nn.Module:
    """Return a tiny model of a class with large weights, so that padding has an effect, and without dropout unless a
    setting names it."""
    model = models.make(models.named(name), attention, **settings)
    return with_large_weights(model, dropout=any("dropout" in setting for setting in settings))


def with_large_weights(model: nn.Module, *, dropout: bool = False) -> nn.Module:
    """Return the model with large random weights, and without dropout unless that is to stay.

    T5 does not scale its scores: its weights of queries hold the factor.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not dropout:  # some heads have one that no config field names
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
            if name.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                parameter.mul_(model.config.d_kv**-0.5)
    return model


def step(model: nn.Module, call: Batch, **more: Any) -> dict[str, Tensor]:
    """Return the outputs, those per position at tokens, the loss, and the gradient of every parameter, by name."""
    model.zero_grad(set_to_none=True)
    with softmax_in_the_dtype_of_its_input():
        output = model(**call.given, **more)
    found = {name: t for name, t in output.items() if isinstance(t, Tensor) and name != "loss"}
    for keep in (call.tokens, call.given.get("attention_mask", call.tokens).bool()):  # of a decoder, and of its encoder
        found = {name: t[keep] if t.shape[:2] == keep.shape else t for name, t in found.items()}
    loss = output["loss"] if output.get("loss") is not None else sum(t.square().mean() for t in found.values())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{name: t.detach() for name, t in found.items()}, **gradients}


def close(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], *, atol: float = 1e-4, nan: bool = False
) -> None:
    """Compare tensors by name; one that is missing, or None, must be one of zeros or None in the plain model."""
    for name, expected in theirs.items():
        value = ours.get(name)
        if expected is None:
            assert value is None, name
            continue
        value = torch.zeros_like(expected) if value is None else value + 0
        torch.testing.assert_close(
            value, expected, rtol=1e-3, atol=atol, equal_nan=nan, msg=lambda m, name=name: f"{name}: {m}"
        )


def pair(name: str, **settings: Any) -> tuple[Any, Any, tfast.accelerate.Report]:
    """Return a model of a class, the same without padding, and the report."""
    return accelerated.pair(make(name, **SETTINGS.get(name, {}) | settings), packed=True)


def hold(plain: nn.Module, fast: nn.Module, call: Batch, modes: Iterable[bool] = (True, False), **more: Any) -> None:
    """Compare steps in training and evaluation."""
    for training in modes:
        close(*(step(model.train(training), call, **more) for model in (fast, plain)))


class Sides:
    """A plain model, the same in fp64, and the same after ``accelerate``, without padding by default."""

    def __init__(self, plain: nn.Module, *, packed: bool = True) -> None:
        self.plain, self.exact, self.packed = plain, copy.deepcopy(plain).double(), copy.deepcopy(plain)
        self.report = tfast.accelerate(self.packed, packed=packed)

    def hold(self, call: Batch, *, training: bool, gradients: bool = True, **more: Any) -> None:
        """Compare a call by the gate of every kernel; gradients with the rounding of the largest one.

        Raises:
            AssertionError: where something is further from fp64 than the plain model by more than that.
        """
        actual, plain, exact = (
            step(model.train(training), call, **more) for model in (self.packed, self.plain, self.exact)
        )
        names = {name for name, parameter in self.plain.named_parameters() if parameter.numel()}
        scale = max(exact[name].abs().max().item() for name in names & exact.keys())
        for name, expected in exact.items():
            if expected.numel() == 0 or (name in names and not gradients):
                continue
            ours = actual.get(name, torch.zeros_like(plain[name]))  # no gradient is one of zeros
            error, allowed, _ = errors(ours, plain[name], expected)
            allowed += ULPS * torch.finfo(ours.dtype).eps * scale
            assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"

    def is_packed(self) -> bool:
        """Return True if no call so far kept its padding."""
        return not self.report.padded_calls.reasons
