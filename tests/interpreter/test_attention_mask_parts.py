"""Documents, biases by distance and capped scores in the Triton attention kernels, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_calls import DEVICE, DTYPES, call_of, inputs, random, reference_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.reference.attention import attention as reference
from transformer_fast.triton import configs
from transformer_fast.triton.attention import backward_kv, backward_q, forward
from transformer_fast.triton.attention import weights as weights_module
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward
from transformer_fast.triton.attention.tile_map import tile_lists
from transformer_fast.triton.attention.weights import attention_weights

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

B, H, LQ, LK, D = 2, 2, 40, 70, 16
NAMES = ("out", "grad_q", "grad_k", "grad_v")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 32 x 32, so that small shapes have whole tiles, edges and more than one of each."""
    if device.type == "cpu":
        for key in configs.ATTENTION:
            monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 32, 4, 1))
        monkeypatch.setattr(weights_module, "TILES", dict.fromkeys(weights_module.TILES, (32, 32, 4)))


def distances(*shape: int) -> torch.Tensor:
    """A bias (*shape, Lq + Lk - 1) like ALiBi's, with noise so that a wrong diagonal shows."""
    distance = torch.arange(LQ + LK - 1, device=DEVICE) - (LQ - 1)
    return random(*shape, LQ + LK - 1, seed=11) - 0.1 * distance.abs()


def in_order(rows: int, count: int, seed: int) -> torch.Tensor:
    """Rising ids of `count` documents, other ones in each batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (B, rows), generator=generator, dtype=torch.int32).sort(1).values


IDS = {
    "in order": (in_order(LQ, 4, 1), in_order(LK, 4, 2)),
    "whole tiles": (torch.arange(LQ).div(32).int()[None], torch.arange(LK).div(32).int()[None]),
    "anywhere": (in_order(LQ, 3, 3).flip(1)[:, torch.randperm(LQ, generator=torch.Generator().manual_seed(0))],
                 in_order(LK, 3, 4)[:1]),
    "nothing shared": (torch.zeros(1, LQ, dtype=torch.int32), in_order(LK, 4, 2) - 9),
    "some without a key": (in_order(LQ, 9, 5), in_order(LK, 4, 2) * 2),
}  # fmt: skip
"""(query_ids, key_ids) of documents."""


def documents(name: str) -> dict[str, torch.Tensor]:
    return dict(zip(("query_ids", "key_ids"), IDS[name], strict=True))


def kernel(q, k, v, grad, call):
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    grads = attention_backward(grad, q, k, v, out, logsumexp, call)
    return out, logsumexp, attention_weights(q, k, logsumexp, call), *grads


def oracle(q, k, v, grad, call, dtype):
    q, k, v = (t.detach().cpu().to(dtype).requires_grad_() for t in (q, k, v))
    out, weights, logsumexp = reference(q, k, v, **reference_call(call))
    if call.seed is not None:
        weights = None
    return out.detach(), logsumexp.detach(), weights, *torch.autograd.grad(out, (q, k, v), grad.cpu().to(dtype))


def check(q, k, v, grad, call):
    """Hold one call to the gate: output, logsumexp, weights (of calls without dropout) and gradients."""
    out, logsumexp, weights, *grads = (t.cpu() for t in kernel(q, k, v, grad, call))
    eager_out, eager_logsumexp, eager_weights, *eager_grads = oracle(q, k, v, grad, call, q.dtype)
    exact_out, exact_logsumexp, exact_weights, *exact_grads = oracle(q, k, v, grad, call, torch.float64)
    assert torch.equal(logsumexp == -torch.inf, exact_logsumexp == -torch.inf)
    assert_as_exact_as_eager(logsumexp, eager_logsumexp, exact_logsumexp, what="logsumexp")
    if exact_weights is not None:
        assert_as_exact_as_eager(weights, eager_weights.detach(), exact_weights.detach(), what="weights")
    for name, ours, eager, exact in zip(
        NAMES, (out, *grads), (eager_out, *eager_grads), (exact_out, *exact_grads), strict=True
    ):
        assert ours.dtype == q.dtype
        rows = q.shape[1] // k.shape[1] * q.shape[2] if name in ("grad_k", "grad_v") else 1
        assert_as_exact_as_eager(ours, eager, exact, ulps=4.0 * rows**0.5, what=name)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("name", IDS)
def test_documents(name, zero_empty_rows):
    check(*inputs(B, H, 1, LQ, LK, D, torch.float32), call_of(documents(name), D, zero_empty_rows=zero_empty_rows))


DIALECTS = ["dense", "rows", "padding", "lengths", "lengths per query", "causal", "causal, first rows empty", "all"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_documents_with_every_part_of_a_mask(dialect):
    name = ("in order", "anywhere")[DIALECTS.index(dialect) % 2]
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    check(*inputs(B, H, H, LQ, LK, D, torch.float16), call_of(mask | documents(name), D, dropout_p=0.2))


@pytest.mark.parametrize(("dtype", "shape"), [*zip(DTYPES, [(B, H), (1, H), (B, 1)], strict=True), (DTYPES[0], (1, 1))])
def test_bias_by_distance(dtype, shape):
    check(*inputs(B, H, 1, LQ, LK, D, dtype), call_of({"distance_bias": distances(*shape)}, D))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bias_by_distance_with_every_part_of_a_mask(dialect):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    mask |= {"distance_bias": distances(1, H), "bias": random(B, 1, LQ, LK, seed=12)}
    check(*inputs(B, H, 1, LQ, LK, D, torch.float32), call_of(mask, D, dropout_p=0.2))


def test_bias_by_distance_blocks():
    """-inf ahead of each query is a causal mask; and -inf nearer by leaves rows empty."""
    ahead = torch.arange(LQ + LK - 1) >= LQ
    tensors = inputs(B, H, 1, LQ, LK, D, torch.float32)
    for first, zero_empty_rows in ((LQ, False), (LQ - 10, False), (LQ - 10, True)):
        ahead = torch.arange(LQ + LK - 1, device=DEVICE) >= first
        bias = distances(1, H).masked_fill(ahead, -torch.inf)
        check(*tensors, call_of({"distance_bias": bias}, D, zero_empty_rows=zero_empty_rows))


@pytest.mark.parametrize(
    ("dtype", "softcap"), [(DTYPES[0], 0.05), (DTYPES[0], 1.0), (DTYPES[1], 30.0), (DTYPES[2], 1.0), (DTYPES[0], 1e6)]
)
def test_softcap(dtype, softcap):
    """From scores that are nearly all capped to scores that tanh must return as they are."""
    check(*inputs(B, H, 1, LQ, LK, D, dtype), call_of({"softcap": softcap, "causal": 20}, D, scale=1.0))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_softcap_with_any_scale(scale):
    check(*inputs(1, 2, 1, 20, 40, 16, torch.float32), call_of({"causal": 20, "softcap": 2.0}, 16, scale=scale))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_parts_together(dialect):
    dtype = DTYPES[DIALECTS.index(dialect) % 2]
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    mask |= {"distance_bias": distances(B, H), "softcap": 5.0, "window": -35, "causal": 20} | documents("in order")
    mask["bias"] = random(1, H, LQ, LK, seed=12)
    check(*inputs(B, H, 1, LQ, LK, D, dtype), call_of(mask, D, dropout_p=0.2))


@pytest.mark.parametrize("magnitude", [1.0, 60.0])
def test_gradient_of_the_logsumexp(magnitude):
    """The large scores take the way on which rows are summed again."""
    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float32)
    mask = {"distance_bias": distances(1, H) * magnitude, "softcap": 50.0} | documents("in order")
    call, q = call_of(mask, D), q * magnitude
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    grad_logsumexp = random(B, H, 1, seed=5).expand(B, H, LQ).where(logsumexp > -torch.inf, torch.nan)
    ours = attention_backward(grad, q, k, v, out, logsumexp, call, grad_logsumexp)

    def by_the_reference(dtype):
        leaves = [t.cpu().to(dtype).requires_grad_() for t in (q, k, v)]
        out, _, logsumexp = reference(*leaves, **reference_call(call))
        given = grad_logsumexp.cpu().to(dtype).nan_to_num(0.0)
        loss = (out * grad.cpu().to(dtype)).sum() + (logsumexp.masked_fill(logsumexp == -torch.inf, 0.0) * given).sum()
        return torch.autograd.grad(loss, leaves)

    for name, *values in zip(
        NAMES[1:], ours, by_the_reference(torch.float32), by_the_reference(torch.float64), strict=True
    ):
        rows = 1 if name == "grad_q" else H * LQ
        assert_as_exact_as_eager(values[0].cpu(), *values[1:], ulps=4.0 * rows**0.5, what=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_keys_of_other_documents_do_not_leak(softcap, value):
    """A NaN or Inf in k and v of the last document reaches just its own queries."""
    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float32)
    call = call_of(documents("in order"), D, zero_empty_rows=True, softcap=softcap)
    last = call.key_ids == 3
    clean = kernel(q, k, v, grad, call)
    for t in (k, v):
        t.masked_fill_(last[:, None, :, None], value)
    dirty = kernel(q, k, v, grad, call)
    others = (call.query_ids != 3)[:, None, :].expand(B, H, LQ)
    for ours, expected in ((dirty[0], clean[0]), (dirty[1], clean[1]), (dirty[3], clean[3])):
        torch.testing.assert_close(ours[others], expected[others])
        assert not ours[~others].isfinite().all()


def test_two_runs_agree_bit_for_bit():
    mask = documents("in order") | {"distance_bias": distances(1, H), "softcap": 3.0}
    tensors, call = inputs(B, H, 1, LQ, LK, D, torch.float16), call_of(mask, D, dropout_p=0.2)
    for first, second in zip(kernel(*tensors, call), kernel(*tensors, call), strict=True):
        assert torch.equal(first, second)
    zero = replace(call, distance_bias=torch.zeros_like(call.distance_bias))
    assert not torch.equal(kernel(*tensors, zero)[0], kernel(*tensors, call)[0])


@pytest.mark.parametrize("name", IDS)
def test_lists_hold_the_tiles_that_share_an_id(name):
    """By the smallest and the largest id of either side; those of one id on both sides are full, but for the end."""
    query_ids, key_ids = (t.expand(B, -1) for t in IDS[name])
    kinds = torch.zeros(B, -(-LQ // 32), -(-LK // 32), dtype=torch.int64)
    for b, row, column in torch.cartesian_prod(*map(torch.arange, kinds.shape)).tolist():
        own, others = query_ids[b, row * 32 :][:32], key_ids[b, column * 32 :][:32]
        if others.min() <= own.max() and others.max() >= own.min():
            one = bool((own == own[0]).all() and (others == own[0]).all())
            kinds[b, row, column] = 2 if one and column * 32 + 32 <= LK else 1
    call = call_of(documents(name), D)
    for columns, expected in ((False, kinds), (True, kinds.mT)):
        found = tile_lists(call, B, LQ, LK, (32, 32), columns=columns, ordered=False)
        counts = torch.stack([(expected == 2).sum(-1), (expected == 1).sum(-1)], -1)
        assert torch.equal(found.counts[:, 0].cpu().long().expand_as(counts), counts)
        for b, line in torch.cartesian_prod(*map(torch.arange, expected.shape[:2])).tolist():
            numbers = found.lists[min(b, found.lists.shape[0] - 1), 0, line].tolist()
            full, partial = counts[b, line].tolist()
            assert numbers[:full] == (expected[b, line] == 2).nonzero().flatten().tolist()
            assert numbers[::-1][:partial] == (expected[b, line] == 1).nonzero().flatten().tolist()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="loads are watched in the interpreter")
def test_tiles_of_other_documents_are_not_visited(monkeypatch):
    """Of three documents of 32 rows, each tile sees its own alone, forward and backward; without them it sees all."""
    loads = {}
    for name, module in (("out", forward), ("q", backward_q), ("kv", backward_kv)):

        def load_rows(*arguments, original=module.load_rows, name=name):
            loads[name] = loads.get(name, 0) + 1
            return original(*arguments)

        monkeypatch.setattr(module, "load_rows", load_rows)
    ids = (torch.arange(96, device=DEVICE) // 32).int()[None]
    q, k, v, grad = inputs(1, 1, 1, 96, 96, D, torch.float32)
    visited = []
    for parts in ({"query_ids": ids, "key_ids": ids}, {}):
        loads.clear()
        call = call_of(parts, D)
        out, logsumexp = attention_forward(q, k, v, call)[:2]
        attention_backward(grad, q, k, v, out, logsumexp, call)
        visited.append(dict(loads))
    # A step loads two tiles.
    assert {name: visited[1][name] - visited[0][name] for name in loads} == dict.fromkeys(loads, (9 - 3) * 2)
