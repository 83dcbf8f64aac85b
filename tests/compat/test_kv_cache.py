"""``flash_attn_with_kvcache`` against a plain cache per sequence, as flash-attention documents it."""

from __future__ import annotations

import pytest
import torch
from peers import assert_alike, plain_attention, rotated, seen

import transformer_fast as tfast
from transformer_fast.compat import flash_attn_with_kvcache

B, H, HKV, D, S = 3, 4, 2, 8, 12
BEFORE = [7, 0, 4]
KINDS = ["rows", "indexed", "left", "indexed left", "pages"]
ROWS, LEFT = [3, 0, 4], [2, 0, 3]


def stored(kind):
    """Return two caches, the arguments that name them, and the index pair of key j of sequence b."""
    count, size = (9, 4) if kind == "pages" else (5, S)
    caches = [torch.randn(count, size, HKV, D, dtype=torch.float64) for _ in range(2)]
    given, table = {}, torch.randperm(9).view(B, 3)
    if kind == "pages":
        return caches, {"block_table": table.int()}, lambda b, j: (int(table[b, j // size]), j % size)
    if "indexed" in kind:
        given["cache_batch_idx"] = torch.tensor(ROWS, dtype=torch.int32)
    if "left" in kind:
        given["cache_leftpad"] = torch.tensor(LEFT, dtype=torch.int32)
    return caches, given, lambda b, j: (ROWS[b] if "indexed" in kind else b, j)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("Lq", "new"), [(1, 1), (2, 4), (2, None)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves", "halves of some"])
@pytest.mark.parametrize("alibi", [None, (B, H)])
def test_every_option(kind, Lq, new, causal, window, rotary, alibi, backend):
    caches, given, place = stored(kind)
    q = torch.randn(B, Lq, H, D, dtype=torch.float64)
    fresh = [] if new is None else [torch.randn(B, new, HKV, D, dtype=torch.float64) for _ in range(2)]
    slopes = None if alibi is None else torch.rand(alibi, dtype=torch.float64)
    given |= {"cache_seqlens": torch.tensor(BEFORE, dtype=torch.int32), "alibi_slopes": slopes, "softcap": 3.0}
    turn = lambda x, position: x  # noqa: E731
    if rotary is not None and new is not None:
        angles = torch.rand(S, 2 if "some" in rotary else 4, dtype=torch.float64) * 6
        turn = lambda x, position: rotated(x, angles[position], rotary == "interleaved")  # noqa: E731
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary == "interleaved"}

    expected = [t.clone() for t in caches]
    outs, rows = [], []
    for b, n in enumerate(BEFORE):
        for j in range(new or 0):
            expected[0][place(b, n + j)] = turn(fresh[0][b, j], n + j)
            expected[1][place(b, n + j)] = fresh[1][b, j]
        first = LEFT[b] if "left" in kind else 0
        keys = range(first, n + (new or 0))
        k, v = (torch.stack([t[place(b, j)] for j in keys]) if keys else t.new_zeros(0, HKV, D) for t in expected)
        local = causal or window != (-1, -1)
        own = torch.stack([turn(x, n + i if local else n) for i, x in enumerate(q[b])])
        of_b = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        out, logsumexp, _ = plain_attention(own, k, v, seen(Lq, len(k), causal, window), softcap=3.0, slopes=of_b)
        outs.append(out), rows.append(logsumexp)

    options = {"causal": causal, "window_size": window, **given}
    copies = [t.clone() for t in caches]
    out, logsumexp = flash_attn_with_kvcache(q, *caches, *fresh, return_softmax_lse=True, **options)
    assert_alike((out, logsumexp, *caches), (torch.stack(outs), torch.stack(rows), *expected))
    assert torch.equal(flash_attn_with_kvcache(q, *copies, *fresh, **options), out) and out.is_contiguous()


def test_one_length_for_all_and_a_full_cache(backend):
    (k, v), _, _ = stored("rows")
    q = torch.randn(B, 2, H, D, dtype=torch.float64)
    whole = flash_attn_with_kvcache(q, k, v, causal=True)
    assert torch.equal(whole, flash_attn_with_kvcache(q, k, v, cache_seqlens=S, causal=True))
    seqlens = torch.full((B,), 5)
    of_five = flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens)
    assert torch.equal(of_five, flash_attn_with_kvcache(q, k, v, cache_seqlens=5, num_splits=3))


def test_generation_is_attention_of_the_whole_sequence():
    """Generate token by token with a bfloat16 cache that requires a gradient; no call records it."""
    q, k, v = (torch.randn(B, S, heads, D).bfloat16() for heads in (H, HKV, HKV))
    caches = [torch.full_like(k, torch.nan).requires_grad_() for _ in range(2)]
    steps = []
    for t in range(S):
        one = slice(t, t + 1)
        steps.append(flash_attn_with_kvcache(q[:, one], *caches, k[:, one], v[:, one], cache_seqlens=t, causal=True))
    whole = tfast.compat.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-2, rtol=2e-2)
    assert not steps[0].requires_grad and torch.equal(caches[0], k)


Q, CACHE = torch.randn(2, 1, 4, 8), torch.randn(3, 6, 2, 8)
NEW, N = torch.randn(2, 1, 2, 8), torch.tensor([2, 3], dtype=torch.int32)
COS = torch.ones(6, 4)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": Q[0]}, ValueError, r"q must be \(B, Lq, H, D\)"),
        ({"k_cache": CACHE[0]}, ValueError, r"k_cache must be \(B, S, Hkv, D\)"),
        ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, ValueError, "at least B = 2 rows"),
        ({"k": NEW}, ValueError, "k and v must be given together, got k alone"),
        ({"k": NEW, "v": NEW, "cache_seqlens": None}, ValueError, "k and v need cache_seqlens"),
        ({"k": NEW[..., :4], "v": NEW}, ValueError, r"k and v must be \(2, 1, 2, 8\)"),
        ({"k": NEW, "v": NEW, "cache_seqlens": N + 3}, ValueError, r"must lie in \[0, 6\], the keys of the cache"),
        ({"cache_seqlens": N.float()}, TypeError, "cache_seqlens must be an int32 tensor"),
        ({"cache_seqlens": N[:1]}, ValueError, r"cache_seqlens must be \(B,\) = \(2,\)"),
        ({"cache_seqlens": 7}, ValueError, r"cache_seqlens must lie in \[0, 6\]"),
        ({"cache_batch_idx": N}, ValueError, r"cache_batch_idx must lie in \[0, 2\], the rows of k_cache, got 2 to 3"),
        ({"cache_batch_idx": N, "block_table": TABLE}, ValueError, "cache_batch_idx cannot be combined with block_t"),
        ({"cache_leftpad": N, "block_table": TABLE}, ValueError, "cache_leftpad cannot be combined with block_table"),
        ({"block_table": TABLE[:1]}, ValueError, r"block_table must be \(B, max_pages\), B = 2"),
        ({"rotary_cos": COS, "rotary_sin": COS}, ValueError, "rotary_cos and rotary_sin need k and v"),
        ({"k": NEW, "v": NEW, "rotary_cos": COS}, ValueError, "must be given together"),
        ({"k": NEW, "v": NEW, "rotary_cos": COS[:3], "rotary_sin": COS[:3]}, ValueError, r"positions .* \[0, 2\]"),
        (
            {"k": NEW, "v": NEW, "rotary_cos": COS.repeat(1, 2), "rotary_sin": COS.repeat(1, 2)},
            ValueError,
            "R up to D = 8",
        ),
    ],
)
def test_wrong_calls_say_what_is_expected(change, error, said):
    given = {"q": Q, "k_cache": CACHE.clone(), "v_cache": CACHE.clone(), "cache_seqlens": N}
    with pytest.raises(error, match=said):
        flash_attn_with_kvcache(**{**given, "causal": True, **change})
