"""Decoding kernels against the fp64 oracle: parts, pages, lengths, and memory that must not be read.

tests/interpreter/test_attention_kernels_decode.py runs the same on Triton.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attention_kernels import Kernels, cached, distances, in_pages, wide


@pytest.fixture
def capacity(kernels: Kernels) -> int:
    """Return the number of keys of a cache: several tiles."""
    return 300 if kernels.backend == "native" else 61


def lengths_of(capacity: int) -> list[int]:
    """Return four lengths: the whole cache, fewer than the new queries, none, and less than half of the cache."""
    return [capacity, 3, 0, capacity * 4 // 9]


def documents(lengths: list[int], S: int, Lq: int) -> dict[str, torch.Tensor]:
    """Return ascending key ids; a query has the id of the last key, or of an earlier document."""
    key_ids = torch.randint(0, 3, (len(lengths), S), dtype=torch.int32).sort(1).values
    last = key_ids.gather(1, torch.tensor(lengths)[:, None].sub(1).clamp(min=0))
    return {"query_ids": last - torch.arange(Lq, dtype=torch.int32).flip(0) // 2, "key_ids": key_ids}


BOUNDS = [(0, None), (None, None), (0, -20), (None, -3), (2, -1), (-4, -40), (0, 1), (0, -61), (-70, -80)]
PAGES = [None, 1, 5, 16, 32]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("Lq", [1, 4])
def test_lengths_bounds_and_pages(Lq, causal, window, page_size, dtype, kernels, capacity):
    """Lengths below Lq, and bounds, leave queries without keys; unused places hold NaN."""
    q, *cache = cached(kernels, 4, 2, Lq, capacity, 20, lengths_of(capacity), dtype)
    kernels.check_decode(q, *cache, page_size, causal=causal, window=window)


@pytest.mark.parametrize(("H", "Hkv", "Lq"), [(3, 3, 1), (8, 1, 1), (6, 2, 7), (4, 1, 16), (2, 1, 33)])
def test_rows_of_a_group_share_tiles(H, Hkv, Lq, dtype, kernels):
    kernels.check_decode(*cached(kernels, H, Hkv, Lq, 70, 16, [70, 35], dtype))


@pytest.mark.parametrize("D", [1, 8, 40, 96, 128, 256])
def test_head_dims(D, dtype, kernels):
    kernels.check_decode(*cached(kernels, 2, 1, 2, 50, D, [50, 33], dtype), page_size=16)


PARTS = {
    "distances": lambda ours, S, Lq, lengths: {"distance_bias": distances(ours, (4, 4), S, Lq)},
    "distances of all batches": lambda ours, S, Lq, lengths: {"distance_bias": distances(ours, (1, 4), S, Lq)},
    "distances of all heads": lambda ours, S, Lq, lengths: {"distance_bias": distances(ours, (4, 1), S, Lq)},
    "documents": lambda ours, S, Lq, lengths: documents(lengths, S, Lq),
    "softcap": lambda ours, S, Lq, lengths: {"softcap": 0.05, "scale": 1.0},
    "wide softcap": lambda ours, S, Lq, lengths: {"softcap": 1e6, "scale": -0.4},
    "all parts": lambda ours, S, Lq, lengths: {
        "distance_bias": distances(ours, (1, 4), S, Lq), "softcap": 3.0, **documents(lengths, S, Lq),
    },
}  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 5, 16])
@pytest.mark.parametrize(("Lq", "causal", "window"), [(1, None, None), (4, 0, None), (4, None, None), (7, 1, -20)])
@pytest.mark.parametrize("part", PARTS)
def test_every_part(part, Lq, causal, window, page_size, dtype, kernels, capacity):
    lengths = lengths_of(capacity)
    parts = PARTS[part](kernels, capacity, Lq, lengths)
    parts = {name: t.to(wide(dtype)) if name == "distance_bias" else t for name, t in parts.items()}
    parts = {name: t.to(kernels.device) if isinstance(t, torch.Tensor) else t for name, t in parts.items()}
    q, *cache = cached(kernels, 4, 2, Lq, capacity, 16, lengths, dtype)
    kernels.check_decode(q, *cache, page_size, causal=causal, window=window, **parts)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale(scale, kernels):
    kernels.check_decode(*cached(kernels, 2, 1, 2, 40, 16, [40, 21]), scale=scale)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("window", [None, -5])
def test_a_key_reaches_only_the_queries_that_see_it(window, value, page_size, kernels):
    """A new key reaches later queries; a key that leaves the window reaches earlier ones."""
    q, k, v, lengths = cached(kernels, 4, 2, 4, 40, 16, [40, 18])
    clean = kernels.check_decode(q, k, v, lengths, page_size, window=window)["out"]
    for b, length in enumerate(lengths.tolist()):
        place = length - (2 if window is None else 8)
        k[b, 0, place] = v[b, 1, place] = value
    stored, table = (k, v), None
    if page_size:
        *stored, table = in_pages((k, v), page_size, lengths)
    dirty = kernels.decode(q, *stored, lengths, table, window=window)["out"]
    seeing, others = (slice(2, 4), slice(0, 2)) if window is None else (slice(0, 2), slice(2, 4))
    assert torch.equal(dirty[:, :, others], clean[:, :, others]) and not dirty[:, 2:, seeing].isfinite().any()


def test_what_no_query_sees_may_hold_anything(kernels):
    """Unseen keys hold NaN: keys before every window, of another document, and at a distance of -inf."""
    S = 700 if kernels.backend == "native" else 130
    q, k, v, lengths = cached(kernels, 4, 2, 2, S, 16, [S, 77], torch.float16)
    clean = kernels.decode(q, k, v, lengths, window=-20)["out"]
    for b, length in enumerate(lengths.tolist()):
        k[b, :, : length - 22] = v[b, :, : length - 22] = math.nan
    assert torch.equal(kernels.decode(q, k, v, lengths, window=-20)["out"], clean)

    q, k, v, lengths = cached(kernels, 4, 2, 2, 61, 16, [61, 61, 40, 40])
    key_ids = (torch.arange(61, device=kernels.device) >= 20).int().expand(4, 61).contiguous()
    bias = distances(kernels, (1, 4), 61, 2)
    bias[:, :, 60 - 10] = -math.inf
    parts = {"query_ids": key_ids[:, -2:], "key_ids": key_ids, "distance_bias": bias}
    clean = kernels.check_decode(q, k, v, lengths, **parts)["out"]
    k[:, :, :20] = v[:, :, :20] = math.nan
    for b, length in enumerate(lengths.tolist()):
        v[b, :, length - 1 - 10] = math.inf  # the last query's at distance -10
    dirty = kernels.decode(q, k, v, lengths, **parts)["out"]
    assert torch.equal(dirty[:, :, 1], clean[:, :, 1]) and not dirty[:, :, 0].isfinite().any()


def test_strided_cache_and_queries(kernels):
    lengths = torch.tensor([30, 11], dtype=torch.int32, device=kernels.device)
    q = kernels.random(2, 3, 4, 24).transpose(1, 2)
    k = kernels.random(2, 40, 2, 27).transpose(1, 2)[..., 3:]
    v = kernels.random(2, 40, 2, 24).transpose(1, 2)
    assert kernels.check_decode(q, k, v, lengths)["out"].stride() == q.stride()


@pytest.mark.parametrize(("Lq", "S"), [(1, 2000), (3, 90)])
def test_same_bits_in_every_run_on_any_number_of_threads_and_from_pages(Lq, S, dtype, kernels):
    S = S if kernels.backend == "native" else 90
    q, k, v, lengths = cached(kernels, 4, 2, Lq, S, 64, [S - 1], dtype)
    *pages, table = in_pages((k, v), 128, lengths)
    for stored, own_table in (((k, v), None), (pages, table)):
        run = functools.partial(kernels.decode, q, *stored, lengths, own_table)
        kernels.assert_same_bits(lambda: run().values())  # noqa: B023
    if S == 2000:  # a cache that is split as its pages are
        whole, paged = kernels.decode(q, k, v, lengths), kernels.decode(q, *pages, lengths, table)
        assert all(torch.equal(whole[name], paged[name]) for name in whole)
    parts = {"distance_bias": distances(kernels, (1, 4), S, Lq).to(wide(dtype)), "softcap": 3.0}
    kernels.assert_same_bits(lambda: kernels.decode(q, k, v, lengths, **parts).values())


@pytest.mark.parametrize(("lengths", "Lq", "S"), [([], 1, 4), ([0, 0], 0, 4), ([0, 0], 2, 0), ([0, 0], 2, 9)])
def test_nothing_to_do(lengths, Lq, S, kernels):
    q, *cache = cached(kernels, 4, 2, Lq, S, 8, lengths)
    found = kernels.decode(q, *cache)
    assert found["out"].shape == q.shape and found["logsumexp"].shape == q.shape[:3]
    assert not found["out"].any() and found["logsumexp"].eq(-math.inf).all()
