"""Outputs of attention besides the result: weights, logsumexp, and the gradient of a bias.

Here on the backend that "auto" takes; tests/interpreter/test_attention_outputs.py runs the same on Triton.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import mask_parts

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.reference.attention import attention as reference
from transformer_fast.reference.dropout import attention_keep
from transformer_fast.testing import assert_as_exact_as_eager, fixed_dropout_seed

B, H, HKV, LQ, LK, D = 2, 4, 2, 9, 35, 8
P = 0.3
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def leaves(device, dtype=torch.float32):
    """Return q, k, v and a bias that blocks one key, as leaves, and a mask with an empty row."""
    generator = torch.Generator().manual_seed(3)
    shapes = (B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, D), (1, H, LQ, LK)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    tensors[3][..., 2] = -math.inf
    keep = mask_parts(B, H, LQ, LK, generator)["dense shared by heads"]["keep"]
    keep[1, :, 4] = False
    return [t.requires_grad_() for t in tensors], keep.to(device)


def double(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def gradients(outputs, inputs):
    """Return the gradients of a loss that weights every element of every output differently."""
    loss = 0
    for n, out in enumerate(outputs):
        number = torch.arange(out.numel(), device=out.device).view(out.shape)
        loss = loss + (torch.cos(number * 0.7 + n).to(torch.float64) * torch.where(out.isfinite(), out, 0.0)).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_logsumexp_and_its_gradient(dtype, device):
    tensors, keep = leaves(device, dtype)
    results = tfast.attention(*tensors[:3], keep, bias=tensors[3], return_logsumexp=True)
    assert len(results) == 2 and results[1].dtype == torch.float32 and results[1].shape == (B, H, LQ)
    assert (results[1][1, :, 4] == -math.inf).all()

    def oracle(q, k, v, bias):
        return reference(q, k, v, bias=bias, keep=keep, scale=D**-0.5)[::2]

    wide = double(tensors)
    for used in (slice(0, 2), slice(1, 2)):
        actual = gradients(results[used], tensors[:2] + tensors[3:]) if used.start else gradients(results, tensors)
        inputs, wide_inputs = (t[:2] + t[3:] if used.start else t for t in (tensors, wide))
        eager, exact = gradients(oracle(*tensors)[used], inputs), gradients(oracle(*wide)[used], wide_inputs)
        for a, e, x in zip(actual, eager, exact, strict=True):
            assert_as_exact_as_eager(a, e, x, what="gradient", ulps=16)
        results = tfast.attention(*tensors[:3], keep, bias=tensors[3], return_logsumexp=True)
    for a, e, x in zip(results, oracle(*tensors), oracle(*wide), strict=True):
        assert_as_exact_as_eager(a.detach(), e.detach(), x.detach(), what="result")


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("when", [True, "dropped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_before_and_after_dropout(when, dtype, empty_rows, device):
    tensors, keep = leaves(device, dtype)
    options = {"dropout_p": P, "empty_rows": empty_rows}

    def oracle(q, k, v, bias):
        out, weights, _ = reference(q, k, v, bias=bias, keep=keep, scale=D**-0.5, seed=seed.to(device), **options)
        if when == "dropped":
            kept = attention_keep(seed.to(device), P, B, H, LQ, LK)
            weights = torch.where(kept, weights / (1 - P), 0)
        return out, weights

    with fixed_dropout_seed(9) as seed:
        results = tfast.attention(*tensors[:3], keep, bias=tensors[3], return_weights=when, **options)
    plain = tfast.attention(*tensors[:3], keep, bias=tensors[3], empty_rows=empty_rows, return_logsumexp=True)
    assert results[1].dtype == dtype and results[1].shape == (B, H, LQ, LK)
    assert plain[0].shape == results[0].shape
    eager, wide = oracle(*tensors), double(tensors)
    exact = oracle(*wide)
    for name, a, e, x in zip(("out", "weights"), results, eager, exact, strict=True):
        assert_as_exact_as_eager(a.detach(), e.detach(), x.detach(), what=name, ulps=8)
    # A loss on the weights and on the output at once.
    actual, eager, exact = gradients(results, tensors), gradients(eager, tensors), gradients(exact, wide)
    for name, a, e, x in zip(("grad_q", "grad_k", "grad_v", "grad_bias"), actual, eager, exact, strict=True):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=32)


def test_everything_at_once_comes_in_order(device):
    tensors, keep = leaves(device)
    out, weights, logsumexp = tfast.attention(*tensors[:3], keep, return_weights=True, return_logsumexp=True)
    assert out.shape == (B, H, LQ, D) and weights.shape == (B, H, LQ, LK) and logsumexp.shape == (B, H, LQ)
    assert torch.allclose(weights.sum(-1), torch.ones_like(logsumexp), atol=1e-5)
    values = tensors[2].repeat_interleave(H // HKV, 1)
    assert torch.allclose(weights @ values, out, atol=1e-5)


def test_a_bias_may_be_part_of_the_mask(device):
    (q, k, v, bias), keep = leaves(device)
    mask = AttentionMask.keep(keep) & AttentionMask.bias(bias[0, 0]) & AttentionMask.bias(bias)
    expected = tfast.attention(q, k, v, keep, bias=bias + bias[0, 0])
    assert torch.equal(tfast.attention(q, k, v, mask), expected)
    assert torch.equal(
        tfast.attention(q, k, v, AttentionMask.keep(keep) & AttentionMask.bias(bias), bias=bias[0, 0]), expected
    )
    assert not mask.dense(LQ, LK)[..., 2].any()


@pytest.mark.parametrize("dropped", [True, "dropped"])
def test_weights_beside_the_short_way(dropped):
    """The extension's two calls for output and weights agree with the general path."""
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 1, 7, 8), torch.randn(2, 1, 7, 6)
    mask = AttentionMask.lengths(torch.tensor([7, 0])) & AttentionMask.causal(1)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    found = []
    for options in ({}, {"return_logsumexp": True}):
        torch.manual_seed(5)
        out, weights, *_ = tfast.attention(q, k, v, mask, dropout_p=0.3, return_weights=dropped, **options)
        loss = out.sum() + (weights * torch.linspace(0, 1, weights.numel()).view_as(weights)).sum()
        found.append((out, weights, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("queries", [1, LQ])  # few queries take other kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_minus_infinity_is_no_key(dtype, queries, empty_rows, device):
    """One of two query heads has a sink. A query without keys and without a sink gives 0, and has no gradient."""
    (q, k, v, bias), keep = leaves(device, dtype)
    q, bias = (t.detach()[:, :, :queries].clone().requires_grad_() for t in (q, bias))
    keep = keep[:, :, :queries].clone()
    keep[1, :, -1] = False
    masks = {"some keys": keep, "no length": AttentionMask.lengths(torch.tensor([LK, 0], device=device))}
    for name, mask in masks.items():
        sinks = torch.linspace(-1, 1, H, device=device)
        sinks[::2] = -math.inf
        sinks.requires_grad_()
        options = {"bias": bias, "return_logsumexp": True}
        ours = tfast.attention(q, k, v, mask, sinks=sinks, empty_rows=empty_rows, **options)
        plain = tfast.attention(q, k, v, mask, empty_rows="zero", **options)
        for of_sinks, without in zip(ours, plain, strict=True):
            torch.testing.assert_close(of_sinks[:, ::2], without[:, ::2], msg=lambda m, name=name: f"{name}: {m}")
        _, weights = tfast.attention(q, k, v, mask, sinks=sinks, empty_rows=empty_rows, bias=bias, return_weights=True)
        assert weights.isfinite().all() and not weights[1, ::2, -1].any()
        grads = gradients([out[:, ::2] for out in ours], (q, k, v, bias, sinks))
        expected = gradients([out[:, ::2] for out in plain], (q, k, v, bias))
        torch.testing.assert_close(grads[:4], expected, msg=lambda m, name=name: f"{name}: {m}")
        assert not grads[4].any(), name
        again = tfast.attention(q, k, v, mask, sinks=sinks, empty_rows=empty_rows, **options)
        grads = gradients(again, (q, k, v, bias, sinks))
        assert all(grad.isfinite().all() for grad in grads) and grads[4][1::2].all(), name


def test_a_sink_of_minus_infinity_is_no_key_of_the_reference(device):
    with tfast.backend("reference"):
        for queries in (1, LQ):
            test_a_sink_of_minus_infinity_is_no_key(torch.float32, queries, "uniform", device)


def test_a_sink_of_minus_infinity_in_packed_batches_and_caches(device):
    (q, k, v, _), _ = leaves(device)
    sinks = torch.full((H,), -math.inf, device=device, requires_grad=True)
    starts_q, starts_k = (torch.tensor([0, 0, n, n], dtype=torch.int32, device=device) for n in (LQ, LK))
    starts_q[1] = 4  # the first sequence has no keys
    packed = [t.detach()[0].transpose(0, 1).clone().requires_grad_() for t in (q, k, v)]
    out = tfast.attention_packed(*packed, starts_q, starts_k, sinks=sinks)
    expected = tfast.attention_packed(*packed, starts_q, starts_k, empty_rows="zero")
    torch.testing.assert_close(out, expected)
    grads = gradients([out], (*packed, sinks))
    torch.testing.assert_close(grads[:3], gradients([expected], packed))
    assert not out[:4].any() and not grads[3].any()
    lengths = torch.tensor([LK, 0], device=device)
    q, k, v, without = (t.detach() for t in (q[:, :, :1], k, v, sinks))
    with torch.no_grad():
        cached = tfast.attention_decode(q, k, v, lengths=lengths, sinks=without)
    torch.testing.assert_close(cached, tfast.attention_decode(q, k, v, lengths=lengths))


@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
def test_a_query_with_one_key_gives_no_gradient_to_its_score(grouped, device):
    """The weight of one key is 1, whatever the score. In eager PyTorch that gradient is exactly 0."""
    shapes = (B, H, LK, D), *((B, HKV if grouped else H, LK, D),) * 2
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    masks = AttentionMask.lengths(torch.tensor([LK, 1], device=device)), AttentionMask.causal()
    for mask, rows in zip(masks, (slice(1, None), slice(None)), strict=True):
        out = tfast.attention(q, k, v, mask)
        grad_q, grad_k, _ = gradients([out], (q, k, v))
        assert not grad_q[rows, :, :1].any()
        assert mask is masks[1] or not (grad_q[1].any() or grad_k[1].any())
        (grad_k,) = torch.autograd.grad(tfast.attention(q, k, v, mask)[rows, :, 0].square().sum(), k)
        assert not grad_k.any()
