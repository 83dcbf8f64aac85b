"""Values that a GPU cannot check without waiting: the kernels keep within their tensors, and write every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.decode import attention_decode
from transformer_fast.triton.attention.forward import attention_forward

NO_PARTS = dict.fromkeys(("distance_bias", "query_ids", "key_ids", "sinks", "causal", "window", "softcap"))


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_a_cache(page_size: int, device: torch.device) -> None:
    q = torch.randn(3, 2, 1, 16, device=device)
    k, v = torch.randn(2, 5, page_size, 2, 16, device=device)
    table = torch.tensor([[-1, 3], [1, 5], [7, -8]], dtype=torch.int32, device=device)
    lengths = torch.tensor([2 * page_size, 9 * page_size, -3], dtype=torch.int32, device=device)
    call = lambda lengths, table: attention_decode(q, k, v, lengths, table, **NO_PARTS, scale=0.25)  # noqa: E731
    found = call(lengths, table)
    for a, b in zip(found, call(lengths.clamp(0, 2 * page_size), table.clamp(0, 4)), strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


def test_lengths_past_a_cache_and_below_zero(device: torch.device) -> None:
    q, (k, v) = torch.randn(2, 2, 1, 16, device=device), torch.randn(2, 2, 2, 20, 16, device=device)
    lengths = torch.tensor([25, -2], dtype=torch.int32, device=device)
    call = lambda lengths: attention_decode(q, k, v, lengths, None, **NO_PARTS, scale=0.25)  # noqa: E731
    for a, b in zip(call(lengths), call(lengths.clamp(0, 20)), strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


TOKENS, STARTS = 20, [0, 9, 20]
"""Rows of q, k and v, and sequences that cover them."""


def filled(value: float, *tensors: Tensor) -> None:
    """Leave memory of these sizes behind, freed, that holds a value."""
    [torch.full_like(t, value) for t in tensors]


def packed(starts: list[int], device: torch.device, longest: int = 11, **parts: Any) -> dict[str, Tensor]:
    """Results and gradients of a packed call, by name, on rows that are the same in every call."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(TOKENS, 2, 16, generator=draw).to(device) for _ in range(4))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    parts = {name: t.to(device) for name, t in parts.items()}
    places = {name: parts.pop(name, None) for name in ("seqused_k", "bias_starts")}
    sequences = PackedBatch(cu_seqlens, cu_seqlens, longest, longest, bottom_right=False, **places)
    params = AttentionParams(scale=0.25, packed=sequences, zero_empty_rows=True, **parts)
    filled(7.0, q, q[..., 0])
    out, logsumexp, _ = attention_forward(q, k, v, params)
    needs = True, params.bias is not None, False
    filled(7.0, q, q, q, *([params.bias] * 2 if needs[1] else []))
    *gradients, bias, _ = attention_backward(grad, q, k, v, out, logsumexp, params, needs=needs)
    found = dict(zip(("out", "logsumexp", "grad_q", "grad_k", "grad_v"), (out, logsumexp.t(), *gradients), strict=True))
    return found if bias is None else found | {"grad_bias": bias.t()}


WRONG = {
    "past the tokens": ([0, 9, 31], [0, 9, 20]),
    "too few tokens": ([0, 9, 15], [0, 9, 15]),
    "not from 0 on": ([4, 9, 20], [4, 9, 20]),
    "negative": ([-6, 9, 20], [0, 9, 20]),
    "all past the tokens": ([30, 40, 50], [20, 20, 20]),
    "falling": ([0, 9, 3], [0, 9, 9]),
    "no sequence": ([0], [0]),
}


@pytest.mark.parametrize("case", WRONG)
def test_sequences_of_a_packed_batch(case: str, device: torch.device) -> None:
    """Rows of sequences that are there are those of a batch of these alone; all others are 0, or -inf."""
    starts, covered = WRONG[case]
    found = packed(starts, device, longest=16)
    expected = packed(covered, device, longest=16)
    begin, end = covered[0], covered[-1]
    for name, t in found.items():
        assert torch.equal(t, expected[name]), name
        outside = torch.cat([t[:begin], t[end:]])
        assert (outside == (-torch.inf if name == "logsumexp" else 0.0)).all(), name
        inside = t[begin:end]
        assert inside.isfinite().all() and (inside.numel() == 0 or inside.abs().max() < 7.0), name


def test_a_sequence_longer_than_the_longest(device: torch.device) -> None:
    found = packed(STARTS, device, longest=10)
    for name, t in found.items():
        assert (t[19:] == (-torch.inf if name == "logsumexp" else 0.0)).all(), name
        assert t[:19].isfinite().all(), name


def test_keys_in_use(device: torch.device) -> None:
    def used(*numbers: int) -> dict[str, Tensor]:
        return packed(STARTS, device, seqused_k=torch.tensor(numbers, dtype=torch.int32))

    for name, t in used(-4, 40).items():
        assert torch.equal(t, used(0, 11)[name]), name
    for name in ("grad_k", "grad_v"):
        assert (used(5, 11)[name][5:9] == 0.0).all() and not (used(5, 11)[name][:5] == 0.0).any()


@pytest.mark.parametrize("starts", [[0, 81, 202], [0, 500, 202], [-5, 81, 202]])
def test_pairs_of_a_bias(starts: list[int], device: torch.device) -> None:
    """A sequence whose pairs are not all in the bias sees no keys; pairs past the last one have the gradient 0."""
    bias = torch.randn(2, 210, generator=torch.Generator().manual_seed(2))
    found = packed(STARTS, device, bias=bias, bias_starts=torch.tensor(starts))
    for b, (row, end) in enumerate(((0, 9), (9, 20))):
        there = 0 <= starts[b] <= 210 - (end - row) ** 2
        assert bool((found["out"][row:end] != 0.0).any()) == there
        assert found["logsumexp"][row:end].isfinite().all() == there
    assert (found["grad_bias"][202:] == 0.0).all()
