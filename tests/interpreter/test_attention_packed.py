"""Packed attention by the Triton kernels, against its oracle and against the same kernels on a padded batch."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from attention_calls import DEVICE, DTYPES, random, reference_call
from helpers import assert_as_exact_as_eager

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.reference.attention import attention_packed as reference
from transformer_fast.triton import configs
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

SELF = [33, 0, 1, 40]
CROSS_KEYS = [40, 5, 3, 0]
D = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 32 x 32; and sequences so long that the longest go first."""
    if device.type == "cpu":
        for key in configs.ATTENTION:
            monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 32, 4, 1))
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 35)


def starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)


def call_of(lengths_q, lengths_k, **more):
    packed = PackedBatch(starts(lengths_q), starts(lengths_k), max(lengths_q), max(lengths_k))
    if more.get("dropout_p", 0.0) > 0.0:
        more["seed"] = torch.tensor([2**40 + 5], device=DEVICE)
    return AttentionParams(**{"scale": D**-0.5, "packed": packed} | more)


def inputs(lengths_q, lengths_k, H, Hkv, dtype):
    Tq, Tk = sum(lengths_q), sum(lengths_k)
    shapes = [(Tq, H, D), (Tk, Hkv, D), (Tk, Hkv, D), (Tq, H, D)]
    return [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def kernel(q, k, v, grad, call, grad_logsumexp=None):
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    grads = attention_backward(grad, q, k, v, out, logsumexp, call, grad_logsumexp)
    return out, logsumexp, *grads


def oracle(q, k, v, grad, call, dtype, grad_logsumexp=None):
    leaves = [t.detach().cpu().to(dtype).requires_grad_() for t in (q, k, v)]
    options = reference_call(call)
    for part in ("keep", "key_keep", "lengths", "bias", "empty_rows"):  # the rest is shared with a padded batch
        del options[part]
    places = dataclasses.asdict(call.packed)
    places = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in places.items()}
    out, logsumexp = reference(*leaves, **places, **options, zero_empty_rows=call.zero_empty_rows)
    loss = (out * grad.cpu().to(dtype)).sum()
    if grad_logsumexp is not None:
        loss = loss + (logsumexp.masked_fill(logsumexp == -torch.inf, 0.0) * grad_logsumexp.cpu()).sum()
    return out.detach(), logsumexp.detach(), *torch.autograd.grad(loss, leaves)


def check(q, k, v, grad, call, grad_logsumexp=None):
    ours = [t.cpu() for t in kernel(q, k, v, grad, call, grad_logsumexp)]
    eager = oracle(q, k, v, grad, call, q.dtype, grad_logsumexp)
    exact = oracle(q, k, v, grad, call, torch.float64, grad_logsumexp)
    assert torch.equal(ours[1] == -torch.inf, exact[1] == -torch.inf)
    names = ("out", "logsumexp", "grad_q", "grad_k", "grad_v")
    for name, *values in zip(names, ours, eager, exact, strict=True):
        rows = q.shape[1] // k.shape[1] * call.packed.max_q if name in ("grad_k", "grad_v") else 1
        assert_as_exact_as_eager(*values, ulps=4.0 * rows**0.5, what=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths_k", "causal"), [(SELF, None), (SELF, 0), (CROSS_KEYS, None), (CROSS_KEYS, 0)])
def test_is_the_oracle(lengths_k, causal, dtype):
    """Self and cross, causal from the first row of each sequence; sequences of no rows, no keys, and one of each."""
    check(*inputs(SELF, lengths_k, 2, 1, dtype), call_of(SELF, lengths_k, causal=causal))


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
def test_dropout_draws_by_sequence(zero_empty_rows):
    call = call_of(SELF, CROSS_KEYS, dropout_p=0.25, zero_empty_rows=zero_empty_rows)
    check(*inputs(SELF, CROSS_KEYS, 2, 2, torch.float32), call)


def test_gradient_of_the_logsumexp_and_any_scale():
    grad_logsumexp = random(4, sum(SELF), seed=7)
    check(*inputs(SELF, CROSS_KEYS, 4, 2, torch.float32), call_of(SELF, CROSS_KEYS, scale=-0.4), grad_logsumexp)


def test_strided():
    """q, k and v as columns of one projection; a gradient that is one number."""
    total = sum(SELF)
    q, k, v = random(total, 3, 2, D + 3)[..., 3:].unbind(1)
    check(q, k, v, random(1, 1, 1).expand(total, 2, D), call_of(SELF, SELF, causal=0))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), [(None, None), (0, None), (0, -5), (None, -33)])
def test_equals_padded_bit_for_bit(causal, window, dropout_p):
    """The same weights dropped, and the same sums in the same order. Beside a window, queries of the padding can be
    empty rows, and their mean would make the tile's other rows be summed again."""
    lengths, H = [33, 4, 1, 40], 2
    tensors = inputs(lengths, lengths, H, 1, torch.float16)
    options = {"causal": causal, "window": window, "zero_empty_rows": window is not None}
    call = call_of(lengths, lengths, dropout_p=dropout_p, **options)
    out, logsumexp, *grads = kernel(*tensors, call)

    def padded(t):
        sequences = t.split(lengths)
        return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).transpose(1, 2).contiguous()

    def packed(t):
        return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(t, lengths, strict=True)])

    q, k, v, grad = (padded(t) for t in tensors)
    same = replace(call, packed=None, lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    padded_out, padded_logsumexp = attention_forward(q, k, v, same)[:2]
    padded_grads = attention_backward(grad, q, k, v, padded_out, padded_logsumexp, same)
    for ours, theirs in zip((out, *grads), (padded_out, *padded_grads), strict=True):
        assert torch.equal(ours, packed(theirs))
    assert torch.equal(logsumexp.t(), packed(padded_logsumexp.unsqueeze(-1)).squeeze(-1))


def test_two_runs_agree_and_a_longer_bound_changes_nothing():
    tensors, call = inputs(SELF, CROSS_KEYS, 2, 1, torch.float16), call_of(SELF, CROSS_KEYS, dropout_p=0.2)
    first = kernel(*tensors, call)
    for other in (call, replace(call, packed=replace(call.packed, max_q=97, max_k=131))):
        for one, two in zip(first, kernel(*tensors, other), strict=True):
            assert torch.equal(one, two)


def test_a_sequence_does_not_reach_its_neighbours():
    """NaN in every row of one sequence, a tile of which holds rows of others."""
    lengths = [6, 5, 40]
    clean, call = inputs(lengths, lengths, 2, 1, torch.float32), call_of(lengths, lengths, causal=0)
    dirty = [t.clone() for t in clean]
    for t in dirty:
        t[6:11] = torch.nan
    rows = torch.arange(sum(lengths), device=DEVICE)
    others = (rows < 6) | (rows >= 11)
    for name, ours, expected in zip(("out", "grad_q", "grad_k", "grad_v"), *(
        (results[0], *results[2:]) for results in (kernel(*dirty, call), kernel(*clean, call))
    ), strict=True):  # fmt: skip
        assert torch.equal(ours[others], expected[others]), name


@pytest.mark.parametrize(("lengths_q", "lengths_k"), [([0, 0], [3, 2]), ([3, 2], [0, 0])])
def test_nothing_to_do(lengths_q, lengths_k):
    tensors = inputs(lengths_q, lengths_k, 2, 1, torch.float32)
    out, logsumexp, *grads = kernel(*tensors, call_of(lengths_q, lengths_k))
    assert (out == 0).all() and (logsumexp == -torch.inf).all()
    assert all((gradient == 0).all() for gradient in grads)


LENGTHS_Q, LENGTHS_K = [33, 5, 1, 60, 0, 3], [70, 40, 3, 20, 4, 0]


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), [(0, -20), (None, 2), (30, 25), (-3, None), (-10, -50), (0, 200)])
def test_diagonals(causal, window, zero_empty_rows):
    """Windows and look-aheads. Queries without keys in sequences that have some get the mean of those, or zero."""
    options = {"causal": causal, "window": window, "zero_empty_rows": zero_empty_rows}
    call = call_of(LENGTHS_Q, LENGTHS_K, **options)
    check(*inputs(LENGTHS_Q, LENGTHS_K, 4, 2, torch.float32), call, random(4, sum(LENGTHS_Q), seed=7))


def distances(max_q, max_k, *heads):
    """A bias that falls with the distance, with noise so that a wrong diagonal shows."""
    distance = torch.arange(max_q + max_k - 1, device=DEVICE) - (max_q - 1)
    return random(1, *heads, max_q + max_k - 1, seed=11) - 0.1 * distance.abs()


def documents(lengths_q, lengths_k):
    """Ids that rise in each sequence and are met again in others; half of the last one's are anywhere."""
    ids = []
    for lengths in (lengths_q, lengths_k):
        own = torch.cat([torch.arange(n) * 4 // max(n, 1) for n in lengths]).int()
        own[-20:] = own[-20:].flip(0)
        ids.append(own.to(DEVICE))
    return dict(zip(("query_ids", "key_ids"), ids, strict=True))


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), [(None, None), (0, None), (3, -9)])
def test_documents(causal, window, zero_empty_rows):
    call = call_of(SELF, CROSS_KEYS, causal=causal, window=window, zero_empty_rows=zero_empty_rows)
    check(*inputs(SELF, CROSS_KEYS, 2, 1, torch.float32), replace(call, **documents(SELF, CROSS_KEYS)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_bias_by_distance(heads, dtype):
    call = call_of(SELF, CROSS_KEYS, distance_bias=distances(40, 40, heads), dropout_p=0.2)
    check(*inputs(SELF, CROSS_KEYS, 2, 1, dtype), call)


def test_all_parts_together():
    """With a longer bound than the longest sequences: the table's entry of distance 0 moves."""
    call = call_of(
        SELF, CROSS_KEYS, causal=3, window=-30, softcap=2.0, dropout_p=0.2, distance_bias=distances(70, 90, 2)
    )
    call = replace(call, packed=replace(call.packed, max_q=70, max_k=90), **documents(SELF, CROSS_KEYS))
    check(*inputs(SELF, CROSS_KEYS, 2, 1, torch.float32), call)
    blocked = call.distance_bias.clone()
    blocked[:, 0, 69:71] = -torch.inf
    check(*inputs(SELF, CROSS_KEYS, 2, 1, torch.float32), replace(call, distance_bias=blocked, softcap=None))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="loads are watched in the interpreter")
def test_tiles_without_a_common_document_are_not_visited(monkeypatch):
    """Of four rising documents in 128 rows, each tile of 32 sees its own alone; forward and backward."""
    from transformer_fast.triton.attention import backward_kv, backward_q, forward

    lengths, loads = [128, 64], {}
    for name, module in (("out", forward), ("q", backward_q), ("kv", backward_kv)):

        def load_rows(*arguments, original=module.load_rows, name=name):
            loads[name] = loads.get(name, 0) + 1
            return original(*arguments)

        monkeypatch.setattr(module, "load_rows", load_rows)

    ids = torch.cat([torch.arange(n) // 32 for n in lengths]).int().to(DEVICE)
    tensors = inputs(lengths, lengths, 1, 1, torch.float32)
    kernel(*tensors, replace(call_of(lengths, lengths), query_ids=ids, key_ids=ids))
    apart = dict(loads)
    loads.clear()
    kernel(*tensors, call_of(lengths, lengths))
    # Six programs: with documents a step each, without them 4 * 4 + 2 * 2. A step loads two tiles.
    assert {name: loads[name] - apart[name] for name in loads} == dict.fromkeys(loads, (20 - 6) * 2)
