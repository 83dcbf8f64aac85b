"""A tensor is written to between two equal calls, in ways that PyTorch does not count: the second call sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refilled import CALLS, COPIED_MASKS, MASKS, QKV, REFILLS, B, H, L, mask_tensor
from torch import Tensor

import transformer_fast as tfast
from transformer_fast import AttentionMask, ops

Tensors = dict[str, Tensor]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
    "logsumexp": {"return_logsumexp": True},
    "weights": {"return_weights": True},
    "dropped weights": {"return_weights": "dropped", "dropout_p": 0.3},
    "dropout": {"dropout_p": 0.3},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": torch.zeros(1, 1, L, L)},
}
SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "reference": lambda: tfast.backend("reference"),
    "inference": torch.inference_mode,
}


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def check_refills(tensors: Callable[[torch.Generator], Tensors], compute: Callable[..., Any]) -> None:
    """Refill each tensor of a call in each way, and compare with a call of fresh tensors."""

    def called(given: Tensors) -> list[Tensor]:
        torch.manual_seed(7)
        return outputs(compute(**given))

    for name in tensors(drawn(0)):
        for refill in REFILLS.values():
            given, others = tensors(drawn(0)), tensors(drawn(1))
            called(given)
            before = called(given)
            assert not torch.equal(given[name], others[name])
            refill(given[name], others[name])
            found = called(given)
            expected = called({key: t.clone() for key, t in given.items()})
            assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found), name
            assert not all(torch.equal(a, b) for a, b in zip(found, before, strict=True)), name
            kept = [key for key, t in given.items() if hasattr(t, "_tensor_cache")]
            assert kept == [], "on a CPU nothing is kept"


def test_every_public_op_is_here() -> None:
    assert {call.op for call in CALLS.values()} | {"attention", "decompositions", "positional_table"} == {*ops.__all__}


@pytest.mark.parametrize("name", CALLS)
def test_ops(name: str) -> None:
    check_refills(CALLS[name].tensors, CALLS[name].compute)


@pytest.mark.cover("values")
@pytest.mark.parametrize("setting", [*OPTIONS, *SETTINGS])
@pytest.mark.parametrize("mask", [*MASKS, *COPIED_MASKS])
def test_masks_of_attention(mask: str, setting: str) -> None:
    made = (MASKS | COPIED_MASKS)[mask]

    def compute(t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        with SETTINGS.get(setting, contextlib.nullcontext)():
            return tfast.attention(q, k, v, made(t), **OPTIONS.get(setting, {}))

    check_refills(lambda draw: {"t": mask_tensor(mask, draw)} | QKV(draw), compute)


@pytest.mark.parametrize("setting", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("refill", REFILLS.values(), ids=REFILLS)
def test_a_mask_that_was_made_before(refill: Callable[..., None], mask: str, setting: str) -> None:
    t, other, qkv = mask_tensor(mask, drawn(0)), mask_tensor(mask, drawn(1)), QKV(drawn(2)).values()

    def called(given: AttentionMask) -> list[Tensor]:
        torch.manual_seed(3)
        return outputs(tfast.attention(*qkv, given, **OPTIONS[setting]))

    once = MASKS[mask](t)
    called(once)
    before = called(once)
    refill(t, other)
    found, expected = called(once), called(MASKS[mask](other))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask: str) -> None:
    def compute(t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tfast.attention(*leaves, MASKS[mask](t), dropout_p=0.2, softcap=4.0)
        return torch.autograd.grad(out.square().sum(), leaves)

    check_refills(lambda draw: {"t": mask_tensor(mask, draw)} | QKV(draw), compute)


@pytest.mark.parametrize("mask", MASKS)
def test_compiled(mask: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, q, k, v: tfast.attention(q, k, v, MASKS[mask](t)), backend="eager")
    check_refills(lambda draw: {"t": mask_tensor(mask, draw)} | QKV(draw), compiled)


@pytest.mark.parametrize("setting", [*OPTIONS, *SETTINGS])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("shape", [(B,), (B, L), (B, 1)])
def test_a_length_past_the_keys_is_one_error(shape: tuple[int, ...], kind: torch.dtype, setting: str) -> None:
    lengths, qkv = torch.full(shape, 3, dtype=kind), QKV(drawn(2)).values()
    mask = AttentionMask.lengths(lengths)

    def call() -> object:
        with SETTINGS.get(setting, contextlib.nullcontext)():
            return tfast.attention(*qkv, mask, **OPTIONS.get(setting, {}))

    call()
    for wrong, says in ((L + 22, f"got 3 to {L + 22}"), (-1, "got -1 to 3")):
        lengths.numpy()[0] = wrong
        lengths.numpy()[1] = 3
        with pytest.raises(ValueError, match=rf"attention: lengths must lie in \[0, Lk = {L}\], {says}"):
            call()


def test_lengths_that_are_a_parameter_are_checked_too() -> None:
    lengths = torch.nn.Parameter(torch.tensor([3, L + 1]), requires_grad=False)
    with pytest.raises(ValueError, match=f"got 3 to {L + 1}"):
        tfast.attention(*QKV(drawn(2)).values(), AttentionMask.lengths(lengths))
