"""The Triton decoding kernel against the fp64 oracle: parts, pages, lengths, and what must never be read."""

from __future__ import annotations

import pytest
import torch
from attention_calls import DEVICE, DTYPES, random
from helpers import assert_as_exact_as_eager

from transformer_fast.reference.attention import attention
from transformer_fast.reference.attention import attention_decode as reference
from transformer_fast.triton.attention import decode as module
from transformer_fast.triton.attention.decode import attention_decode

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 16 rows and 16 keys and few programs, so that small caches have several parts of several."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, (16, 16, 4, 1)))
        monkeypatch.setattr(module, "PROGRAMS", 16)
        monkeypatch.setattr(module, "REDUCED_AT_ONCE", 2)


def inputs(H, Hkv, Lq, S, D, lengths, dtype=torch.float32, unused=float("nan")):
    """q, the two caches, holding `unused` past each sequence's length, and the lengths."""
    B = len(lengths)
    q, k, v = random(B, H, Lq, D, dtype=dtype), random(B, Hkv, S, D, dtype=dtype, seed=1), None
    v = random(B, Hkv, S, D, dtype=dtype, seed=2)
    for b, length in enumerate(lengths):
        k[b, :, length:] = unused
        v[b, :, length:] = unused
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def in_pages(k, v, page_size, lengths):
    """The same caches as pages in any order, among pages of NaN, with entries past the last key that lead nowhere."""
    B, Hkv, S, D = k.shape
    per_row = -(-S // page_size)
    order = torch.randperm(B * per_row + 3, generator=torch.Generator().manual_seed(7))[: B * per_row]
    table = order.reshape(B, per_row).to(torch.int32)
    pages = []
    for t in (k, v):
        padded = torch.nn.functional.pad(t.cpu(), (0, 0, 0, per_row * page_size - S), value=torch.nan)
        page = torch.full((B * per_row + 3, page_size, Hkv, D), torch.nan, dtype=t.dtype)
        page[order] = padded.reshape(B, Hkv, per_row, page_size, D).permute(0, 2, 3, 1, 4).flatten(0, 1)
        pages.append(page.to(DEVICE))
    for b, length in enumerate(lengths.tolist()):
        table[b, -(-length // page_size) :] = 2**30
    return *pages, table.to(DEVICE)


def oracle(q, k, v, lengths, causal, window, scale, dtype):
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    Lq, S = q.shape[2], k.shape[2]
    lengths, j = lengths.cpu()[:, None, None], torch.arange(S)
    diagonal = torch.arange(Lq)[:, None] + lengths - Lq
    keep = j < lengths.expand(-1, Lq, -1)
    if causal is not None:
        keep = keep & (j <= diagonal + causal)
    if window is not None:
        keep = keep & (j >= diagonal + window)
    out, _, logsumexp = attention(q, k, v, keep=keep[:, None], scale=scale, empty_rows="zero")
    return out, logsumexp


def check(q, k, v, lengths, causal=0, window=None, scale=0.25, page_size=None):
    caches = (k, v, None) if page_size is None else in_pages(k, v, page_size, lengths)
    results = attention_decode(q, *caches[:2], lengths, caches[2], None, None, None, None, causal, window, None, scale)
    eager, exact = (oracle(q, k, v, lengths, causal, window, scale, dtype) for dtype in (q.dtype, torch.float64))
    for name, ours, near, true in zip(("out", "logsumexp"), results, eager, exact, strict=True):
        assert torch.equal(ours.cpu() == -torch.inf, true == -torch.inf)
        assert_as_exact_as_eager(ours.cpu(), near, true, what=name)
    assert results[0].dtype == q.dtype and results[1].dtype == torch.float32
    return results


LENGTHS = [0, 3, 16, 61]


@pytest.mark.parametrize("page_size", [None, 1, 5, 16, 32])
@pytest.mark.parametrize("causal", [None, 0])
@pytest.mark.parametrize("Lq", [1, 4])
def test_lengths_and_pages(Lq, causal, page_size):
    """Lengths below Lq leave the first queries without keys; unused slots hold NaN."""
    check(*inputs(4, 2, Lq, 61, 20, LENGTHS), causal=causal, page_size=page_size)


@pytest.mark.parametrize("page_size", [None, 5, 16])
@pytest.mark.parametrize(("causal", "window"), [(0, -20), (None, -3), (2, -1), (-4, -40), (0, 1), (0, -61), (-70, -80)])
@pytest.mark.parametrize("Lq", [1, 4])
def test_window(Lq, causal, window, page_size):
    """Bounds from below, or from both sides of any diagonal; some leave queries without keys."""
    check(*inputs(4, 2, Lq, 61, 20, LENGTHS), causal=causal, window=window, page_size=page_size)


@pytest.mark.parametrize("programs", [1, 1000])
def test_only_keys_of_the_window_are_read(programs, monkeypatch):
    """What lies before the tile with the first visible key may hold anything, and the rest is shared by the parts."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    q, k, v, lengths = inputs(4, 2, 2, 130, 16, [130, 77], torch.float16)
    clean = check(q, k, v, lengths, window=-20)[0]
    for b, length in enumerate(lengths.tolist()):
        k[b, :, : (length - 2 - 20) // 16 * 16] = torch.nan
        v[b, :, : (length - 2 - 20) // 16 * 16] = torch.nan
    assert torch.equal(attention_decode(q, k, v, lengths, None, None, None, None, None, 0, -20, None, 0.25)[0], clean)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_left_the_window_reaches_only_the_queries_that_still_see_it(value):
    q, k, v, lengths = inputs(4, 2, 4, 40, 16, [40, 18])
    clean = check(q, k, v, lengths, window=-5)[0]
    for b, length in enumerate(lengths.tolist()):  # the first key of query 1, after which none sees it
        v[b, :, length - 8] = value
    dirty = check(q, k, v, lengths, window=-5)[0]
    assert torch.equal(dirty[:, :, 2:], clean[:, :, 2:]) and not dirty[:, :, :2].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "Hkv", "Lq"), [(3, 3, 1), (8, 1, 1), (6, 2, 7), (4, 1, 16), (2, 1, 33)])
def test_rows_of_a_group_share_tiles(H, Hkv, Lq, dtype):
    check(*inputs(H, Hkv, Lq, 70, 16, [70, 35], dtype))


@pytest.mark.parametrize("D", [1, 8, 40, 96, 256])
def test_head_sizes(D):
    check(*inputs(2, 1, 2, 50, D, [50, 33]), page_size=16)


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_parts(programs, monkeypatch):
    """One part is written directly, and joined parts say the same."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    check(*inputs(4, 2, 2, 130, 16, [130, 64, 0], torch.float16))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale(scale):
    check(*inputs(2, 1, 2, 40, 16, [40, 21], unused=0.0), scale=scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_new_key_reaches_only_the_queries_that_see_it(page_size, value):
    q, k, v, lengths = inputs(4, 2, 4, 40, 16, [40, 18])
    clean = check(q, k, v, lengths)[0]
    for b, length in enumerate(lengths.tolist()):
        k[b, 0, length - 2] = value
        v[b, 1, length - 2] = value
    dirty = check(q, k, v, lengths, page_size=page_size)[0]
    assert torch.equal(dirty[:, :, :2], clean[:, :, :2]) and not dirty[:, 2:, 2:].isfinite().any()


def test_strided_cache_and_queries():
    lengths = torch.tensor([30, 11], dtype=torch.int32, device=DEVICE)
    q = random(2, 3, 4, 24).transpose(1, 2)
    k = random(2, 40, 2, 27, seed=1).transpose(1, 2)[..., 3:]
    v = random(2, 40, 2, 24, seed=2).transpose(1, 2)
    out, _ = check(q, k, v, lengths)
    assert out.stride() == q.stride()


def test_lengths_past_the_cache_read_no_further():
    q, k, v, lengths = inputs(2, 2, 1, 20, 16, [20, 20])
    clean = check(q, k, v, lengths)[0]
    wrong = attention_decode(q, k, v, lengths + 5, None, None, None, None, None, 0, None, None, 0.25)[0]
    assert torch.equal(wrong, clean)


@pytest.mark.parametrize("page_size", [None, 16])
def test_two_runs_agree_bit_for_bit(page_size):
    tensors = inputs(4, 2, 3, 90, 32, [90, 47], torch.float16)
    for first, second in zip(check(*tensors, page_size=page_size), check(*tensors, page_size=page_size), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("lengths", "Lq", "S"), [([], 1, 4), ([0, 0], 0, 4), ([0, 0], 2, 0), ([0, 0], 2, 9)])
def test_nothing_to_do(lengths, Lq, S):
    q, k, v, lengths = inputs(4, 2, Lq, S, 8, lengths)
    out, logsumexp = attention_decode(q, k, v, lengths, None, None, None, None, None, 0, None, None, 0.25)
    assert out.shape == q.shape and logsumexp.shape == q.shape[:3]
    assert (out == 0).all() and (logsumexp == -torch.inf).all()


S = 61


def near(*shape: int, Lq: int, capacity: int = 61) -> torch.Tensor:
    """A bias (*shape, Lq + capacity - 1) like ALiBi's, with noise so that a wrong diagonal shows."""
    distance = torch.arange(Lq + capacity - 1, device=DEVICE) - (capacity - 1)
    return random(*shape, Lq + capacity - 1, seed=11) - 0.1 * distance.abs()


def documents(Lq: int) -> dict[str, torch.Tensor]:
    """Rising ids of the keys; of the queries that of the last key, or one of the documents before."""
    generator = torch.Generator().manual_seed(1)
    key_ids = torch.randint(0, 3, (len(LENGTHS), S), generator=generator, dtype=torch.int32).sort(1).values
    last = key_ids.gather(1, torch.tensor(LENGTHS)[:, None].sub(1).clamp(min=0))
    query_ids = last - torch.arange(Lq, dtype=torch.int32).flip(0) // 2
    return {"query_ids": query_ids.to(DEVICE), "key_ids": key_ids.to(DEVICE)}


def check_parts(q, k, v, lengths, page_size=None, causal=0, window=None, scale=0.25, **parts):
    caches = (k, v, None) if page_size is None else in_pages(k, v, page_size, lengths)
    if page_size is not None and (table := caches[2]).shape[1] * page_size != S:
        # The capacity is what the pages hold.
        capacity = table.shape[1] * page_size
        if (ids := parts.get("key_ids")) is not None:
            parts["key_ids"] = torch.nn.functional.pad(ids, (0, capacity - S), value=-7)
        if (bias := parts.get("distance_bias")) is not None:
            parts["distance_bias"] = torch.nn.functional.pad(bias, (capacity - S, 0), value=torch.nan)
    given = [parts.get(name) for name in ("distance_bias", "query_ids", "key_ids")]
    softcap = parts.get("softcap")
    results = attention_decode(q, *caches[:2], lengths, caches[2], *given, None, causal, window, softcap, scale)

    def oracle(dtype):
        tensors = [t.cpu().to(dtype) for t in (q, *caches[:2])]
        options = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in parts.items()}
        table = None if caches[2] is None else caches[2].cpu()
        options |= {"lengths": lengths.cpu(), "page_table": table, "causal": causal, "window": window, "scale": scale}
        return reference(*tensors, **options)

    for name, ours, eager, exact in zip(
        ("out", "logsumexp"), results, oracle(q.dtype), oracle(torch.float64), strict=True
    ):
        assert torch.equal(ours.cpu() == -torch.inf, exact == -torch.inf)
        assert_as_exact_as_eager(ours.cpu(), eager, exact, what=name)
    return results


@pytest.mark.parametrize("page_size", [None, 5, 16])
@pytest.mark.parametrize("Lq", [1, 4])
@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1)], ids=str)
def test_bias_by_distance(shape, Lq, page_size):
    check_parts(*inputs(4, 2, Lq, S, 20, LENGTHS), page_size=page_size, distance_bias=near(*shape, Lq=Lq))


@pytest.mark.parametrize("page_size", [None, 5, 16])
@pytest.mark.parametrize(("Lq", "causal", "window"), [(1, None, None), (4, 0, None), (4, None, None), (7, 0, -20)])
def test_documents(Lq, causal, window, page_size):
    check_parts(*inputs(4, 2, Lq, S, 20, LENGTHS), page_size, causal, window, **documents(Lq))


@pytest.mark.parametrize("softcap", [0.05, 2.0, 1e6])
def test_softcap(softcap):
    check_parts(*inputs(4, 2, 4, S, 20, LENGTHS), softcap=softcap, scale=1.0)


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_parts_together(dtype, programs, monkeypatch):
    """In any number of parts, down to parts of which every tile is of other documents."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    tensors = inputs(4, 2, 4, S, 16, LENGTHS, dtype)
    check_parts(*tensors, causal=1, window=-30, distance_bias=near(1, 4, Lq=4), softcap=3.0, **documents(4))


def test_what_minus_infinity_or_another_document_blocks_may_hold_anything():
    """And where some queries see a key and others must not, it reaches just the former."""
    q, k, v, lengths = inputs(4, 2, 2, S, 16, [61, 61, 40, 40])
    key_ids = (torch.arange(S, device=DEVICE) >= 20).int().expand(4, S).contiguous()
    ids = {"query_ids": key_ids[:, -2:], "key_ids": key_ids}
    bias = near(1, 4, Lq=2)
    bias[:, :, S - 1 - 10] = -torch.inf
    clean = check_parts(q, k, v, lengths, distance_bias=bias, **ids)[0]
    for b, length in enumerate(lengths.tolist()):
        v[b, :, :20] = torch.nan
        k[b, :, :20] = torch.nan
        v[b, :, length - 1 - 10] = torch.inf  # the last query's at distance -10
    dirty = check_parts(q, k, v, lengths, distance_bias=bias, **ids)[0]
    assert torch.equal(dirty[:, :, 1], clean[:, :, 1])
    assert not dirty[:, :, 0].isfinite().any()


def test_two_runs_with_all_parts_agree_bit_for_bit():
    tensors = inputs(4, 2, 3, S, 32, LENGTHS, torch.float16)
    parts = {"distance_bias": near(1, 4, Lq=3), "softcap": 3.0} | documents(3)
    for first, second in zip(check_parts(*tensors, **parts), check_parts(*tensors, **parts), strict=True):
        assert torch.equal(first, second)
