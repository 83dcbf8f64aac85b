"""What the C++ attention kernels give beside the output: the gradient that comes in through the logsumexp, that of an
additive bias, and the weights."""

import math

import pytest
import torch
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast import extension
from transformer_fast.reference.attention import attention as reference
from transformer_fast.reference.dropout import attention_keep

SEED = torch.tensor([-987_654_321_987], dtype=torch.int64)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MASKS = list(mask_parts(1, 1, 1, 1, torch.Generator()))


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


def inputs(B, H, Hkv, Lq, Lk, D, dtype):
    """q, k, v and the gradient of the output."""
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def tail(parts, D, dropout_p, empty_rows):
    named = (parts.get(name) for name in ("keep", "key_keep", "lengths", "bias", "causal", "window"))
    return *named, 1 / math.sqrt(D), dropout_p, SEED if dropout_p else None, empty_rows == "zero", "native"


def oracle(q, k, v, parts, dropout_p, empty_rows, dtype):
    """Leaves, output, weights and logsumexp of the reference in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    if parts.get("bias") is not None:
        parts = {**parts, "bias": parts["bias"].to(dtype)}
    options = {"scale": 1 / math.sqrt(q.shape[-1]), "dropout_p": dropout_p, "seed": SEED, "empty_rows": empty_rows}
    return leaves, *reference(*leaves, **parts, **options)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("Lq, Lk", [(70, 150), (33, 40), (2, 150), (1, 40)])
def test_gradient_through_the_logsumexp(Lq, Lk, dtype, empty_rows):
    q, k, v, grad_out = inputs(2, 4, 2, Lq, Lk, 24, dtype)
    parts = {"lengths": torch.tensor([0, Lk - 7], dtype=torch.int32), "causal": Lk - Lq}
    options = tail(parts, 24, 0.1, empty_rows)
    ops = torch.ops.transformer_fast
    out, logsumexp = ops.attention(q, k, v, *options)
    grad_logsumexp = torch.randn_like(logsumexp)
    actual = ops.attention_backward(grad_out, q, k, v, out, logsumexp, grad_logsumexp, *options)
    without = ops.attention_backward(grad_out, q, k, v, out, logsumexp, None, *options)

    def gradients(wide):
        leaves, out, _, logsumexp = oracle(q, k, v, parts, 0.1, empty_rows, wide)
        return torch.autograd.grad(
            (out, logsumexp), leaves, (grad_out.to(wide), grad_logsumexp.to(logsumexp.dtype)), materialize_grads=True
        )

    for name, a, e, x in zip("qkv", actual, gradients(dtype), gradients(torch.float64)):
        ulps = 8.0 if dtype != torch.float64 else 8.0 * Lk**0.5
        assert_as_exact_as_eager(a, e, x, what=f"gradient of {name}", ulps=ulps)
    assert not torch.equal(actual[0], without[0]) and torch.equal(actual[2], without[2])
    assert actual[0][0].eq(0).all(), "an empty row has no gradient"


BIASES = [(2, 4, 70, 150), (1, 4, 70, 150), (1, 4, 1, 150), (2, 1, 70, 1), (1, 1, 70, 150), (1, 1, 1, 1)]


def bias_gradients(tensors, parts, bias, dropout_p=0.1, empty_rows="uniform", grad_logsumexp=False):
    """(actual, eager, exact) gradients of the bias."""
    q, k, v, grad_out = tensors
    D = q.shape[-1]
    parts = {**parts, "bias": bias}
    options = tail(parts, D, dropout_p, empty_rows)
    ops = torch.ops.transformer_fast
    out, logsumexp = ops.attention(q, k, v, *options)
    received = torch.randn_like(logsumexp) if grad_logsumexp else None
    actual = ops.attention_grad_bias(grad_out, q, k, v, out, logsumexp, received, *options)

    def of(dtype):
        leaf = bias.detach().to(dtype).requires_grad_()
        wide = [t.to(dtype) for t in (q, k, v)]
        same = {"scale": D**-0.5, "dropout_p": dropout_p, "seed": SEED, "empty_rows": empty_rows}
        out, _, logsumexp = reference(*wide, **{**parts, "bias": leaf}, **same)
        if received is None:
            return torch.autograd.grad(out, leaf, grad_out.to(dtype))[0]
        return torch.autograd.grad((out, logsumexp), leaf, (grad_out.to(dtype), received.to(logsumexp.dtype)))[0]

    return actual, of(q.dtype), of(torch.float64)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", BIASES)
def test_gradient_of_a_bias_of_any_shape(shape, dtype, empty_rows):
    bias = torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.1, -math.inf).to(dtype)
    parts = {"lengths": torch.tensor([0, 133], dtype=torch.int32), "causal": 80}
    tensors = inputs(2, 4, 2, 70, 150, 24, dtype)
    actual, eager, exact = bias_gradients(tensors, parts, bias, empty_rows=empty_rows, grad_logsumexp=True)
    assert actual.shape == bias.shape and actual.dtype == dtype
    summed = 2 * 4 * 70 * 150 / bias.numel()
    assert_as_exact_as_eager(actual, eager, exact, what="gradient of the bias", ulps=8.0 * max(summed, 150) ** 0.5)


@pytest.mark.parametrize("mask", MASKS)
def test_gradient_of_a_bias_under_every_mask(mask):
    parts = mask_parts(2, 4, 33, 140, torch.Generator().manual_seed(5))[mask]
    tensors = inputs(2, 4, 4, 33, 140, 20, torch.float32)
    tensors[1][0, :, 130:], tensors[2][0, :, 130:] = math.nan, math.nan
    key_keep = torch.ones(2, 1, 1, 140, dtype=torch.bool)
    key_keep[0, ..., 130:] = False
    parts = {**parts, "key_keep": parts.get("key_keep", key_keep) & key_keep}
    actual, eager, exact = bias_gradients(tensors, parts, torch.randn(2, 1, 33, 140))
    assert_as_exact_as_eager(actual, eager, exact, what="gradient of the bias", ulps=16.0)


def test_gradient_of_a_bias_of_another_dtype_and_of_nothing():
    q, k, v, grad_out = inputs(2, 2, 2, 5, 9, 8, torch.bfloat16)
    assert bias_gradients((q, k, v, grad_out), {}, torch.randn(1, 2, 5, 9))[0].dtype == torch.float32
    nothing = torch.empty(2, 2, 0, 8)
    options = tail({"bias": torch.randn(1, 2, 1, 9)}, 8, 0.0, "uniform")
    arguments = nothing, nothing, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8), nothing, torch.empty(2, 2, 0)
    assert torch.ops.transformer_fast.attention_grad_bias(*arguments, None, *options).eq(0).all()


@pytest.mark.parametrize("Lq", [2, 40])
def test_a_row_pushed_down_as_a_whole_keeps_its_gradients(Lq):
    # A blocked mask added as -1e9, as TensorFlow's tutorial does: the logsumexp keeps no digit of the number of keys.
    q, k, v, grad_out = inputs(2, 2, 2, Lq, 200, 16, torch.float32)
    bias = torch.full((2, 1, 1, 200), -1e9)
    bias[1, ..., :150] = -3000.0
    options = tail({"bias": bias}, 16, 0.0, "uniform")
    ops = torch.ops.transformer_fast
    out, logsumexp = ops.attention(q, k, v, *options)
    actual = ops.attention_backward(grad_out, q, k, v, out, logsumexp, None, *options)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves, out, *_ = oracle(q, k, v, {"bias": bias}, 0.0, "uniform", dtype)
        gradients.append(torch.autograd.grad(out, leaves, grad_out.to(dtype)))
    for name, a, e, x in zip("qkv", actual, *gradients):
        assert_as_exact_as_eager(a, e, x, what=f"gradient of {name}")
    weights = ops.attention_weights(q, k, logsumexp, *options)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, Lq))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", MASKS)
def test_weights(mask, dtype, dropout_p):
    parts = mask_parts(2, 4, 70, 150, torch.Generator().manual_seed(3))[mask]
    q, k, v, _ = inputs(2, 4, 2, 70, 150, 24, dtype)
    for empty_rows in ("uniform", "zero"):
        options = tail(parts, 24, dropout_p, empty_rows)
        ops = torch.ops.transformer_fast
        logsumexp = ops.attention(q, k, v, *options)[1]
        actual = ops.attention_weights(q, k, logsumexp, *options)
        assert actual.dtype == dtype
        eager, exact = (oracle(q, k, v, parts, 0.0, empty_rows, wide)[2].detach() for wide in (dtype, torch.float64))
        if dropout_p > 0:
            kept = attention_keep(SEED, dropout_p, 2, 4, 70, 150)
            assert actual[~kept].eq(0).all()
            eager, exact = (t * kept / (1 - dropout_p) for t in (eager, exact))
        ulps = 8.0 if dtype != torch.float64 else 100.0
        assert_as_exact_as_eager(actual, eager, exact, what="weights", ulps=ulps)


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (17, 15), (65, 129), (129, 300)])
def test_weights_at_the_edges_of_tiles(Lq, Lk):
    q, k, v, _ = inputs(1, 2, 1, Lq, Lk, 9, torch.bfloat16)
    k[..., -1, :] = math.nan
    parts = {"lengths": torch.tensor([Lk - 1], dtype=torch.int32)}
    actual = torch.ops.transformer_fast.attention_weights(q, k, None, *tail(parts, 9, 0.0, "zero"))
    eager, exact = (oracle(q, k, v, parts, 0.0, "zero", wide)[2].detach() for wide in (q.dtype, torch.float64))
    assert_as_exact_as_eager(actual, eager, exact, what="weights")


def test_extras_give_the_same_bits_with_any_number_of_threads():
    tensors = inputs(2, 2, 1, 150, 300, 20, torch.float32)
    bias = torch.randn(1, 2, 150, 300)
    options = tail({"bias": bias}, 20, 0.1, "uniform")
    ops = torch.ops.transformer_fast
    q, k, v, grad_out = tensors
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, logsumexp = ops.attention(q, k, v, *options)
            grad = ops.attention_grad_bias(grad_out, q, k, v, out, logsumexp, None, *options)
            runs.append((grad, ops.attention_weights(q, k, logsumexp, *options)))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))
