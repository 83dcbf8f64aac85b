"""Calls for tests/ops/test_export.py: of every function of ``compat``, of ops with offsets computed from sizes, and of
``scaled_dot_product_attention`` on tensors of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from export_cases import VOCABULARY, Call, Case, D, Inputs, heads, ids, lengths, starts, x
from test_compile_offsets import BUCKETS, MASKS, SLOPES, TABLE, WEIGHT
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import transformer_fast as tfast
from transformer_fast import AttentionMask, compat, layers

H, HKV, PAGE = 4, 2, 4
Flash = dict[str, Any]


def rows(batch: int, length: int, *middle: int) -> Tensor:
    """Return (B, L, ..., 8), the layout of flash-attention."""
    return torch.randn(batch, length, *middle, 8)


def padded(batch: int, length: int) -> Inputs:
    return rows(batch, length, H), rows(batch, length + 2, HKV), rows(batch, length + 2, HKV)


def tokens(batch: int, length: int) -> Inputs:
    """Return q, k and v of packed sequences, and the starts of the queries and of the keys."""
    T = batch * length
    of_keys = torch.tensor([0, 2, 6, T - 2, T], dtype=torch.int32)
    return *(torch.randn(T, heads, 8) for heads in (H, HKV, HKV)), starts(batch, length), of_keys


def table(sequences: int, pages: int) -> Tensor:
    return torch.arange(sequences * pages, dtype=torch.int32).view(sequences, pages)


def paged(batch: int, length: int) -> Inputs:
    """Return packed queries, pages of keys and values, starts of both, and the page table."""
    q, _, _, of_queries, of_keys = tokens(batch, length)
    pages = -(-batch * length // PAGE)
    k, v = rows(4 * pages, PAGE, HKV), rows(4 * pages, PAGE, HKV)
    return q, k, v, of_queries, of_keys, table(4, pages)


def cached(batch: int, length: int) -> Inputs:
    """Return two new queries per sequence, the cache, and how many keys it has."""
    known = lengths(batch, length - 3).to(torch.int32)
    return rows(batch, 2, H), rows(batch, length, HKV), rows(batch, length, HKV), known


def copied(function: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Any]:
    """Call of ``flash_attn_with_kvcache``, which writes into the cache, on a copy; returns the copy too."""

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, known: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        caches = k_cache.clone(), v_cache.clone()
        given = dict(zip(names, more, strict=True))
        out = function(q, *caches, cache_seqlens=known, **given, **options)
        return (*(out if isinstance(out, tuple) else (out,)), *caches)

    return call


def packed(function: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Any]:
    """Call of a function of packed sequences, whose longest has no more tokens than all have."""

    def call(*args: Tensor) -> Any:
        count = len(args) - len(names)
        longest = [args[0].shape[0]] * (1 if count == 2 else 2)
        return function(*args[:count], *longest, **dict(zip(names, args[count:], strict=True)), **options)

    return call


def rows_and_padding(batch: int, length: int) -> Inputs:
    return rows(batch, length, H), torch.arange(length) < lengths(batch, length)[:, None]


def unpadded(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Attention without padding, and the places of its tokens in the batch."""
    packed_x, places, of_tokens, longest, _ = compat.unpad_input(x, keep)
    return compat.flash_attn_varlen_func(packed_x, packed_x, packed_x, of_tokens, of_tokens, longest, longest), places


def two_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its last result, S_dmask, which is empty without dropout."""
    return lambda *args: function(*args)[:2]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def hidden_rows(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape, dtype=torch.int32)


def in_a_block() -> Call:
    block_mask = create_block_mask(causal, None, None, 6, 6, device="cpu")
    return Call(lambda q, k, v: compat.flex_attention(q, k, v, block_mask=block_mask))


FLASH: Flash = {"causal": True, "window_size": (3, -1), "softcap": 2.0}
PROBS: Flash = {**FLASH, "return_attn_probs": True}
COMPAT: dict[str, Case] = {
    "flash_attn_func": (lambda: Call(compat.flash_attn_func), padded),
    "flash_attn_func, options": (
        lambda: Call(two_results(lambda q, k, v, s: compat.flash_attn_func(q, k, v, alibi_slopes=s, **PROBS))),
        lambda b, n: (*padded(b, n), torch.rand(H)),
    ),
    "flash_attn_func, a window from sizes": (
        lambda: Call(lambda q, k, v: compat.flash_attn_func(q, k, v, window_size=(k.shape[1] // 2, -1))),
        padded,
    ),
    "flash_attn_kvpacked_func": (
        lambda: Call(lambda q, kv: compat.flash_attn_kvpacked_func(q, kv, causal=True)),
        lambda b, n: (rows(b, n, H), rows(b, n + 2, 2, HKV)),
    ),
    "flash_attn_qkvpacked_func": (
        lambda: Call(lambda qkv: compat.flash_attn_qkvpacked_func(qkv, window_size=(2, 1))),
        lambda b, n: (rows(b, n, 3, H),),
    ),
    "flash_attn_varlen_func": (lambda: Call(packed(compat.flash_attn_varlen_func)), tokens),
    "flash_attn_varlen_func, options": (
        lambda: Call(two_results(packed(compat.flash_attn_varlen_func, "alibi_slopes", **PROBS))),
        lambda b, n: (*tokens(b, n), torch.rand(H)),
    ),
    "flash_attn_varlen_func, slopes per sequence": (
        lambda: Call(two_results(packed(compat.flash_attn_varlen_func, "alibi_slopes", **PROBS))),
        lambda b, n: (*tokens(b, n), torch.rand(4, H)),
    ),
    "flash_attn_varlen_func, pages": (
        lambda: Call(two_results(packed(compat.flash_attn_varlen_func, "block_table", **PROBS))),
        paged,
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda: Call(packed(compat.flash_attn_varlen_kvpacked_func, causal=True)),
        lambda b, n: (tokens(b, n)[0], torch.randn(b * n, 2, HKV, 8), *tokens(b, n)[3:]),
    ),
    "flash_attn_varlen_qkvpacked_func": (
        lambda: Call(packed(compat.flash_attn_varlen_qkvpacked_func, window_size=(2, 1))),
        lambda b, n: (torch.randn(b * n, 3, H, 8), starts(b, n)),
    ),
    "flash_attn_with_kvcache": (
        lambda: Call(copied(compat.flash_attn_with_kvcache, causal=True)),
        cached,
    ),
    "flash_attn_with_kvcache, new keys": (
        lambda: Call(copied(
            compat.flash_attn_with_kvcache, "k", "v", "rotary_cos", "rotary_sin", "alibi_slopes", **FLASH,
            return_softmax_lse=True,
        )),
        lambda b, n: (
            *cached(b, n), rows(b, 2, HKV), rows(b, 2, HKV), torch.randn(20, 3), torch.randn(20, 3), torch.rand(b, H),
        ),
    ),
    "flash_attn_with_kvcache, rows and left padding": (
        lambda: Call(copied(compat.flash_attn_with_kvcache, "cache_batch_idx", "cache_leftpad")),
        lambda b, n: (*cached(b, n), torch.arange(b, dtype=torch.int32).flip(0), torch.arange(b, dtype=torch.int32)),
    ),
    "flash_attn_with_kvcache, pages": (
        lambda: Call(copied(compat.flash_attn_with_kvcache, "block_table", "k", "v", rotary_interleaved=False)),
        lambda b, n: (
            rows(b, 2, H), rows(b * n, PAGE, HKV), rows(b * n, PAGE, HKV), lengths(b, n).to(torch.int32), table(b, n),
            rows(b, 3, HKV), rows(b, 3, HKV),
        ),
    ),
    "flash_attn_with_kvcache, one length for all": (
        lambda: Call(lambda q, k, v: compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=k.shape[1] - 2)),
        lambda b, n: cached(b, n)[:3],
    ),
    "flash_attn_with_kvcache, a full cache": (
        lambda: Call(compat.flash_attn_with_kvcache),
        lambda b, n: cached(b, n)[:3],
    ),
    "varlen_attn": (
        lambda: Call(packed(
            compat.varlen_attn, "seqused_k", window_size=(2, 0), enable_gqa=True, return_aux=compat.AuxRequest(True),
        )),
        lambda b, n: (*tokens(b, n), torch.tensor([1, 0, 4, 2], dtype=torch.int32)),
    ),
    "varlen_attn, pages": (
        lambda: Call(lambda q, k, v, starts, pages, used: compat.varlen_attn(
            q, k, v, starts, None, q.shape[0], q.shape[0], block_table=pages, seqused_k=used, enable_gqa=True
        )),
        lambda b, n: (*paged(b, n)[:4], paged(b, n)[5], torch.tensor([1, 0, 4, 2], dtype=torch.int32)),
    ),
    "flex_attention": (
        lambda: Call(lambda q, k, v, n: compat.flex_attention(
            q, k, v, block_mask=AttentionMask.lengths(n) & AttentionMask.causal(), enable_gqa=True, return_lse=True
        )),
        lambda b, n: (heads(b, n), heads(b, n, HKV), heads(b, n, HKV), lengths(b, n)),
    ),
    "flex_attention, a block mask": (in_a_block, lambda b, n: (heads(b, 6), heads(b, 6), heads(b, 6))),
    "flashmask_attention": (
        lambda: Call(two_results(
            lambda q, k, v, t: compat.flashmask_attention(q, k, v, t, causal=True, return_softmax_lse=True)
        )),
        lambda b, n: (*padded(b, n), hidden_rows(b, 1, n + 2, 1)),
    ),
    "flashmask_attention, a bias": (
        lambda: Call(lambda q, k, v, t, bias: compat.flashmask_attention(q, k, v, t, bias=bias)),
        lambda b, n: (*padded(b, n), hidden_rows(b, HKV, n + 2, 4), torch.randn(b, H, n, n + 2)),
    ),
    "flashmask_attention, a window": (
        lambda: Call(lambda q: compat.flashmask_attention(q, q, q, window_size=(2, 1))), lambda b, n: (rows(b, n, H),),
    ),
    "startend_mask": (
        lambda: Call(lambda q, k, v, t: tfast.attention(q, k, v, compat.startend_mask(t, q.shape[2], causal=True))),
        lambda b, n: (heads(b, 3, H), heads(b, n, H), heads(b, n, H), hidden_rows(b, H, n, 2)),
    ),
    "unpad_input": (lambda: Call(lambda x, keep: unpadded(x, keep)[0]), rows_and_padding),
    "pad_input": (
        lambda: Call(lambda x, keep: compat.pad_input(*unpadded(x, keep), x.shape[0], x.shape[1])),
        rows_and_padding,
    ),
}  # fmt: skip
"""A call of every function of ``compat`` that takes tensors, by its name."""


def offset_by_sizes(name: str) -> Case:
    """Attention with a mask whose offset is computed from the sizes of queries and keys."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tfast.attention(q, k, v, MASKS[name](k.shape[2], q.shape[2]))

    return lambda: Call(call), lambda b, n: (heads(b, 3, 2), heads(b, n, 2), heads(b, n, 2))


def packed_offset(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    mask = AttentionMask.window(q.shape[0] // 4, 1, q.shape[0] // 8) & AttentionMask.alibi(SLOPES, q.shape[0] // 8)
    return tfast.attention_packed(q, k, v, cu, cu, max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0], mask=mask)


def decode_offset(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    mask = AttentionMask.window(k.shape[2] // 2) & AttentionMask.relative(BUCKETS, 16, offset=k.shape[2] // 4)
    return tfast.attention_decode(q, k, v, n, mask=mask)


OFFSETS: dict[str, Case] = {
    **{f"attention, offset: {name}": offset_by_sizes(name) for name in MASKS},
    "attention, causal by sizes": (
        lambda: Call(lambda q, k: tfast.attention(
            q, k, k, AttentionMask.causal(q.shape[2]), causal=k.shape[2] - q.shape[2], return_logsumexp=True
        )),
        lambda b, n: (heads(b, 3), heads(b, n)),
    ),
    "attention, prefix": (
        lambda: Call(lambda q, k, prefix, n: tfast.attention(
            q, k, k, AttentionMask.prefix(prefix, k.shape[2] - q.shape[2]) & AttentionMask.lengths(n)
        )),
        lambda b, n: (heads(b, 3), heads(b, n), lengths(b, n), lengths(b, n)),
    ),
    "attention_packed, offset": (
        lambda: Call(packed_offset),
        lambda b, n: (*(torch.randn(b * n, 2, 8) for _ in range(3)), starts(b, n)),
    ),
    "attention_decode, offset": (
        lambda: Call(decode_offset),
        lambda b, n: (heads(b, 2, 2), heads(b, n, 2), heads(b, n, 2), lengths(b, n - 1) + 1),
    ),
    "embed and add_positional, offset": (
        lambda: Call(lambda i, rows, cache: (
            tfast.embed(i, WEIGHT, TABLE, offset=cache.shape[2]),
            tfast.ops.add_positional(rows, TABLE, cache.shape[2]),
        )),
        lambda b, n: (torch.ones(b, 3).long(), torch.randn(b, 3, 8), heads(b, n)),
    ),
    "PositionalEncoder, offset": (
        lambda: Call(lambda pe, e, i, cache: (pe(e(i), cache.shape[2]), e.with_positions(i, pe, cache.shape[2])),
                     layers.PositionalEncoder(D, 0.0, 40), layers.Embedder(VOCABULARY, D)),
        lambda b, n: (ids(b, 3), x(b, n)[:, None]),
    ),
}  # fmt: skip
"""Ops with an offset that is computed from sizes."""


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return tfast.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


SDPA: dict[str, Case] = {
    "sdpa, two axes": (
        lambda: Call(tfast.scaled_dot_product_attention),
        lambda b, n: (torch.randn(n, 8), torch.randn(n + 2, 8), torch.randn(n + 2, 5), torch.rand(n, n + 2) > 0.4),
    ),
    "sdpa, three axes": (
        lambda: Call(lambda q, k, v: tfast.scaled_dot_product_attention(q, k, v, is_causal=True)),
        lambda b, n: tuple(torch.randn(b, n, 8) for _ in range(3)),
    ),
    "sdpa, five axes": (
        lambda: Call(tfast.scaled_dot_product_attention),
        lambda b, n: (*(torch.randn(b, 2, 3, n, 8) for _ in range(3)), torch.randn(b, 1, 1, n, n)),
    ),
    "sdpa, axes that broadcast": (
        lambda: Call(tfast.scaled_dot_product_attention),
        lambda b, n: (
            torch.randn(b, 1, H, n, 8),
            torch.randn(5, 1, n, 8),
            torch.randn(5, 1, n, 8),
            torch.ones(1, n) > 0,
        ),
    ),
    "sdpa, one batch of queries": (
        lambda: Call(tfast.scaled_dot_product_attention),
        lambda b, n: (heads(1, n), heads(b, n), heads(b, n), torch.randn(b, 1, n, n)),
    ),
    "sdpa, grouped heads": (
        lambda: Call(grouped),
        lambda b, n: (heads(b, n), heads(b, n, HKV), heads(b, n, HKV), torch.rand(b, 1, 1, n) > 0.4),
    ),
}
"""Calls of ``scaled_dot_product_attention`` by how many axes its tensors have."""
