"""Attention in training with a look-ahead mask and one more mask part, beside eager PyTorch and SDPA.

Causal self-attention of one long sequence with a window, documents, ALiBi, relative positions, capped scores or sinks.
Eager and SDPA have what they need of it ready made, as one dense bias; ours is timed with all that it does with the
parts. SDPA has neither a cap nor sinks, and is left out there.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast import AttentionMask

SMALL_CASE = "test_attention_parts[cpu-cpu-window-b1h8l2048d64-float32-p0.1]"
PARTS = ("window", "documents", "alibi", "relative", "softcap", "sinks")
CAP = 30.0
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence of L tokens, H heads of D, with one of PARTS."""

    part: str
    dtype: torch.dtype
    dropout_p: float = 0.1
    B: int = 1
    H: int = 8
    L: int = 2048
    D: int = 64

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.part}-b{self.B}h{self.H}l{self.L}d{self.D}-{dtype}-p{self.dropout_p}"

    def mask(self, device: str) -> AttentionMask:
        """The look-ahead and the part: a window of 256 keys, 8 documents of one length, T5's 32 buckets."""
        if self.part == "window":
            return AttentionMask.window(255)
        mask = AttentionMask.causal()
        if self.part == "documents":
            return mask & AttentionMask.documents(torch.arange(self.L, device=device)[None] // (self.L // 8))
        if self.part == "alibi":
            return mask & AttentionMask.alibi(0.5 ** torch.arange(1.0, self.H + 1, device=device))
        if self.part == "relative":
            return mask & AttentionMask.relative(torch.randn(32, self.H, device=device), bidirectional=False)
        return mask


CASES = [
    (device, Case(part, dtype))
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16))
    for part in PARTS
]


@pytest.mark.parametrize(("on", "case"), CASES, ids=str)
def test_attention_parts(versus, device, on, case):
    if on != device:
        pytest.skip(f"a case for {on}")
    mask, scale = case.mask(device), 1 / math.sqrt(case.D)
    softcap = CAP if case.part == "softcap" else None
    sinks = torch.randn(case.H, device=device) if case.part == "sinks" else None
    keep, added = mask.dense(case.L, case.L, device), mask.added(case.L, case.L)
    dense = torch.zeros(1, case.H, case.L, case.L, device=device) if added is None else added
    dense = dense.masked_fill(~keep, -torch.inf).to(case.dtype)

    def make_inputs():
        shape = case.B, case.H, case.L, case.D
        q, k, v, grad_out = (torch.randn(shape, device=device, dtype=case.dtype) for _ in range(4))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out

    def trained(attend):
        def call(inputs):
            *tensors, grad_out = inputs
            out = attend(*tensors)
            return out, *torch.autograd.grad(out, tensors, grad_out)

        return call

    def ours(q, k, v, dropout_p=case.dropout_p):
        return tfast.attention(q, k, v, mask, dropout_p=dropout_p, softcap=softcap, sinks=sinks)

    def eager(q, k, v, dropout_p=case.dropout_p):
        scores = q @ k.transpose(-2, -1) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + dense.to(scores.dtype)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(case.B, -1, case.L, 1)
            scores = torch.cat([scores, column], -1)
        weights = F.dropout(scores.softmax(-1)[..., : case.L], dropout_p)
        return weights @ v

    def sdpa(backend):
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, dropout_p=case.dropout_p)

        return attend

    def check(inputs):
        """Compare with eager in float64, without dropout, because only our op draws our dropout mask."""
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        expected = trained(lambda q, k, v: eager(q, k, v, 0.0))(exact)
        tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
        for found, wanted in zip(trained(lambda q, k, v: ours(q, k, v, 0.0))(inputs), expected, strict=True):
            atol = tolerance * wanted.abs().max().item()
            torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=tolerance)

    calls = {"ours": trained(ours), "eager": trained(eager)}
    if softcap is None and sinks is None:
        calls |= {f"sdpa {backend.name.lower()}": trained(sdpa(backend)) for backend in BACKENDS[device]}
    versus(
        make_inputs,
        calls,
        check=check,
        bytes_moved=8 * case.B * case.H * case.L * case.D * case.dtype.itemsize,
        operations=14.0 * case.B * case.H * int(keep.sum()) * case.D,
    )
