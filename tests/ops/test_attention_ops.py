"""Ops of attention under torch's checks: opcheck, gradcheck, second derivatives, autocast and compilation."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import SEED, assert_no_second_derivative, starts

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.testing import fixed_dropout_seed

OPS, CHECK = torch.ops.transformer_fast, torch.library.opcheck
OPTIONS = (2, -3, 0.3, 0.1, SEED, False)
MASKS = {
    "no mask": (None, None, None),
    "masks": (torch.rand(2, 1, 5, 7) > 0.3, None, torch.tensor([7, 2], dtype=torch.int32)),
}
BIASES = {"no bias": None, "a bias": torch.randn(1, 3, 1, 7), "a bias of all": torch.randn(1, 3, 5, 7)}


@pytest.mark.cover("values")
@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_opcheck(mask, bias, transposed, received):
    q, k, v = (torch.randn(2, n, 3, 8).transpose(1, 2) for n in (5, 7, 7))
    q, k, v = (q, k, v) if transposed else (t.contiguous() for t in (q, k, v))
    parts = *MASKS[mask], BIASES[bias]
    CHECK(OPS.attention.default, (*(t.clone().requires_grad_() for t in (q, k, v)), *parts, *OPTIONS))
    out, logsumexp = OPS.attention(q, k, v, *parts, *OPTIONS)
    results = torch.randn_like(out), q, k, v, out, logsumexp, torch.randn_like(logsumexp) if received else None
    CHECK(OPS.attention_backward.default, (*results, *parts, *OPTIONS))
    CHECK(OPS.attention_weights.default, (q, k, logsumexp, *parts, *OPTIONS))
    if parts[3] is not None:
        CHECK(OPS.attention_grad_bias.default, (*results, *parts, *OPTIONS))


PACKED = {
    "plain": (None, False, None, None),
    "bias": (torch.tensor([2, 1, 0]).int(), True, torch.randn(2, 6), torch.tensor([0, 6, 6, 6])),
}
"""Arguments seqused_k, bottom_right, bias and bias_starts."""


@pytest.mark.cover("values")
@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("parts", PACKED)
def test_opcheck_of_packed(parts, received):
    q, k, v = (torch.randn(n, 2, 8) for n in (5, 4, 4))
    options = starts([2, 0, 3]), starts([3, 1, 0]), 3, 3, *PACKED[parts], *OPTIONS
    CHECK(OPS.attention_packed.default, (*(t.clone().requires_grad_() for t in (q, k, v)), *options))
    out, logsumexp = OPS.attention_packed(q, k, v, *options)
    results = torch.randn_like(out), q, k, v, out, logsumexp, torch.randn_like(logsumexp) if received else None
    CHECK(OPS.attention_packed_backward.default, (*results, *options))
    if parts == "bias":
        CHECK(OPS.attention_packed_grad_bias.default, (*results, *options))


def test_opcheck_of_decode():
    q, k, lengths = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 6, 8), torch.tensor([6, 3], dtype=torch.int32)
    table, pages = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), k.transpose(1, 2)
    for cache, own_table, window in ((k, None, -3), (pages, table, None)):
        CHECK(OPS.attention_decode.default, (q, cache, cache, lengths, own_table, 0, window, 0.3))


def test_nothing_received_has_no_gradient_of_a_bias():
    q, k, bias = torch.empty(2, 2, 0, 8), torch.randn(2, 2, 9, 8), torch.randn(1, 2, 1, 9)
    results = q, q, k, k, q, torch.empty(2, 2, 0), None
    assert OPS.attention_grad_bias(*results, None, None, None, bias, *OPTIONS).eq(0).all()


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


def test_a_second_derivative_is_refused_by_the_kernels_and_given_by_the_reference():
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert_no_second_derivative(tfast.attention, q, k, v)
    tokens, ends = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True), starts([2, 3])
    assert_no_second_derivative(lambda q: tfast.attention_packed(q, q, q, ends, ends), tokens)


def calls(device):
    """Return q, k, v and a function of them, per public function."""
    q, k, v = (torch.randn(2, 3, 6, 8, device=device) for _ in range(3))
    lengths, ends = torch.tensor([6, 3], device=device), starts([2, 0, 4]).to(device)
    mask = AttentionMask.lengths(lengths)
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    return {
        "attention": ((q, k, v), lambda *t: tfast.attention(*t, mask, causal=True)),
        "packed": (tokens, lambda *t: tfast.attention_packed(*t, ends, ends, max_q=4, max_k=4, causal=True)),
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


def test_packed_compiles_without_a_graph_break(device):
    """Forward and backward. test_compile.py has padded attention, test_compile_offsets.py decoding."""
    given, call = calls(device)["packed"]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), call(*given), atol=1e-6, rtol=0)
    leaves = [t.requires_grad_() for t in given]
    grads = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, call))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=0)
