"""Attention kernels of packed batches against the fp64 oracle; tests/interpreter runs them on Triton."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_kernels import Kernels, distances, starts, wide

H, HKV, D = 2, 1, 24


@pytest.fixture
def lengths(kernels: Kernels) -> tuple[list[int], list[int]]:
    """Return the numbers of queries and keys per sequence: none of one or of both, one, and more than a tile."""
    long = ([97, 0, 1, 129, 2, 17], [97, 9, 0, 257, 200, 3])
    return long if kernels.backend == "native" else ([33, 0, 1, 35], [40, 5, 3, 0])


def documents(lengths_q: list[int], lengths_k: list[int]) -> dict[str, torch.Tensor]:
    """Return ids that ascend in each sequence and occur in others too; the last 20 ids are in reverse order."""
    ids = []
    for lengths in (lengths_q, lengths_k):
        own = torch.cat([torch.arange(n) * 4 // max(n, 1) for n in lengths]).int()
        own[-20:] = own[-20:].flip(0)
        ids.append(own)
    return dict(zip(("query_ids", "key_ids"), ids, strict=True))


BOUNDS = [(None, None), (0, None), (0, -15), (None, -5), (-3, -40), (30, 25), (3, 2), (None, 100), (-2, None), (0, 200)]
PARTS = ["nothing", "documents", "distances", "distances of all heads", "softcap", "all parts"]


def call_of(kernels, lengths, part: str, dtype, **more):
    """Return a call with one of PARTS; with all of them, the given maximum lengths exceed the number of tokens."""
    longest = tuple((sum(n) if part == "all parts" and "dropout_p" not in more else max(n)) + 10 for n in lengths)
    near = distances(kernels, (1, 1 if part == "distances of all heads" else H), *longest).to(wide(dtype))
    ids = documents(*lengths)
    parts = {
        "nothing": {},
        "documents": ids,
        "softcap": {"softcap": 2.0},
        "all parts": {"distance_bias": near.masked_fill(near < -6.0, -math.inf), "softcap": 2.0, **ids},
    }.get(part, {"distance_bias": near})
    call = kernels.packed_call(*lengths, D, parts, **more)
    return replace(call, packed=replace(call.packed, max_seqlen_q=longest[0], max_seqlen_k=longest[1]))


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("part", PARTS)
def test_packed(part, causal, window, zero_empty_rows, dtype, kernels, lengths):
    """A query that sees none of its sequence's keys gets their mean, or zero."""
    to_itself = BOUNDS.index((causal, window)) % 2 == 0
    lengths = (lengths[0], lengths[0]) if to_itself else lengths
    call = call_of(kernels, lengths, part, dtype, causal=causal, window=window, zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.packed_inputs(*lengths, H, HKV, D, dtype), call, received=not zero_empty_rows)


ADDED = ["nothing", "bias", "bias of all heads", "bias in half precision", "distances", "everything"]


def added_call(kernels, lengths, added: str, dtype, bottom_right: bool, used: bool, **more):
    """Return a call with a bias or with distances: one head for all, or positions counted from the end."""
    lengths_q, lengths_k = lengths
    pairs = [n * m for n, m in zip(lengths_q, lengths_k, strict=True)]
    parts = {}
    if "bias" in added or added == "everything":
        kind = torch.float16 if added == "bias in half precision" else wide(dtype)
        bias = kernels.random(1 if added == "bias of all heads" else H, sum(pairs), dtype=kind)
        parts["bias"] = bias.masked_fill(bias > 1.5, -math.inf)
    if added in ("distances", "everything"):
        parts["distance_bias"] = distances(kernels, (1, H), max(lengths_q), max(lengths_k)).to(wide(dtype))
    if added == "everything":
        parts |= {"softcap": 2.0, **documents(*lengths)}
    call = kernels.packed_call(*lengths, D, parts, **more)
    seqused_k = torch.tensor(
        [0 if i in (2, 4) else n - n // 3 if i % 3 == 0 else n for i, n in enumerate(lengths_k)]
    ).int()
    extra = {"bias_starts": starts(pairs).long().to(kernels.device)} if "bias" in parts else {}
    extra |= {"seqused_k": seqused_k.to(kernels.device)} if used else {}
    return replace(call, packed=replace(call.packed, bottom_right=bottom_right, **extra))


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("used", [False, True], ids=["all keys", "some keys"])
@pytest.mark.parametrize("bottom_right", [False, True], ids=["from the start", "from the end"])
@pytest.mark.parametrize(("causal", "window"), [(None, None), (0, None), (2, -20), (-3, None)])
@pytest.mark.parametrize("added", ADDED)
def test_what_a_padded_batch_takes(
    added, causal, window, bottom_right, used, zero_empty_rows, dropout_p, dtype, kernels, lengths
):
    """Unused keys hold NaN and get no gradient."""
    options = {"causal": causal, "window": window, "zero_empty_rows": zero_empty_rows, "dropout_p": dropout_p}
    call = added_call(kernels, lengths, added, dtype, bottom_right, used, **options)
    tensors = kernels.packed_inputs(*lengths, H, HKV, D, dtype)
    if used:
        ends = starts(lengths[1]).tolist()
        for end, stored, own in zip(ends[1:], lengths[1], call.packed.seqused_k.tolist(), strict=True):
            for t in tensors[1:3]:
                t[end - stored + own : end] = math.nan
    found = kernels.check(tensors, call, received=not zero_empty_rows)
    if used:
        unused = tensors[1][:, 0, 0].isnan()
        assert not found["grad_k"][unused].any() and not found["grad_v"][unused].any()


@pytest.mark.parametrize("added", ["bias", "everything"])
def test_what_a_padded_batch_takes_is_recorded(added, kernels, lengths):
    call = added_call(kernels, lengths, added, torch.float32, True, True, causal=0)
    kernels.check(kernels.packed_inputs(*lengths, H, HKV, D), call, way=kernels.recorded)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("part", ["nothing", "all parts"])
def test_dropout_draws_by_sequence(part, zero_empty_rows, dtype, kernels):
    lengths = [33, 0, 1, 70], [40, 5, 3, 0]
    call = call_of(kernels, lengths, part, dtype, causal=3, dropout_p=0.25, zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.packed_inputs(*lengths, H, HKV, D, dtype), call)


def test_expanded_and_of_any_scale(kernels, lengths):
    """q, k and v are columns of one projection; the gradient is one expanded number."""
    total = sum(lengths[0])
    q, k, v = kernels.random(total, 3, 2, D + 3)[..., 3:].unbind(1)
    call = kernels.packed_call(lengths[0], lengths[0], D, causal=0, scale=-0.4)
    kernels.check((q, k, v, kernels.random(1, 1, 1).expand(total, 2, D)), call, way=kernels.recorded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, -33])
def test_the_bits_of_each_sequence_alone(window, dtype, kernels):
    """There are so many heads that the keys of no sequence are split, as in a call with one sequence."""
    lengths, heads = ([66, 3, 128, 17], 16) if kernels.backend == "native" else ([33, 3, 40], 1)
    tensors = kernels.packed_inputs(lengths, lengths, heads, heads, D, dtype)
    found = kernels.outcome(tensors, kernels.packed_call(lengths, lengths, D, causal=0, window=window))
    for start, length in zip(starts(lengths).tolist(), lengths, strict=False):
        own = [t[start : start + length].transpose(0, 1).unsqueeze(0) for t in tensors]
        alone = kernels.outcome(own, kernels.call(D, causal=0, window=window))
        for name, t in found.items():
            rows = t.t() if name == "logsumexp" else t
            expected = alone[name][0].transpose(0, 1)
            assert torch.equal(rows[start : start + length], expected), name


@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [0, 3]), ([2, 5], [0, 0]), ([3, 0], [4, 0])])
def test_nothing_to_do(lengths_q, lengths_k, kernels):
    tensors = kernels.packed_inputs(lengths_q, lengths_k, H, HKV, D)
    found = kernels.outcome(tensors, kernels.packed_call(lengths_q, lengths_k, D))
    grads = [found[f"grad_{name}"] for name in "qkv"]
    for t, like in zip((found["out"], *grads), (tensors[0], *tensors[:3]), strict=True):
        assert t.shape == like.shape and t.isfinite().all()
    assert found["logsumexp"].shape == (H, sum(lengths_q))
    if sum(lengths_k) == 0:
        assert found["logsumexp"].eq(-math.inf).all() and not any(t.any() for t in (found["out"], *grads))


def test_a_sequence_does_not_reach_its_neighbours(kernels):
    """One sequence holds NaN, and its tiles hold rows of others too."""
    lengths = [6, 5, 40]
    clean, call = kernels.packed_inputs(lengths, lengths, 2, 1, D), kernels.packed_call(lengths, lengths, D, causal=0)
    dirty = [t.clone() for t in clean]
    for t in dirty:
        t[6:11] = math.nan
    rows = torch.arange(sum(lengths), device=kernels.device)
    others = (rows < 6) | (rows >= 11)
    expected = kernels.outcome(clean, call)
    for name, t in kernels.outcome(dirty, call).items():
        of = (slice(None), others) if name == "logsumexp" else others
        assert torch.equal(t[of], expected[name][of]), name


def test_same_bits_in_every_run_on_any_number_of_threads_and_with_longer_bounds(dtype, kernels, lengths):
    tensors, call = kernels.packed_inputs(*lengths, 2, 1, D, dtype), kernels.packed_call(*lengths, D, dropout_p=0.1)
    kernels.assert_same_bits(lambda: kernels.outcome(tensors, call).values())
    longer = replace(
        call,
        packed=replace(
            call.packed, max_seqlen_q=call.packed.max_seqlen_q + 60, max_seqlen_k=call.packed.max_seqlen_k + 60
        ),
    )
    bits = (kernels.outcome(tensors, c) for c in (call, longer))
    assert all(torch.equal(a, b) for a, b in zip(*(found.values() for found in bits), strict=True))
