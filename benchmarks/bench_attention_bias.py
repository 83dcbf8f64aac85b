"""Attention with an additive bias in training, without dropout: against eager and SDPA, fixed and learned biases."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast import reference

SMALL_CASE = "test_attention_bias[cpu-cpu-fixed-b2h8l16-float32]"


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences of L tokens, H heads of 64.

    ``bias``: "fixed", one for all sequences and no gradient (as ALiBi's); "shared", the same with its gradient (as
    T5's); "own", one for each sequence, with its gradient (as of a pair representation).
    """

    bias: str
    B: int
    L: int
    dtype: torch.dtype
    H: int = 8
    D: int = 64

    def __str__(self) -> str:
        return f"{self.bias}-b{self.B}h{self.H}l{self.L}-{str(self.dtype).removeprefix('torch.')}"


BIASES = ("fixed", "shared", "own")
SIZES = {"cpu": [(2, 16), (32, 64), (16, 128), (1, 512)], "cuda": [(256, 64), (64, 256), (4, 2048)]}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
CASES = [
    (device, Case(bias, *size, dtype))
    for device in SIZES
    for dtype in DTYPES[device]
    for bias in BIASES
    for size in SIZES[device]
]
BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


@pytest.mark.parametrize(("on", "case"), CASES, ids=str)
def test_attention_bias(versus, device, on, case):
    if on != device:
        pytest.skip(f"a case for {on}")
    scale = 1 / math.sqrt(case.D)

    def make_inputs():
        shape, batch = (case.B, case.H, case.L, case.D), case.B if case.bias == "own" else 1
        q, k, v, grad_out = (torch.randn(shape, device=device, dtype=case.dtype) for _ in range(4))
        bias = torch.randn(batch, case.H, case.L, case.L, device=device, dtype=case.dtype)
        leaves = [q, k, v] if case.bias == "fixed" else [q, k, v, bias]
        for leaf in leaves:
            leaf.requires_grad_()
        return q, k, v, bias, leaves, grad_out

    def trained(attend):
        def call(inputs):
            *tensors, leaves, grad_out = inputs
            out = attend(*tensors)
            return out, *torch.autograd.grad(out, leaves, grad_out)

        return call

    def eager(q, k, v, bias):
        return (q @ k.transpose(-2, -1) * scale + bias).softmax(-1) @ v

    def sdpa(backend):
        def attend(q, k, v, bias):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(case.B, -1, -1, -1))

        return attend

    def check(inputs):
        exact = trained(lambda q, k, v, bias: reference.attention.attention(q, k, v, bias=bias, scale=scale)[0])(inputs)
        tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
        for ours, expected in zip(calls["ours"](inputs), exact, strict=True):
            torch.testing.assert_close(ours, expected, atol=tolerance * expected.abs().max().item(), rtol=tolerance)

    calls = {"ours": trained(lambda q, k, v, bias: tfast.attention(q, k, v, bias=bias)), "eager": trained(eager)}
    calls |= {f"sdpa {backend.name.lower()}": trained(sdpa(backend)) for backend in BACKENDS}
    tensors = 8 * case.B * case.H * case.L * case.D
    scores = (1 if case.bias == "fixed" else 2) * (case.B if case.bias == "own" else 1) * case.H * case.L**2
    versus(
        make_inputs,
        calls,
        check=check,
        bytes_moved=(tensors + scores) * case.dtype.itemsize,
        operations=14.0 * case.B * case.H * case.L**2 * case.D,
    )
