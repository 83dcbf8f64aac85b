"""The gradient of a bias by distance, by Triton, against the fp64 oracle; padded and packed."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from attention_calls import DEVICE, DTYPES, call_of, inputs, random, reference_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.attention_params import PackedBatch
from transformer_fast.reference.attention import attention as reference
from transformer_fast.reference.attention import attention_packed
from transformer_fast.triton.attention import grad_distance_bias as module
from transformer_fast.triton.attention import grad_scores
from transformer_fast.triton.attention.forward import attention_forward
from transformer_fast.triton.attention.grad_distance_bias import attention_grad_distance_bias

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

DIALECTS = list(mask_parts(1, 1, 1, 1, torch.Generator()))
B, H, LQ, LK, D = 2, 2, 70, 45, 16


@pytest.fixture(autouse=True, params=[(64, 32), (32, 32)], ids=str)
def small_tiles(monkeypatch, device, request):
    """On CPU, both shapes of tiles, and few programs, so that the batches are shared out."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, (*request.param, 4)))
        monkeypatch.setattr(grad_scores, "ROW_TILES", dict.fromkeys(grad_scores.ROW_TILES, (32, 32, 4)))
        monkeypatch.setattr(module, "PROGRAMS", 12)


def table(*shape: int, Lq: int = LQ, Lk: int = LK) -> torch.Tensor:
    distance = torch.arange(Lq + Lk - 1, device=DEVICE) - (Lq - 1)
    return random(*shape, Lq + Lk - 1, seed=11) - 0.05 * distance.abs()


def oracle(q, k, v, grad, call, dtype, grad_logsumexp=None):
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    bias = call.distance_bias.cpu().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    options = reference_call(call) | {"distance_bias": bias}
    if call.packed is None:
        out, _, logsumexp = reference(q, k, v, **options)
    else:
        for part in ("keep", "key_keep", "lengths", "bias", "empty_rows"):
            del options[part]
        places = dataclasses.asdict(call.packed)
        places = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in places.items()}
        out, logsumexp = attention_packed(q, k, v, **places, **options, zero_empty_rows=call.zero_empty_rows)
    outputs, gradients = (out,), (grad.cpu().to(dtype),)
    if grad_logsumexp is not None:
        outputs, gradients = (*outputs, logsumexp), (*gradients, grad_logsumexp.cpu().to(logsumexp.dtype))
    return torch.autograd.grad(outputs, bias, gradients)[0]


def check(q, k, v, grad, call, grad_logsumexp=None):
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    ours = attention_grad_distance_bias(grad, q, k, v, out, logsumexp, call, grad_logsumexp).cpu()
    assert ours.dtype == torch.float32 and ours.is_contiguous()
    exact = oracle(q, k, v, grad, call, torch.float64, grad_logsumexp)
    eager = oracle(q, k, v, grad, call, q.dtype, grad_logsumexp).float()
    # Sums over queries, batches and heads of terms rounded (through `out`) to q's type.
    behind = q.numel() / q.shape[-1] / call.distance_bias.shape[0] / call.distance_bias.shape[1]
    coarser = torch.finfo(q.dtype).eps / torch.finfo(torch.float32).eps
    assert_as_exact_as_eager(ours, eager, exact, ulps=4.0 * behind**0.5 * coarser)
    return ours


@pytest.mark.parametrize("shape", [(B, H), (1, H), (B, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape(dtype, shape):
    check(*inputs(B, H, 1, LQ, LK, D, dtype), call_of({"distance_bias": table(*shape)}, D))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_mask(dialect):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    zero_empty_rows = DIALECTS.index(dialect) % 2 == 0
    mask |= {"distance_bias": table(1, H)}
    call = call_of(mask, D, zero_empty_rows=zero_empty_rows, dropout_p=0.2)
    check(*inputs(B, H, 1, LQ, LK, D, torch.float32), call)


def documents(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(0, 3, (B, n), dtype=torch.int32).sort(1).values.to(DEVICE) for n in lengths]


@pytest.mark.parametrize("magnitude", [1.0, 60.0])
def test_with_all_other_parts(magnitude):
    """The large scores take the way on which rows are summed again."""
    query_ids, key_ids = documents(LQ, LK)
    mask = {"query_ids": query_ids, "key_ids": key_ids, "softcap": 50.0, "bias": random(1, H, LQ, LK, seed=9)}
    mask |= {"distance_bias": table(1, H) * magnitude, "causal": 9, "window": -50}
    q, *rest = inputs(B, H, 1, LQ, LK, D, torch.float32)
    grad_logsumexp = random(B, LQ, H, seed=8).transpose(1, 2)
    check(q * magnitude, *rest, call_of(mask, D, dropout_p=0.1), grad_logsumexp)


@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1), (1, 129), (129, 1), (32, 32), (33, 64), (64, 65)])
def test_shapes_that_break_kernels(Lq, Lk):
    call = call_of({"distance_bias": table(1, H, Lq=Lq, Lk=Lk)}, D)
    check(*inputs(3, H, 1, Lq, Lk, D, torch.float32), call, random(3, H, Lq, seed=8))


def test_blocked_distances_and_keys_do_not_leak():
    bias = table(1, H)
    bias[..., LQ + 5 :] = -torch.inf
    bias[:, 1, LQ - 20] = -torch.inf
    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float32)
    call = call_of({"distance_bias": bias, "lengths": torch.tensor([30, 20], dtype=torch.int32)}, D)
    clean = check(q, k, v, grad, call)
    assert (clean[..., LQ + 5 :] == 0).all() and (clean[:, 1, LQ - 20] == 0).all()
    k[:, :, 30:], v[:, :, 30:] = torch.nan, torch.inf
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    assert torch.equal(attention_grad_distance_bias(grad, q, k, v, out, logsumexp, call).cpu(), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("lengths_k", [[33, 0, 1, 40], [40, 5, 3, 0]], ids=["self", "cross"])
def test_packed(lengths_k, heads, dtype):
    """With bounds longer than the longest sequences, and documents."""
    lengths_q, max_q, max_k = [33, 0, 1, 40], 70, 45
    starts = [torch.tensor([0, *n], dtype=torch.int32, device=DEVICE).cumsum(0).int() for n in (lengths_q, lengths_k)]
    tokens = sum(lengths_q), sum(lengths_k)
    q, k, v, grad = (
        random(n, h, D, dtype=dtype, seed=h + n) for n, h in zip((*tokens, *tokens), (H, 1, 1, H), strict=True)
    )
    v, grad = random(tokens[1], 1, D, dtype=dtype, seed=3), random(tokens[0], H, D, dtype=dtype, seed=4)
    ids = [torch.arange(n, device=DEVICE).div(9, rounding_mode="floor").int() % 3 for n in tokens]
    call = call_of(
        {"distance_bias": table(1, heads, Lq=max_q, Lk=max_k), "causal": 5, "softcap": 20.0}, D, dropout_p=0.1
    )
    call = replace(call, packed=PackedBatch(*starts, max_q, max_k))
    check(q, k, v, grad, call, random(H, tokens[0], seed=8))
    check(q, k, v, grad, replace(call, query_ids=ids[0], key_ids=ids[1], causal=None))


def test_two_runs_agree_bit_for_bit():
    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float16)
    call = call_of({"distance_bias": table(1, H), "causal": 0}, D, dropout_p=0.2)
    assert torch.equal(check(q, k, v, grad, call), check(q, k, v, grad, call))


@pytest.mark.parametrize(("batches", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_do(batches, Lq, Lk):
    q, k, v, grad = inputs(batches, 2, 1, Lq, Lk, 8, torch.float32)
    call = call_of({"distance_bias": torch.zeros(1, 2, Lq + Lk - 1)}, 8)
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    gradient = attention_grad_distance_bias(grad, q, k, v, out, logsumexp, call)
    assert gradient.shape == (1, 2, Lq + Lk - 1) and (gradient == 0).all()
