"""Weights computed again from the logsumexp, by Triton, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch
from attention_calls import DTYPES, call_of, inputs, random, reference_call, window_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.reference.attention import attention as reference
from transformer_fast.reference.dropout import attention_keep
from transformer_fast.triton.attention.forward import attention_forward
from transformer_fast.triton.attention.weights import attention_weights

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

DIALECTS = list(mask_parts(1, 1, 1, 1, torch.Generator()))


def kernel(q, k, v, call):
    _, logsumexp = attention_forward(q, k, v, call)[:2]
    return attention_weights(q, k, logsumexp, call)


def oracle(q, k, v, call, dtype):
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    weights = reference(q, k, v, **reference_call(call))[1]
    if call.seed is not None:
        kept = attention_keep(call.seed.cpu(), call.dropout_p, *weights.shape)
        weights = (weights / (1.0 - call.dropout_p)).masked_fill(~kept, 0.0)
    return weights


def check(q, k, v, call):
    ours = kernel(q, k, v, call).cpu()
    assert ours.dtype == q.dtype and ours.is_contiguous()
    exact = oracle(q, k, v, call, torch.float64)
    assert_as_exact_as_eager(ours, oracle(q, k, v, call, q.dtype), exact, what="weights")
    assert torch.equal(ours == 0, exact.to(q.dtype) == 0)
    return ours


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_mask(dialect, zero_empty_rows):
    B, H, Lq, Lk, D = 2, 2, 37, 70, 20
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(1))[dialect]
    check(*inputs(B, H, 1, Lq, Lk, D, torch.float32)[:3], call_of(mask, D, zero_empty_rows=zero_empty_rows))


@pytest.mark.parametrize("dialect", ["none", "dense"])
@pytest.mark.parametrize("name", ["causal", "ahead", "last rows empty"])
def test_windows(name, dialect):
    B, H, Lq, Lk, D = 2, 2, 70, 100, 16
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(1))[dialect]
    tensors = inputs(B, H, 1, Lq, Lk, D, torch.float32)[:3]
    check(*tensors, window_call(name, D, mask, dropout_p=0.2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dialect", ["none", "causal, first rows empty", "all"])
def test_after_dropout(dialect, dtype):
    B, H, Lq, Lk, D = 2, 2, 70, 80, 16
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(2))[dialect]
    check(*inputs(B, H, H, Lq, Lk, D, dtype)[:3], call_of(mask, D, dropout_p=0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("Lq", "Lk", "D"), [(1, 1, 1), (1, 129, 8), (65, 17, 40), (15, 64, 128), (3, 40, 256)])
def test_shapes_that_break_kernels(Lq, Lk, D, dtype):
    q = random(1, Lq, 2, D, dtype=dtype).transpose(1, 2)
    k, v = inputs(1, 2, 2, Lq, Lk, D, dtype)[1:3]
    check(q, k, v, call_of({"causal": Lk - Lq}, D))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale(scale):
    check(*inputs(1, 2, 1, 20, 40, 16, torch.float32)[:3], call_of({"causal": 20}, 16, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_beside_which_the_logsumexp_loses_its_digits(dtype):
    """-1e9 on a whole row: its logsumexp in fp32 cannot tell how many keys there are, and the weights must."""
    bias = random(2, 1, 33, 40, seed=9)
    bias[:, :, 5] = -1e9
    bias[:, :, 6, :30] = -torch.inf
    bias[:, :, 7] = -torch.inf
    weights = check(*inputs(2, 2, 1, 33, 40, 16, dtype)[:3], call_of({"bias": bias}, 16))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 33, dtype=dtype), rtol=0, atol=40 * 2**-8)


@pytest.mark.parametrize("part", ["padding", "lengths", "causal", "dense"])
def test_blocked_keys_do_not_leak(part):
    B, H, Lq, Lk, D = 1, 2, 40, 50, 16
    keep = torch.ones(1, 1, Lq, Lk, dtype=torch.bool)
    keep[..., 40:] = False
    mask = {
        "padding": {"key_keep": keep[:, :, :1]},
        "lengths": {"lengths": torch.tensor([40], dtype=torch.int32)},
        "causal": {"causal": 0},
        "dense": {"keep": keep},
    }[part]
    q, k, v, _ = inputs(B, H, 1, Lq, Lk, D, torch.float32)
    clean = kernel(q, k, v, call_of(mask, D))
    k[:, :, 40:] = torch.nan
    assert torch.equal(kernel(q, k, v, call_of(mask, D)), clean)


def test_two_runs_agree_bit_for_bit():
    B, H, Lq, Lk, D = 1, 2, 40, 70, 16
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(3))["all"]
    tensors, call = inputs(B, H, 2, Lq, Lk, D, torch.float16)[:3], call_of(mask, D, dropout_p=0.2)
    assert torch.equal(kernel(*tensors, call), kernel(*tensors, call))


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_do(B, Lq, Lk):
    assert kernel(*inputs(B, 2, 1, Lq, Lk, 8, torch.float32)[:3], call_of({}, 8)).shape == (B, 2, Lq, Lk)
