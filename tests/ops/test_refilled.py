"""Writes to a tensor between two equal calls, in ways that PyTorch does not count, change the second result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_calls import COPIED_MASKS, MASKS, B, Call, H, L, assert_equal, calls, masked_call, token_calls
from torch import Tensor

import transformer_fast as tfast
from transformer_fast import AttentionMask


def by_numpy(t: Tensor, values: Tensor) -> None:
    t.detach().numpy()[...] = values.detach().numpy()


def by_data(t: Tensor, values: Tensor) -> None:
    t.data.copy_(values)


def by_dlpack(t: Tensor, values: Tensor) -> None:
    torch.from_dlpack(t.detach()).copy_(values)


REFILLS = {"numpy": by_numpy, "data": by_data, "dlpack": by_dlpack}
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


def check_refills(make: Callable[[int], Call], compute: Callable[[Call], list[Tensor]] = Call.outputs) -> None:
    """Write to each tensor of a call in each way, and compare with a call on new tensors."""
    for name in make(0).tensors:
        for refill in REFILLS.values():
            call, others = make(0), make(1).tensors
            compute(call)
            before = compute(call)
            assert not torch.equal(call.tensors[name], others[name])
            refill(call.tensors[name], others[name])
            found = compute(call)
            assert_equal(found, compute(call._replace(tensors={key: t.clone() for key, t in call.tensors.items()})))
            assert not all(map(torch.equal, found, before)), name
            assert not any(hasattr(t, "_tensor_cache") for t in call.tensors.values()), "on a CPU nothing is kept"


@pytest.mark.parametrize("name", calls() | token_calls())
def test_ops(name: str) -> None:
    check_refills(lambda seed: (calls(seed=seed) | token_calls(seed=seed))[name])


@pytest.mark.cover("values")
@pytest.mark.parametrize("setting", [*OPTIONS, *SETTINGS])
@pytest.mark.parametrize("mask", [*MASKS, *COPIED_MASKS])
def test_masks_of_attention(mask: str, setting: str) -> None:
    def compute(call: Call) -> Any:
        with SETTINGS.get(setting, contextlib.nullcontext)():
            return call.outputs()

    check_refills(lambda seed: masked_call(mask, seed, **OPTIONS.get(setting, {})), compute)


@pytest.mark.parametrize("setting", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("refill", REFILLS.values(), ids=REFILLS)
def test_a_mask_that_was_made_before(refill: Callable[..., None], mask: str, setting: str) -> None:
    call, other = masked_call(mask), masked_call(mask, seed=1).tensors["part"]

    def called(mask: AttentionMask) -> tuple[Tensor, ...]:
        return call._replace(function=lambda part, **t: tfast.attention(**t, mask=mask, **OPTIONS[setting])).outputs()

    made = MASKS[mask][0]
    once = made(call.tensors["part"])
    called(once)
    before = called(once)
    refill(call.tensors["part"], other)
    found = called(once)
    assert_equal(found, called(made(other)))
    assert not all(map(torch.equal, found, before))


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask: str) -> None:
    def compute(call: Call) -> list[Tensor]:
        return call._replace(constant=("part",)).trained()[1:]

    check_refills(lambda seed: masked_call(mask, seed, dropout_p=0.2, softcap=4.0), compute)


@pytest.mark.cover(6)
@pytest.mark.parametrize("mask", MASKS)
def test_compiled(mask: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, q, k, v: tfast.attention(q, k, v, MASKS[mask][0](t)), backend="eager")
    check_refills(lambda seed: masked_call(mask, seed)._replace(function=lambda q, k, v, part: compiled(part, q, k, v)))


QKV = [masked_call("keep").tensors[name] for name in "qkv"]


@pytest.mark.parametrize("setting", [*OPTIONS, *SETTINGS])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("shape", [(B,), (B, L), (B, 1)])
def test_a_length_past_the_keys_is_one_error(shape: tuple[int, ...], kind: torch.dtype, setting: str) -> None:
    lengths = torch.full(shape, 3, dtype=kind)
    mask = AttentionMask.lengths(lengths)

    def call() -> object:
        with SETTINGS.get(setting, contextlib.nullcontext)():
            return tfast.attention(*QKV, mask, **OPTIONS.get(setting, {}))

    call()
    for wrong, says in ((L + 22, f"got 3 to {L + 22}"), (-1, "got -1 to 3")):
        lengths.numpy()[0] = wrong
        lengths.numpy()[1] = 3
        with pytest.raises(ValueError, match=rf"attention: lengths must lie in \[0, Lk = {L}\], {says}"):
            call()


def test_lengths_that_are_a_parameter_are_checked_too() -> None:
    lengths = torch.nn.Parameter(torch.tensor([3, L + 1]), requires_grad=False)
    with pytest.raises(ValueError, match=f"got 3 to {L + 1}"):
        tfast.attention(*QKV, AttentionMask.lengths(lengths))
