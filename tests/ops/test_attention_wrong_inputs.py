"""Wrong calls of padded, packed and cached attention, and wrong mask parts: the error says what was expected."""

from __future__ import annotations

import math
import re

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask

Q, K, PAGES = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(3, 4, 2, 8)
N, TABLE = torch.tensor([6, 3]), torch.tensor([[0, 2], [1, 9]], dtype=torch.int32)
DECODE = {
    "q is not a tensor": (([1.0], K, K, N), {}, TypeError, "q must be a tensor, got list"),
    "q of three dimensions": ((Q[0], K, K, N), {}, ValueError, r"q must be \(B, H, Lq, D\).*\[4, 1, 8\]"),
    "cache is integer": ((Q, K.long(), K, N), {}, TypeError, "k_cache must be a .*float32, got torch.int64"),
    "dtypes differ": ((Q, K.half(), K.half(), N), {}, TypeError, "k_cache must be .*float32, got torch.float16"),
    "devices differ": ((Q, K.to("meta"), K, N), {}, ValueError, "k_cache must be on cpu, got meta"),
    "caches differ": ((Q, K, K[:, :, :5], N), {}, ValueError, r"v_cache must be of shape .*6, 8\].*5, 8\]"),
    "head_dims differ": ((Q[..., :6], K, K, N), {}, ValueError, r"k_cache .*head_dim of q, 6, .*\[2, 2, 6, 8\]"),
    "batches differ": ((Q[:1], K, K, N), {}, ValueError, r"lengths must be of shape \[1\], got shape \[2\]"),
    "heads do not divide": ((Q[:, :3], K, K, N), {}, ValueError, "heads that are a multiple of those of k and v, 2"),
    "heads of pages do not divide": (
        (Q[:, :3], PAGES, PAGES, N), {"page_table": TABLE},
        ValueError, "heads that are a multiple of those of k and v, 2",
    ),
    "float lengths": ((Q, K, K, N.float()), {}, TypeError, "lengths must be .*int32 or torch.int64, got torch.float32"),
    "lengths of another batch": ((Q, K, K, N[:1]), {}, ValueError, r"lengths must be of shape \[2\], got shape \[1\]"),
    "lengths on another device": ((Q, K, K, N.to("meta")), {}, ValueError, "lengths must be on cpu, got meta"),
    "lengths beyond the cache": ((Q, K, K, N + 1), {}, ValueError, r"\[0, 6\].*got 4 to 7"),
    "negative lengths": ((Q, K, K, N - 4), {}, ValueError, r"\[0, 6\].*got -1 to 2"),
    "lengths beyond the pages": ((Q, PAGES, PAGES, N + 3), {"page_table": TABLE}, ValueError, r"\[0, 8\].*got 6 to 9"),
    "int64 page table": (
        (Q, PAGES, PAGES, N), {"page_table": TABLE.long()}, TypeError, "page_table must be .*int32, got torch.int64",
    ),
    "page table of another batch": (
        (Q, PAGES, PAGES, N), {"page_table": TABLE[:1]},
        ValueError, r"page_table must be of shape \[2, 2\], got shape \[1, 2\]",
    ),
    "a page that is not there": (
        (Q, PAGES, PAGES, N + 2), {"page_table": TABLE},
        ValueError, r"page_table must name pages in \[0, 3\) of k_cache, got 9 for sequence 1",
    ),
    "causal with an offset": ((Q, K, K, N), {"causal": 2}, TypeError, "True or False, got 2"),
    "a mask with a bias": (
        (Q, K, K, N), {"mask": AttentionMask.bias(torch.zeros(6))}, ValueError, "got additive_bias",
    ),
}  # fmt: skip
"""Arguments of attention_decode by position and by name, the error class, and its text."""


def cu(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


TQ, TK = torch.randn(5, 4, 8), torch.randn(7, 2, 8)
CU_Q, CU_K = cu(0, 2, 5), cu(0, 3, 7)
PACKED = {
    "q is not a tensor": (([1.0], TK, TK, CU_Q, CU_K), {}, TypeError, "q must be a tensor, got list"),
    "q is padded": (
        (TQ[None], TK, TK, CU_Q, CU_K), {}, ValueError, r"q must be \(Tq, H, D\), got shape \[1, 5, 4, 8\]",
    ),
    "q is integer": ((TQ.long(), TK, TK, CU_Q, CU_K), {}, TypeError, "float tensor, got torch.int64"),
    "dtypes differ": ((TQ, TK.half(), TK, CU_Q, CU_K), {}, TypeError, "k must be .*float32, got torch.float16"),
    "devices differ": ((TQ, TK.to("meta"), TK, CU_Q, CU_K), {}, ValueError, "k must be on cpu, got meta"),
    "head_dims differ": (
        (TQ, TK[..., :6], TK, CU_Q, CU_K), {}, ValueError, r"k must be of the head_dim of q, 8, .*2, 6\]",
    ),
    "tokens of k and v differ": (
        (TQ, TK, TK[:6], CU_Q, CU_K), {}, ValueError, r"v must be of shape \[7, 2, 8\].*\[6, 2, 8\]",
    ),
    "heads do not divide": ((TQ[:, :3], TK, TK, CU_Q, CU_K), {}, ValueError, "multiple of those of k and v"),
    "cu_seqlens is a list": (
        (TQ, TK, TK, [0, 2, 5], CU_K), {}, TypeError, "attention_packed: cu_seqlens_q must be a tensor, got list",
    ),
    "cu_seqlens is int64": ((TQ, TK, TK, CU_Q, CU_K.long()), {}, TypeError, "cu_seqlens_k .*int32, got torch.int64"),
    "cu_seqlens of two dimensions": ((TQ, TK, TK, CU_Q[None], CU_K), {}, ValueError, r"got shape \[1, 3\]"),
    "cu_seqlens is empty": ((TQ, TK, TK, CU_Q[:0], CU_K), {}, ValueError, r"got shape \[0\]"),
    "cu_seqlens on another device": (
        (TQ, TK, TK, CU_Q.to("meta"), CU_K), {}, ValueError, "_q must be on cpu, got meta",
    ),
    "cu_seqlens does not rise": (
        (TQ, TK, TK, cu(0, 6, 5), CU_K), {}, ValueError, r"_q must rise from 0 to the 5 tokens, got \[0, 6, 5\]",
    ),
    "cu_seqlens starts late": ((TQ, TK, TK, CU_Q, cu(1, 3, 7)), {}, ValueError, r"from 0 to the 7.*\[1, 3, 7\]"),
    "cu_seqlens ends early": ((TQ, TK, TK, CU_Q, cu(0, 3, 6)), {}, ValueError, r"from 0 to the 7.*\[0, 3, 6\]"),
    "numbers of sequences differ": (
        (TQ, TK, TK, CU_Q, cu(0, 7)), {}, ValueError, r"cu_seqlens_k must be of shape \[3\], got shape \[2\]",
    ),
    "max_seqlen_k too small": (
        (TQ, TK, TK, CU_Q, CU_K), {"max_seqlen_k": 3}, ValueError, "at most 3 tokens, as max_seqlen_k says, got 4",
    ),
    "dropout above 1": ((TQ, TK, TK, CU_Q, CU_K), {"dropout_p": 1.5}, ValueError, r"dropout_p.*\[0, 1\], got 1.5"),
    "unknown empty_rows": ((TQ, TK, TK, CU_Q, CU_K), {"empty_rows": "nan"}, ValueError, '"zero", got \'nan\''),
    "causal with an offset": ((TQ, TK, TK, CU_Q, CU_K), {"causal": 2}, TypeError, "True or False, got 2"),
    "a mask that is a tensor": (
        (TQ, TK, TK, CU_Q, CU_K), {"mask": torch.ones(3) > 0}, TypeError, "must be an AttentionMask, got Tensor",
    ),
    "a mask with padding": (
        (TQ, TK, TK, CU_Q, CU_K), {"mask": AttentionMask.lengths(torch.tensor([1]))}, ValueError,
        "only contain window, causal, documents, alibi and relative, and a keep mask of keys, got key_lengths",
    ),
    "a keep mask of a padded batch": (
        (TQ, TK, TK, CU_Q, CU_K), {"mask": AttentionMask.keep(torch.ones(2, 1, 1, 7) > 0)}, ValueError,
        r"keys alone, \(Tk,\) = \(7,\), got shape \(2, 1, 1, 7\)",
    ),
    "a bias for one sequence": (
        (TQ, TK, TK, CU_Q, CU_K), {"bias": [TQ[:2]]}, ValueError, "per sequence, 2 in all, got 1",
    ),
    "a bias of another length": (
        (TQ, TK, TK, CU_Q, CU_K), {"bias": [torch.ones(1, 2, 3), torch.ones(1, 4, 3)]}, ValueError,
        r"bias\[1\] must be .* with H = 4, Lq = 3 and Lk = 4, got shape \(1, 4, 3\)",
    ),
    "a bias of some heads": (
        (TQ, TK, TK, CU_Q, CU_K), {"bias": torch.ones(2, 18)}, ValueError,
        r"H = 4 and pairs = 18, the sum of Lq \* Lk over the sequences, got shape \(2, 18\)",
    ),
    "a bias of too few pairs": (
        (TQ, TK, TK, CU_Q, CU_K), {"bias": torch.ones(4, 17)}, ValueError,
        r"H = 4 and pairs = 18, the sum of Lq \* Lk over the sequences, got shape \(4, 17\)",
    ),
    "a bias of integers": ((TQ, TK, TK, CU_Q, CU_K), {"bias": torch.ones(4, 18).int()}, TypeError, "float tensor"),
    "seqused_k is int64": (
        (TQ, TK, TK, CU_Q, CU_K), {"seqused_k": torch.tensor([1, 1])},
        TypeError, "seqused_k must be .*int32, got torch.int64",
    ),
    "seqused_k of three": (
        (TQ, TK, TK, CU_Q, CU_K), {"seqused_k": cu(1, 1, 1)},
        ValueError, r"seqused_k must be of shape \[2\], got shape \[3\]",
    ),
    "seqused_k past the keys": (
        (TQ, TK, TK, CU_Q, CU_K), {"seqused_k": cu(3, 5)},
        ValueError, r"seqused_k must lie in \[0, 4\], the keys of sequence 1, got 5",
    ),
    "weights of another kind": (
        (TQ, TK, TK, CU_Q, CU_K), {"return_weights": "all"}, ValueError, "return_weights must be False, True or",
    ),
}  # fmt: skip
"""The same of attention_packed."""


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, backend):
    arguments, more, error, says = DECODE[name]
    with tfast.backend(backend), pytest.raises(error, match=says):
        tfast.attention_decode(*arguments, **more)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", PACKED)
def test_packed(name, backend):
    arguments, more, error, says = PACKED[name]
    with tfast.backend(backend), pytest.raises(error, match=says):
        tfast.attention_packed(*arguments, **more)


B, H, L, D = 2, 4, 70, 16


def decode(**options):
    q = torch.randn(B, H, 1, D)
    return tfast.attention_decode(q, *[torch.randn(B, H, L, D)] * 2, torch.full((B,), L), **options)


def packed(**options):
    starts = torch.tensor([0, 30, L], dtype=torch.int32)
    return tfast.attention_packed(*[torch.randn(L, H, D)] * 3, starts, starts, **options)


def attention(*args, **options):
    return tfast.attention(*[torch.randn(B, H, L, D)] * 3, *args, **options)


IDS = torch.zeros(B, L, dtype=torch.int64)
PARTS = {
    "a prefix per query": (lambda: AttentionMask.prefix(IDS), ValueError, "lengths must be (B,), got shape (2, 70)"),
    "prefixes of another batch": (
        lambda: attention(AttentionMask.prefix(IDS[0])), ValueError, "end of shape (70, 1, 1) does not broadcast",
    ),
    "a prefix on another device": (
        lambda: attention(AttentionMask.prefix(IDS[:, 0].to("meta"))), ValueError, "end must be on cpu, got meta",
    ),
    "a prefix in a packed batch": (lambda: packed(mask=AttentionMask.prefix(IDS[:, 0])), ValueError, "got unions"),
    "a prefix in a cache": (lambda: decode(mask=AttentionMask.prefix(IDS[:, 0])), ValueError, "got unions"),
    "ids that are no tensor": (lambda: AttentionMask.documents([0, 1]), TypeError, "integer tensor (B, L), got list"),
    "float ids": (lambda: AttentionMask.documents(IDS.float()), TypeError, "got torch.float32"),
    "ids without a batch": (lambda: AttentionMask.documents(IDS[0]), ValueError, "(B, L), got shape (70,)"),
    "ids of another length": (
        lambda: attention(AttentionMask.documents(IDS[:, 1:])), ValueError,
        "query_ids must be (B, L) = (2, 70), or (1, 70) for all sequences, got shape (2, 69)",
    ),
    "key ids of another length": (
        lambda: attention(AttentionMask.documents(IDS, IDS[:, 1:])), ValueError,
        "key_ids must be (B, L) = (2, 70), or (1, 70) for all sequences, got shape (2, 69)",
    ),
    "ids of another batch": (
        lambda: attention(AttentionMask.documents(IDS.repeat(2, 1))), ValueError, "(B, L) = (2, 70)",
    ),
    "ids of a padded batch for a packed one": (
        lambda: packed(mask=AttentionMask.documents(IDS)), ValueError, "(B, L) = (1, 70)",
    ),
    "ids of the queries for a cache": (
        lambda: decode(mask=AttentionMask.documents(IDS[:, :1])), ValueError,
        "key_ids must be (B, L) = (2, 70), or (1, 70) for all sequences, got shape (2, 1)",
    ),
    "slopes that are no tensor": (lambda: AttentionMask.alibi(0.5), TypeError, "slopes must be a float tensor"),
    "integer slopes": (lambda: AttentionMask.alibi(IDS[0]), TypeError, "got torch.int64"),
    "slopes of three dimensions": (lambda: AttentionMask.alibi(torch.rand(H, 1, 1)), ValueError,
        "(H,) or (B, H)"),
    "slopes for other heads": (
        lambda: attention(AttentionMask.alibi(torch.rand(H + 1))), ValueError,
        "(H,) or (B, H) with B = 2 and H = 4, got shape (5,)",
    ),
    "slopes for other batches": (
        lambda: attention(AttentionMask.alibi(torch.rand(B + 1, H))), ValueError,
        "(H,) or (B, H) with B = 2 and H = 4, got shape (3, 4)",
    ),
    "slopes a sequence of a packed batch": (
        lambda: packed(mask=AttentionMask.alibi(torch.rand(B, H))), ValueError,
        "alibi must be (H,) with H = 4, got shape (2, 4)",
    ),
    "an offset that is no int": (lambda: AttentionMask.alibi(torch.rand(H), 0.5), TypeError, "alibi offset"),
    "a table of another width": (
        lambda: attention(AttentionMask.relative(torch.randn(32, H + 1))), ValueError,
        "must be (buckets, H) with H = 4, got shape (32, 5)",
    ),
    "a table of one dimension": (lambda: AttentionMask.relative(torch.randn(32)), ValueError, "(buckets, H)"),
    "too few buckets": (lambda: AttentionMask.relative(torch.randn(3, H)), ValueError, "3 buckets"),
    "a max_distance among the exact buckets": (
        lambda: AttentionMask.relative(torch.randn(32, H), max_distance=8), ValueError, "max_distance above 8, got 8",
    ),
    "a max_distance that is no int": (
        lambda: AttentionMask.relative(torch.randn(32, H), 1e2), TypeError, "relative max_distance",
    ),
    "a softcap of 0": (lambda: attention(softcap=0.0), ValueError, "softcap must be above 0 or None, got 0"),
    "a negative softcap": (lambda: decode(softcap=-1.0), ValueError, "attention_decode: softcap"),
    "a softcap that is NaN": (lambda: packed(softcap=math.nan), ValueError, "attention_packed: softcap"),
    "sinks that are no tensor": (lambda: attention(sinks=0.0), TypeError, "sinks must be a float tensor (H,)"),
    "sinks for other heads": (
        lambda: attention(sinks=torch.zeros(H + 1)), ValueError, "sinks must be of shape [4], got",
    ),
    "sinks of a cache for other heads": (lambda: decode(sinks=torch.zeros(1)), ValueError, "attention_decode: sinks"),
    "a window that is empty": (lambda: AttentionMask.window(2, -3), ValueError, "got 2 and -3, which keep no key"),
    "a dense mask for a packed batch": (
        lambda: packed(mask=AttentionMask.keep(torch.ones(L, L, dtype=torch.bool))), ValueError, "keep_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", PARTS)
def test_parts_of_a_mask(case, backend):
    call, error, message = PARTS[case]
    with tfast.backend(backend), pytest.raises(error, match=re.escape(message)):
        call()


def test_a_generous_max_seqlen_costs_no_memory():
    starts = torch.tensor([0, 2], dtype=torch.int32)
    rows, slopes = torch.randn(2, 1, 4), tfast.AttentionMask.alibi(torch.ones(1))
    for mask in (None, slopes):
        expected = tfast.attention_packed(rows, rows, rows, starts, starts, mask=mask)
        for backend in ("auto", "reference"):
            with tfast.backend(backend):
                longest = {"max_seqlen_q": 2**31, "max_seqlen_k": 2**31}
                out = tfast.attention_packed(rows, rows, rows, starts, starts, mask=mask, **longest)
            torch.testing.assert_close(out, expected)
    with pytest.raises(TypeError, match="max_seqlen_q must be an int"):
        tfast.attention_packed(rows, rows, rows, starts, starts, max_seqlen_q=6.0)
    with pytest.raises(ValueError, match="q must be"):
        tfast.attention(torch.tensor(1.0), rows, rows)
