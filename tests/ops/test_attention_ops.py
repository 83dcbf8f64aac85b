"""Ops of attention under torch's checks: opcheck, gradcheck, second derivatives, autocast and compilation."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import SEED, starts

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.testing import fixed_dropout_seed

OPS, CHECK = torch.ops.transformer_fast, torch.library.opcheck
OPTIONS = {"causal": 2, "window": -3, "scale": 0.3, "dropout_p": 0.1, "seed": SEED}


def test_nothing_received_has_no_gradient_of_a_bias():
    q, k, bias = torch.empty(2, 2, 0, 8), torch.randn(2, 2, 9, 8), torch.randn(1, 2, 1, 9)
    results = q, q, k, k, q, torch.empty(2, 2, 0), None, None
    needs = [False, False, False, True, False, False]
    grad_bias = OPS.attention_backward(*results, needs, bias=bias, **OPTIONS)[3]
    assert grad_bias.shape == bias.shape and grad_bias.eq(0).all()


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradcheck_in_double(empty_rows):
    q, k, v = (torch.randn(2, n, h, 4, dtype=torch.float64).transpose(1, 2) for n, h in ((3, 2), (5, 1), (5, 1)))
    bias = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    keep = AttentionMask.keep(torch.rand(2, 1, 3, 5) > 0.5) & AttentionMask.lengths(torch.tensor([5, 0]))
    for mask in (
        keep,
        AttentionMask.window(1, 1),
        AttentionMask.lengths(torch.tensor([0, 4])) & AttentionMask.causal(1),
    ):

        def call(q, k, v, bias, mask=mask):
            return tfast.attention(q, k, v, mask, bias=bias, dropout_p=0.2, empty_rows=empty_rows)

        with fixed_dropout_seed(1):
            assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (q, k, v, bias)])


def test_gradcheck_of_packed_in_double():
    q, k, v = (torch.randn(n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (5, 4, 4))

    def call(q, k, v):
        return tfast.attention_packed(q, k, v, starts([2, 0, 3]), starts([3, 1, 0]), causal=True, dropout_p=0.2)

    with fixed_dropout_seed(1):
        assert torch.autograd.gradcheck(call, (q, k, v))


def calls(device):
    """Return q, k, v and a function of them, per public function."""
    q, k, v = (torch.randn(2, 3, 6, 8, device=device) for _ in range(3))
    lengths, ends = torch.tensor([6, 3], device=device), starts([2, 0, 4]).to(device)
    mask = AttentionMask.lengths(lengths)
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    return {
        "attention": ((q, k, v), lambda *t: tfast.attention(*t, mask, causal=True)),
        "packed": (
            tokens,
            lambda *t: tfast.attention_packed(*t, ends, ends, max_seqlen_q=4, max_seqlen_k=4, causal=True),
        ),
        "decode": ((q, k, v), lambda *t: tfast.attention_decode(*t, lengths)),
    }


@pytest.mark.parametrize("name", ["attention", "packed", "decode"])
def test_autocast_runs_in_its_dtype(name, device):
    (q, k, v), call = calls(device)[name]
    if name != "decode":
        q.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        out, mixed = call(q, k, v), call(q, k.bfloat16(), v)
    expected = call(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(out, expected) and torch.equal(mixed, expected) and out.dtype == torch.bfloat16
    if name != "decode":
        out.sum().backward()
        assert q.grad.dtype == torch.float32
