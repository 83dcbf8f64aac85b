"""The gradient of an additive bias, by Triton, against the fp64 oracle: every shape a bias is broadcast from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from attention_calls import DTYPES, call_of, inputs, random, reference_call, window_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.reference.attention import attention as reference
from transformer_fast.triton.attention import grad_bias as module
from transformer_fast.triton.attention import grad_scores
from transformer_fast.triton.attention.forward import attention_forward
from transformer_fast.triton.attention.grad_bias import attention_grad_bias

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

DIALECTS = list(mask_parts(1, 1, 1, 1, torch.Generator()))
B, H, LQ, LK, D = 2, 2, 37, 40, 20
SHAPES = {
    "full": (B, H, LQ, LK),
    "T5": (1, H, LQ, LK),
    "ALiBi over keys": (1, H, 1, LK),
    "ALiBi over queries": (1, H, LQ, 1),
    "of a batch": (B, 1, 1, 1),
    "of heads and batches": (B, H, 1, LK),
    "shared": (1, 1, LQ, LK),
    "one number": (1, 1, 1, 1),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 32 x 32 and few programs, so that small shapes have many of both, and steps to share."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, (32, 32, 4)))
        monkeypatch.setattr(grad_scores, "ROW_TILES", dict.fromkeys(module.TILES, (32, 32, 4)))
        monkeypatch.setattr(module, "PROGRAMS", 12)


def kernel(q, k, v, grad, call, grad_logsumexp=None):
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    return attention_grad_bias(grad, q, k, v, out, logsumexp, call, grad_logsumexp)


def oracle(q, k, v, grad, call, dtype, grad_logsumexp=None):
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    bias = call.bias.cpu().to(torch.promote_types(dtype, call.bias.dtype)).requires_grad_()
    out, _, logsumexp = reference(q, k, v, **reference_call(replace(call, bias=bias)))
    outputs, gradients = (out,), (grad.cpu().to(dtype),)
    if grad_logsumexp is not None:
        outputs, gradients = (*outputs, logsumexp), (*gradients, grad_logsumexp.cpu().to(logsumexp.dtype))
    return torch.autograd.grad(outputs, bias, gradients)[0]


def check(q, k, v, grad, call, grad_logsumexp=None):
    ours = kernel(q, k, v, grad, call, grad_logsumexp).cpu()
    bias = call.bias
    assert ours.dtype == bias.dtype
    exact = oracle(q, k, v, grad, call, torch.float64, grad_logsumexp)
    eager = oracle(q, k, v, grad, call, q.dtype, grad_logsumexp).to(bias.dtype)
    # Sums over all that the bias is broadcast over, of terms rounded (through `out`) to q's type.
    behind = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / bias.numel()
    coarser = max(1.0, torch.finfo(q.dtype).eps / torch.finfo(bias.dtype).eps)
    if bias.shape[3] == 1 and grad_logsumexp is None:
        # A softmax does not see what is added to all its scores: these gradients are 0, by terms that cancel.
        full = replace(call, bias=bias.expand(*q.shape[:3], k.shape[2]))
        terms = oracle(q, k, v, grad, full, torch.float64).abs().max()
        assert ours.abs().max() <= 4.0 * behind**0.5 * coarser * torch.finfo(bias.dtype).eps * terms
    else:
        assert_as_exact_as_eager(ours, eager, exact, ulps=4.0 * behind**0.5 * coarser, what=f"grad of {bias.shape}")
    return ours


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(2))["all"]
    call = call_of(mask | {"bias": random(*SHAPES[name], seed=9)}, D, dropout_p=0.3)
    check(*inputs(B, H, 2, LQ, LK, D, torch.float32), call)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_mask(dialect):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    zero_empty_rows = DIALECTS.index(dialect) % 2 == 0
    call = call_of(mask | {"bias": random(1, H, LQ, LK, seed=9)}, D, zero_empty_rows=zero_empty_rows, dropout_p=0.2)
    check(*inputs(B, H, 1, LQ, LK, D, torch.float32), call)


@pytest.mark.parametrize("name", ["both sides", "last rows empty"])
@pytest.mark.parametrize("magnitude", [1.0, 60.0])
def test_windows(name, magnitude):
    """The large scores take the way on which rows are summed again."""
    q, *rest = inputs(B, H, 1, 70, 100, D, torch.float32)
    call = window_call(name, D, {"bias": random(1, H, 70, 100, seed=9)})
    check(q * magnitude, *rest, call)


@pytest.mark.parametrize(("dtype", "bias_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_dtypes(dtype, bias_dtype):
    check(*inputs(2, 2, 2, 33, 40, 16, dtype), call_of({"bias": random(1, 2, 33, 40, dtype=bias_dtype, seed=9)}, 16))


@pytest.mark.parametrize(("Lq", "Lk", "D"), [(1, 1, 1), (1, 129, 8), (65, 17, 40), (15, 64, 128), (3, 40, 256)])
def test_shapes_that_break_kernels(Lq, Lk, D):
    for shape in ((1, 2, Lq, Lk), (2, 1, 1, Lk), (1, 1, Lq, 1)):
        call = call_of({"bias": random(*shape, seed=9), "causal": Lk - Lq}, D)
        check(*inputs(2, 2, 1, Lq, Lk, D, torch.float32), call)


@pytest.mark.parametrize("shape", [(1, 2, 33, 40), (1, 2, 33, 1)], ids=str)
def test_gradient_of_the_logsumexp(shape):
    call = call_of({"bias": random(*shape, seed=9), "causal": -2}, 16, dropout_p=0.1)
    check(*inputs(2, 2, 1, 33, 40, 16, torch.float32), call, random(2, 33, 2, seed=8).transpose(1, 2))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16], ids=str)
def test_blocked_and_huge_entries(bias_dtype):
    """-inf blocks and gets 0; a row of -1e9 (or the type's lowest) keeps its softmax, whose logsumexp lost it."""
    bias = random(1, 2, 33, 40, dtype=bias_dtype, seed=9)
    bias[:, 1, 6] = torch.finfo(bias_dtype).min
    bias[:, 1, 7] = max(-1e9, torch.finfo(bias_dtype).min)
    bias[:, :, :, 3] = -torch.inf
    bias[:, 0, 5] = -torch.inf
    gradient = check(*inputs(2, 2, 1, 33, 40, 16, torch.float32), call_of({"bias": bias}, 16, dropout_p=0.2))
    assert (gradient[:, :, :, 3] == 0).all() and (gradient[:, 0, 5] == 0).all()


def test_strided():
    q = random(2, 20, 2, 24).transpose(1, 2)
    k = random(2, 2, 80, 27, seed=1)[:, :, ::2, 3:]
    v = random(1, 1, 40, 24, seed=2).expand(2, 2, 40, 24)
    grad = random(1, 1, 1, 1, seed=3).expand(2, 2, 20, 24)
    bias = random(40, 20, 2, seed=4).permute(2, 1, 0).unsqueeze(0)
    check(q, k, v, grad, call_of({"bias": bias}, 24))
    check(q, k, v, grad, call_of({"bias": bias.expand(2, 2, 20, 40)}, 24))


def test_blocked_keys_do_not_leak():
    q, k, v, grad = inputs(1, 2, 1, 40, 50, 16, torch.float32)
    bias = random(1, 2, 40, 50, seed=9)
    for mask in ({"lengths": torch.tensor([35], dtype=torch.int32)}, {"causal": -5}):
        call = call_of(mask | {"bias": bias}, 16)
        clean = kernel(q, k, v, grad, call)
        dirty_k, dirty_v = k.clone(), v.clone()
        dirty_k[:, :, 35:] = torch.nan
        dirty_v[:, :, 35:] = torch.inf
        if "causal" in mask:  # the five first rows are empty and uniform
            call = replace(call, zero_empty_rows=True)
        assert torch.equal(kernel(q, dirty_k, dirty_v, grad, call), clean)


def test_two_runs_agree_bit_for_bit():
    mask = mask_parts(2, 2, 34, 40, torch.Generator().manual_seed(3))["all"]
    call = call_of(mask | {"bias": random(1, 2, 1, 40, seed=9)}, 32, dropout_p=0.2)
    tensors = inputs(2, 2, 1, 34, 40, 32, torch.float16)
    assert torch.equal(kernel(*tensors, call), kernel(*tensors, call))


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_do(B, Lq, Lk):
    gradient = kernel(*inputs(B, 2, 1, Lq, Lk, 8, torch.float32), call_of({"bias": random(1, 2, 1, 1)}, 8))
    assert gradient.shape == (1, 2, 1, 1) and (gradient == 0).all()
