"""``tfast.attention_decode`` as users call it, and its oracle against attention over each cache alone."""

import math

import pytest
import torch
from helpers import assert_as_exact_as_eager

import transformer_fast as tfast
from transformer_fast import AttentionMask, backends
from transformer_fast.reference.attention import attention as plain_reference
from transformer_fast.reference.attention import attention_decode as reference

H, HKV, D, S = 4, 2, 20, 40
SCALE = 1 / math.sqrt(D)
LENGTHS = torch.tensor([40, 1, 0, 17, 33], dtype=torch.int32)


def caches(Lq, dtype=torch.float64, device="cpu"):
    """Queries and a contiguous cache whose unused places hold NaN."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in [(5, H, Lq, D), (5, HKV, S, D), (5, HKV, S, D)]
    )
    unused = torch.arange(S) >= LENGTHS[:, None]
    for cache in (k, v):
        cache.masked_fill_(unused[:, None, :, None].to(device), float("nan"))
    return q, k, v


def paged(cache, page_size=8):
    """The same cache in pages that lie in disorder, and the table that says where; entries past the end are wild."""
    B, Hkv, length, dim = cache.shape
    pages = cache.transpose(1, 2).reshape(B * length // page_size, page_size, Hkv, dim)
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(pages.shape[0], generator=generator)
    table = torch.argsort(order).view(B, -1).to(torch.int32)
    used = (LENGTHS[:, None] + page_size - 1) // page_size
    table[torch.arange(table.shape[1]) >= used] = 2**30
    return pages[order.to(cache.device)], table.to(cache.device)


# Causal and window offsets, from the query's own key on.
BOUNDS = [(0, None), (None, None), (0, -4), (None, -1), (-2, -20)]


@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("Lq", [1, 3])
def test_the_oracle_is_attention_over_each_cache_alone(Lq, causal, window):
    q, k, v = caches(Lq)
    out, logsumexp = reference(q, k, v, lengths=LENGTHS, causal=causal, window=window, scale=SCALE)
    for b, n in enumerate(LENGTHS.tolist()):
        expected, _, expected_logsumexp = plain_reference(
            q[b : b + 1],
            k[b : b + 1, :, :n],
            v[b : b + 1, :, :n],
            causal=None if causal is None else n - Lq + causal,
            window=None if window is None else n - Lq + window,
            scale=SCALE,
            empty_rows="zero",
        )
        assert torch.allclose(out[b], expected[0], atol=1e-12)
        assert torch.allclose(logsumexp[b], expected_logsumexp[0], atol=1e-12)


@pytest.mark.parametrize("causal", [0, None])
def test_the_oracle_reads_pages_as_it_reads_one_piece(causal):
    q, k, v = caches(2)
    (pages_k, table), (pages_v, _) = paged(k), paged(v)
    expected = reference(q, k, v, lengths=LENGTHS, causal=causal, scale=SCALE)
    actual = reference(q, pages_k, pages_v, lengths=LENGTHS, page_table=table, causal=causal, scale=SCALE)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("Lq", [1, 3])
def test_the_public_op_matches_the_oracle(Lq, causal, window, dtype, device):
    q, k, v = caches(Lq, dtype, device)
    lengths = LENGTHS.to(device)
    (pages_k, table), (pages_v, _) = paged(k), paged(v)
    bounds = {"causal": causal, "window": window, "lengths": lengths}
    eager = reference(q, k, v, **bounds, scale=SCALE)[0]
    exact = reference(q.double(), k.double(), v.double(), **bounds, scale=SCALE)[0]
    options = {"causal": causal is not None, "mask": AttentionMask(causal_offset=causal, window_offset=window)}
    actual = tfast.attention_decode(q, k, v, lengths, **options)
    from_pages = tfast.attention_decode(q, pages_k, pages_v, lengths.long(), page_table=table, **options)
    assert_as_exact_as_eager(actual, eager, exact, what="contiguous", ulps=8)
    assert_as_exact_as_eager(from_pages, eager, exact, what="paged", ulps=8)


def test_a_cache_that_is_a_view_and_a_long_one(device):
    generator = torch.Generator().manual_seed(1)
    q, whole = (torch.randn(shape, generator=generator).to(device) for shape in [(2, 1, H, D), (2, 1500, 2, HKV, D)])
    k, v = whole.permute(2, 0, 3, 1, 4)
    lengths = torch.tensor([1500, 1025], device=device)
    exact = reference(q.transpose(1, 2).double(), k.double(), v.double(), lengths=lengths, scale=SCALE)[0]
    eager = reference(q.transpose(1, 2), k, v, lengths=lengths, scale=SCALE)[0]
    assert_as_exact_as_eager(tfast.attention_decode(q.transpose(1, 2), k, v, lengths), eager, exact)


def test_it_continues_what_attention_computes(device):
    """The last rows of causal attention over a whole sequence, one cache for both."""
    q, k, v = (torch.randn(2, heads, 9, D, device=device) for heads in (H, HKV, HKV))
    whole = tfast.attention(q, k, v, causal=True)
    last = tfast.attention_decode(q[:, :, 6:], k, v, torch.full((2,), 9, device=device))
    assert torch.allclose(last, whole[:, :, 6:], atol=1e-5)


def test_it_continues_what_attention_computes_in_a_window(device):
    q, k, v = (torch.randn(2, heads, 9, D, device=device) for heads in (H, HKV, HKV))
    window = AttentionMask.window(2)
    whole = tfast.attention(q, k, v, window)
    last = tfast.attention_decode(q[:, :, 6:], k, v, torch.full((2,), 9, device=device), mask=window)
    assert torch.allclose(last, whole[:, :, 6:], atol=1e-5)


def test_nothing_to_read(device):
    q = torch.randn(2, H, 1, D, device=device)
    empty, none = torch.randn(2, HKV, 0, D, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    assert torch.all(tfast.attention_decode(q, empty, empty, none) == 0)
    assert tfast.attention_decode(q[:0], empty[:0], empty[:0], none[:0]).shape == (0, H, 1, D)


def test_there_is_no_gradient_and_it_says_so(device):
    q, k = torch.randn(1, 2, 1, 8, device=device, requires_grad=True), torch.randn(1, 2, 4, 8, device=device)
    lengths = torch.tensor([4], device=device)
    with pytest.raises(RuntimeError, match=r"no gradient.*torch.no_grad\(\)"):
        tfast.attention_decode(q, k, k, lengths)
    with torch.no_grad():
        assert not tfast.attention_decode(q, k, k, lengths).requires_grad


def test_opcheck():
    op, q, k = torch.ops.transformer_fast.attention_decode.default, torch.randn(2, 4, 2, 8), torch.randn(2, 2, 6, 8)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    backend = backends.resolve("attention", q.device, q.dtype)
    torch.library.opcheck(op, (q, k, k, lengths, None, 0, -3, 0.3, backend))
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    torch.library.opcheck(op, (q, k.transpose(1, 2), k.transpose(1, 2), lengths, table, 0, None, 0.3, backend))


def test_autocast_and_compile(device):
    q, k, v = caches(2, torch.float32, device)
    lengths = LENGTHS.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        out = tfast.attention_decode(q, k, v, lengths)
    assert torch.equal(out, tfast.attention_decode(q.bfloat16(), k.bfloat16(), v.bfloat16(), lengths))
    compiled = torch.compile(tfast.attention_decode, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v, lengths), tfast.attention_decode(q, k, v, lengths), atol=1e-6)


Q, K, PAGES = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(3, 4, 2, 8)
N, TABLE = torch.tensor([6, 3]), torch.tensor([[0, 2], [1, 9]], dtype=torch.int32)
WRONG = {
    "q is not a tensor": (([1.0], K, K, N), {}, TypeError, "q must be a tensor, got list"),
    "q of three dimensions": ((Q[0], K, K, N), {}, ValueError, r"q must be \(B, H, Lq, D\).*\(4, 1, 8\)"),
    "cache is integer": ((Q, K.long(), K, N), {}, TypeError, "k_cache must be a float tensor, got torch.int64"),
    "dtypes differ": ((Q, K.half(), K.half(), N), {}, TypeError, "share a dtype.*float32.*float16"),
    "devices differ": ((Q, K.to("meta"), K, N), {}, ValueError, "one device, got cpu, meta, cpu"),
    "caches differ": ((Q, K, K[:, :, :5], N), {}, ValueError, r"share their shape.*6, 8\).*5, 8\)"),
    "head_dims differ": ((Q[..., :6], K, K, N), {}, ValueError, r"head_dim.*\(2, 4, 1, 6\).*\(2, 2, 6, 8\)"),
    "batches differ": ((Q[:1], K, K, N), {}, ValueError, r"\(B, Hkv, S, D\) must share the batch.*\(1, 4, 1, 8\)"),
    "heads do not divide": ((Q[:, :3], K, K, N), {}, ValueError, "multiple of those of the cache"),
    "heads of pages do not divide": (
        (Q[:, :3], PAGES, PAGES, N), {"page_table": TABLE}, ValueError, "page_size, Hkv, D.*as there is a page table",
    ),
    "float lengths": ((Q, K, K, N.float()), {}, TypeError, "lengths must be an int32.*got torch.float32"),
    "lengths of another batch": ((Q, K, K, N[:1]), {}, ValueError, r"\(B,\) = \(2,\), got shape \(1,\)"),
    "lengths on another device": ((Q, K, K, N.to("meta")), {}, ValueError, "q is on cpu but lengths on meta"),
    "lengths beyond the cache": ((Q, K, K, N + 1), {}, ValueError, r"\[0, 6\].*got 4 to 7"),
    "negative lengths": ((Q, K, K, N - 4), {}, ValueError, r"\[0, 6\].*got -1 to 2"),
    "lengths beyond the pages": ((Q, PAGES, PAGES, N + 3), {"page_table": TABLE}, ValueError, r"\[0, 8\].*got 6 to 9"),
    "int64 page table": ((Q, PAGES, PAGES, N), {"page_table": TABLE.long()}, TypeError, "page_table must be an int32"),
    "page table of another batch": (
        (Q, PAGES, PAGES, N), {"page_table": TABLE[:1]}, ValueError, r"\(B, max_pages\) with B = 2, got shape \(1, 2\)",
    ),
    "a page that is not there": (
        (Q, PAGES, PAGES, N + 2), {"page_table": TABLE}, ValueError, r"page_table\[1\] names pages 1 to 9.*0 to 2",
    ),
    "causal with an offset": ((Q, K, K, N), {"causal": 2}, TypeError, "True or False, got 2"),
    "a mask with a bias": (
        (Q, K, K, N), {"mask": AttentionMask.bias(torch.zeros(6))}, ValueError, "got additive_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    arguments, more, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        tfast.attention_decode(*arguments, **more)
