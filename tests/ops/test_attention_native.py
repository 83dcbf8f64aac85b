"""Features of the C++ attention kernels alone: few queries, kept weights, and the eager fast paths."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attention_kernels import assert_same_bits, oracle, starts, wide
from test_attention_kernels import PARTS, documents, mask_of, part_of

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.reference.attention import attention as reference


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


BOUNDS = [(2040, 1900), (1030, 3), (None, 2000), (700, 640), (-100, -130), (5, 10), (-1, None), (None, 2050)]


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("mask", ["alone", "keep", "lengths", "bias", "large bias", "documents", "softcap"])
@pytest.mark.parametrize(("Lq", "H", "Hkv"), [(1, 4, 4), (2, 6, 2), (1, 1, 1)])
def test_few_queries_and_many_keys(Lq, H, Hkv, mask, causal, window, zero_empty_rows, dtype, kernels):
    parts = {
        "alone": {},
        "keep": {"keep": torch.rand(2, 1, Lq, 2050) > 0.3},
        "lengths": {"lengths": torch.randint(0, 2051, (2,), dtype=torch.int32)},
        "bias": {"bias": torch.randn(1, H, Lq, 2050).to(wide(dtype))},
        "large bias": {"bias": torch.randn(1, H, Lq, 1).to(wide(dtype)) * 4096},
        "documents": documents("in order", 2, Lq, 2050),
        "softcap": {"softcap": 2.0},
    }[mask]
    if mask == "large bias" and dtype == torch.float64:
        parts = {}  # with it the oracle's scores are rounded as much as the kernel's, so the oracle is not exact
    call = kernels.call(24, parts, causal=causal, window=window, dropout_p=0.1, zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.inputs(2, H, Hkv, Lq, 2050, 24, dtype), call)


@pytest.mark.parametrize("score", [3.0, 9.0, 20.0, 50.0, 90.0])
def test_few_queries_of_equal_scores(score, kernels):
    """Eager's scores and weights are exact there; a logsumexp is rounded, the more the larger it is."""
    q, k, v, grad_out = kernels.inputs(2, 2, 1, 2, 700, 16)
    q, k = torch.full_like(q, score), torch.zeros_like(k)
    k[..., 0] = 1.0
    kernels.check((q, k, v, grad_out), kernels.call(16, scale=1.0))


@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1), (17, 15), (65, 129), (129, 300)])
def test_weights_without_the_logsumexp(Lq, Lk, dtype, kernels):
    """Lengths at the edges of tiles; the last key is NaN."""
    q, k, v, grad_out = kernels.inputs(1, 2, 1, Lq, Lk, 9, dtype)
    call = kernels.call(9, lengths=torch.tensor([Lk - 1], dtype=torch.int32), zero_empty_rows=True)
    expected = kernels.check((q, k, v, grad_out), call)["weights"]
    k[..., -1, :] = math.nan
    weights = torch.ops.transformer_fast.attention_weights(q, k, **call.keywords())
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("Lq", [2, 70])
def test_a_window_over_all_keys_has_the_bits_of_none(Lq, kernels):
    tensors = kernels.inputs(2, 2, 1, Lq, 257, 16)
    expected = kernels.outcome(tensors, kernels.call(16, causal=200))
    for window in (-Lq, -(2**40), -(2**63)):
        found = kernels.outcome(tensors, kernels.call(16, causal=200, window=window))
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not kernels.outcome(tensors, kernels.call(16, window=2**63 - 1, zero_empty_rows=True))["out"].any()


def test_the_eager_fast_paths_take_a_window(kernels):
    doors, no_parts, no_more, options = (
        extension.module(),
        (None,) * 8,
        (None, None, False),
        (None, None, 0.0, None, False),
    )
    q, k, v, _ = kernels.inputs(1, 4, 2, 40, 70, 16)
    expected = reference(q, k, v, causal=20, window=5, scale=0.25)[0]
    padded = None, None, None, None, *no_more
    torch.testing.assert_close(doors.attention(False, q, k, v, 0, *no_parts, *padded, 20, 5, *options), expected)
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    packed = starts([40]), starts([70]), None, None, *no_more
    out = doors.attention(False, *tokens, 0, *no_parts, *packed, 20, 5, *options)
    torch.testing.assert_close(out.transpose(0, 1)[None], expected)
    out = doors.attention_decode(False, q, k, v, torch.tensor([60]), None, 0, -7, *(None,) * 6)
    torch.testing.assert_close(out, reference(q, k, v, causal=20, window=13, scale=0.25)[0])
    with pytest.raises(TypeError, match="attention: window must be an int, got '5'"):
        doors.attention(False, q, k, v, 0, *no_parts, *padded, 20, "5", *options)


def kept_weights(call, shape):
    """Return the result of ``call``, and its saved tensors with last sizes of at least ``shape``: weights and
    biases."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return result, [t for t in saved if t.dim() == 4 and t.shape[2] >= shape[0] and t.shape[3] == shape[1]]


def takes_pairs(dtype):
    """Return True if products of a dtype take pairs on this processor."""
    return dtype == torch.bfloat16 and extension.build_info()["instruction_set"] == "avx512_bf16"


def recorded(kernels, tensors, call, grad_logsumexp=None):
    """Run :meth:`Kernels.recorded` on a call that must keep its weights, in bfloat16 where products take pairs."""
    run = functools.partial(kernels.recorded, tensors, call, grad_logsumexp)
    found, kept = kept_weights(run, (tensors[0].shape[2], tensors[1].shape[2]))
    biases = call.bias.shape[:2] == tensors[0].shape[:2]
    count = sum(t.dtype == tensors[0].dtype and t.shape[:2] == tensors[0].shape[:2] for t in kept)
    assert (count > biases) == takes_pairs(tensors[0].dtype)
    return found


def a_bias(*shape, dtype=torch.float32):
    """Return a bias that blocks some keys."""
    return torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.1, -math.inf).to(dtype)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("Lq", "Lk"), [(70, 300), (64, 128), (17, 15), (41, 131), (3, 257)])
def test_gradients_from_kept_weights(Lq, Lk, masked, dtype, zero_empty_rows, kernels):
    parts = {"lengths": torch.tensor([0, Lk - 7], dtype=torch.int32), "causal": Lk - Lq} if masked else {}
    call = kernels.call(24, parts, bias=a_bias(1, 4, Lq, Lk, dtype=dtype), zero_empty_rows=zero_empty_rows)
    ulps = 8.0 * (max(Lq, Lk) ** 0.5 if dtype == torch.float64 else 1.0)
    tensors, way = kernels.inputs(2, 4, 2, Lq, Lk, 24, dtype), functools.partial(recorded, kernels)
    kernels.check(tensors, call, received=masked, way=way, grad_bias=2 * ulps)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mask", ["both sides", "last rows empty", "all"])
def test_gradients_by_autograd(mask, part, kernels):
    parts = mask_of(mask, 1, kernels.batch[1], *kernels.lengths) | part_of(part, kernels, torch.float32)
    tensors = kernels.inputs(1, *kernels.batch[1:], *kernels.lengths, 20)
    kernels.check(tensors, kernels.call(20, parts, dropout_p=0.2), way=kernels.recorded)


@pytest.mark.parametrize("Lk", [60, 140])  # one tile of keys, several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_blocked_key_may_hold_nan_beside_kept_weights(dtype, Lk, kernels):
    q, k, v, grad_out = kernels.inputs(2, 2, 2, 33, Lk, 20, dtype)
    bias = a_bias(2, 1, 33, Lk, dtype=dtype)
    bias[1, ..., 5] = -math.inf
    call = kernels.call(20, bias=bias, lengths=torch.tensor([Lk - 10, Lk], dtype=torch.int32))
    k[0, :, Lk - 10 :], v[0, :, Lk - 10 :], k[1, :, 5], v[1, :, 5] = math.nan, math.nan, math.nan, math.inf
    way = functools.partial(recorded, kernels)
    kernels.check((q, k, v, grad_out), call, received=False, way=way, grad_bias=16.0)


def test_a_bias_beside_a_softcap(kernels):
    """The bias gets its own gradient, not that of capped scores, and no weights are kept."""
    call = kernels.call(16, bias=torch.randn(1, 2, 40, 70), softcap=2.0)
    kernels.check(kernels.inputs(2, 2, 2, 40, 70, 16), call, way=kernels.recorded)


def test_a_row_pushed_down_as_a_whole_keeps_its_weights(kernels):
    """With -1e9 on a whole row, weights from the logsumexp would lose every digit."""
    call = kernels.call(16, bias=torch.full((1, 2, 40, 200), -1e9))
    way = functools.partial(recorded, kernels)
    kernels.check(kernels.inputs(2, 2, 2, 40, 200, 16), call, received=False, way=way, grad_bias=16.0)


def test_only_weights_that_pay_are_kept(dtype, kernels):
    q, k, v, _ = kernels.inputs(1, 2, 2, 40, 30, 8, dtype)
    bias = a_bias(1, 2, 40, 30, dtype=dtype)
    q.requires_grad_()

    def kept(q, bias, dropout_p=0.0):
        with tfast.backend("native"):
            found = kept_weights(lambda: tfast.attention(q, k, v, bias=bias, dropout_p=dropout_p), (q.shape[2], 30))[1]
        return any(bias is None or t.data_ptr() != bias.data_ptr() for t in found)

    assert kept(q, bias) == takes_pairs(dtype)
    assert not kept(q, bias, 0.1) and not kept(q, None) and not kept(q, bias[..., :1, :]) and not kept(q, bias[..., :1])
    assert not kept(q[:, :, :2], bias[:, :, :2])


@pytest.mark.parametrize("learned", [True, False])
def test_kept_weights_give_the_same_bits_again_and_on_any_number_of_threads(learned, kernels):
    q, k, v, grad_out = kernels.inputs(2, 2, 2, 70, 150, 16, torch.bfloat16)
    bias = a_bias(1, 2, 70, 150, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in ((q, k, v, bias) if learned else (q, k, v))]

    def twice():
        with tfast.backend("native"):
            out = tfast.attention(q, k, v, bias=bias)
        once, again = (torch.autograd.grad(out, leaves, grad_out, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, once, again))
        return once

    assert_same_bits(twice)


def test_a_blocked_nan_has_no_gradient_beside_a_bias(kernels):
    """The bias is shared by all heads, and blocked keys hold NaN."""
    q, k, v, grad_out = kernels.inputs(2, 4, 4, 33, 140, 20)
    call = kernels.call(20, key_keep=(torch.arange(140) < 130).view(1, 1, 1, 140), bias=torch.randn(2, 1, 33, 140))
    k[:, :, 130:], v[:, :, 130:] = math.nan, math.nan
    eager, exact = (oracle((q, k, v, grad_out), call, dtype, None) for dtype in (torch.float32, torch.float64))
    found = kernels.outcome((q, k, v, grad_out), call)["grad_bias"]
    bound = 2 * (eager["grad_bias"] - exact["grad_bias"]).abs().max() + 16 * 2**-23 * exact["grad_bias"].abs().max()
    assert (found - exact["grad_bias"]).abs().max() <= bound


@pytest.mark.parametrize("D", [16, 64, 96])
def test_a_gradient_over_many_queries_is_summed_tile_by_tile(D):
    """One long float32 sum over 16,384 equal terms is off by hundreds of units in the last place."""
    k, v = (torch.randn(1, 1, 3, D, requires_grad=True) for _ in range(2))
    grad = torch.full((1, 1, 16_384, D), 0.1)
    (found,) = torch.autograd.grad(tfast.attention(torch.zeros_like(grad), k, v), v, grad)
    exact = (grad.double().sum(2, keepdim=True) / 3).expand(v.shape)
    torch.testing.assert_close(found.double(), exact, rtol=16 * torch.finfo(torch.float32).eps, atol=0.0)
