"""Masked attention against eager and every backend of ``scaled_dot_product_attention``, on the same inputs.

What a backend of SDPA refuses (a mask, dropout, a dtype) is in the record under ``refused``, in its own words.
"""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.ops import _library


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``mask``: "none", "ragged" (a length for each batch entry), "causal" or "ragged causal"."""

    B: int
    H: int
    Lq: int
    Lk: int
    D: int = 64
    mask: str = "ragged"
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    backward: bool = True

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"b{self.B}h{self.H}q{self.Lq}k{self.Lk}d{self.D}"
        return f"{shape}-{self.mask}-p{self.dropout_p}-{dtype}-{'train' if self.backward else 'infer'}"


BF16 = torch.bfloat16
CASES = {
    "cpu": [
        Case(64, 8, 64, 64, dropout_p=0.1),
        Case(64, 8, 64, 64),
        Case(64, 8, 64, 64, mask="none"),
        Case(64, 8, 64, 64, mask="ragged causal", dropout_p=0.1),
        Case(64, 8, 20, 20, dropout_p=0.1),
        Case(64, 8, 64, 64, dropout_p=0.1, dtype=BF16),
        Case(64, 8, 64, 64, mask="none", dtype=BF16),
        Case(1, 8, 512, 512, mask="causal"),
        Case(2, 8, 1024, 1024, mask="causal", backward=False),
        Case(64, 8, 64, 64, backward=False),
        Case(64, 8, 1, 256, backward=False),
        Case(1, 8, 1, 512, mask="none", backward=False),
        Case(1, 1, 1, 5, D=8, mask="none", backward=False),
    ],
    "cuda": [
        Case(B, 16, L, L, mask=mask, dropout_p=p, dtype=BF16, backward=backward)
        for B, L in ((64, 64), (64, 256), (16, 1024), (4, 4096))
        for mask, p in (("ragged", 0.1), ("ragged", 0.0), ("ragged causal", 0.1), ("none", 0.0))
        for backward in (False, True)
    ],
}
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ),
}


def masks(case: Case, device: str):
    """The mask as ours takes it, and as one keep tensor for the others (None: no mask)."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(max(1, case.Lk // 8), case.Lk + 1, (case.B,), generator=generator).to(device)
    mask = tfast.AttentionMask()
    if "ragged" in case.mask:
        mask = mask & tfast.AttentionMask.lengths(lengths)
    if "causal" in case.mask:
        mask = mask & tfast.AttentionMask.causal(case.Lk - case.Lq)
    dense = None if case.mask == "none" else mask.dense(case.Lq, case.Lk, device)
    return mask, dense


def ways(case: Case, device: str):
    """Every way to compute the case, by name: functions of (q, k, v)."""
    mask, dense = masks(case, device)
    scale, p = 1 / math.sqrt(case.D), case.dropout_p

    def eager(q, k, v):
        scores = q @ k.transpose(-2, -1) * scale
        if dense is not None:
            scores = scores.masked_fill(~dense, -1e9)
        weights = scores.softmax(-1)
        return (F.dropout(weights, p) if p > 0 else weights) @ v

    def sdpa(backend):
        # A look-ahead alone has its own argument there, which some backends need; else the mask is dense.
        only_causal = case.mask == "causal" and case.Lq == case.Lk
        arguments = {"is_causal": True} if only_causal else {"attn_mask": dense}

        def call(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **arguments, dropout_p=p)

        return call

    calls = {"ours": lambda q, k, v: tfast.attention(q, k, v, mask, dropout_p=p), "eager": eager}
    return calls | {f"sdpa {backend.name.lower()}": sdpa(backend) for backend in BACKENDS[device]}


def check_ours(case: Case, device: str):
    """Raises unless ours is what the oracle computes with the same dropout."""
    _, dense = masks(case, device)

    def check(inputs):
        q, k, v, _ = inputs
        seed = torch.tensor([7], device=device) if case.dropout_p else None
        with mock.patch.object(_library, "draw_seed", lambda _: seed):
            actual = ways(case, device)["ours"](q, k, v)
        expected = reference.attention.attention(
            q, k, v, keep=dense, scale=1 / math.sqrt(case.D), dropout_p=case.dropout_p, seed=seed
        )[0]
        tolerance = 2e-2 if case.dtype == BF16 else 2e-5
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    return check


@pytest.mark.parametrize(("on", "case"), [(on, case) for on, cases in CASES.items() for case in cases], ids=str)
def test_attention(versus, device, on, case):
    if on != device:
        pytest.skip(f"a case for {on}")

    def make_inputs():
        shapes = [(case.B, length, case.H, case.D) for length in (case.Lq, case.Lk, case.Lk, case.Lq)]
        *qkv, grad_out = (torch.randn(s, device=device, dtype=case.dtype).transpose(1, 2) for s in shapes)
        return *(t.requires_grad_(case.backward) for t in qkv), grad_out

    def timed(function):
        def run(inputs):
            *qkv, grad_out = inputs
            out = function(*qkv)
            return torch.autograd.grad(out, qkv, grad_out) if case.backward else out

        return run

    _, dense = masks(case, device)
    pairs = case.B * case.Lq * case.Lk if dense is None else dense.expand(case.B, 1, case.Lq, case.Lk).sum().item()
    size = torch.finfo(case.dtype).bits // 8
    queries, keys = case.B * case.H * case.Lq * case.D, case.B * case.H * case.Lk * case.D
    versus(
        make_inputs,
        {name: timed(call) for name, call in ways(case, device).items()},
        check=check_ours(case, device),
        bytes_moved=size * (2 * queries + 2 * keys + (4 * queries + 4 * keys if case.backward else 0)),
        operations=(14 if case.backward else 4) * case.H * pairs * case.D,
    )
