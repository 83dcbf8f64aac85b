"""``flash_attn_with_kvcache`` of flash-attention 2: write keys and values into a cache, and attend to the cache."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import is_int
from ..ops.attention_decode import attention_decode
from .bounds import bounds_of, check_dimensions, check_integers, check_range, mask_of, softcap_of, with_logsumexp
from .flash_names import unknown_flash_names

_OP = "flash_attn_with_kvcache"


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_with_kvcache`` of flash-attention 2 by :func:`transformer_fast.ops.attention_decode`. No gradient.

    New keys and values are written into the cache in place, from ``cache_seqlens`` on. Then each query attends to its
    sequence; the last query is at the last key.

    Args:
        q: (B, Lq, H, D); dtypes as for :func:`~transformer_fast.compat.flash_attn_func`.
        k_cache, v_cache: (B or more, S, Hkv, D) with ``H % Hkv == 0``; with ``block_table`` pages
            (pages, page_size, Hkv, D), of any page size.
        k, v: (B, Lnew, Hkv, D), new keys and values; or None.
        rotary_cos, rotary_sin: (positions, R / 2), R up to D: the first R numbers per head of q and k are rotated. The
            position of a new key is its index in the cache. The position of a query is ``cache_seqlens + i`` with
            ``causal`` or a window, else ``cache_seqlens``. Requires ``k`` and ``v``. Computed in float32 (float64 for
            float64).
        cache_seqlens: number of keys per sequence in the cache before this call: int32 (B,), or an int for all
            sequences; None for S, only without ``k`` and ``v``.
        cache_batch_idx: int32 (B,), cache row per sequence; excludes ``block_table``.
        cache_leftpad: int32 (B,), index of the first key per sequence in its row; excludes ``block_table``.
        block_table: int32 (B, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for
            :func:`~transformer_fast.compat.flash_attn_func`.
        rotary_interleaved: rotate the pairs of numbers (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
        num_splits: accepted and ignored; the kernel chooses how to split the keys.
        return_softmax_lse: also return the logsumexp.

    Returns:
        (B, Lq, H, D) in q's dtype, 0 for a query that sees no key; or a tuple of the output and the natural logsumexp
        (B, H, Lq) in float32 (float64 for float64), -inf for a query that sees no key.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or lengths and indices that are not integer.
        ValueError: for shapes, devices or options that do not fit. Lengths and indices are checked on a CPU and not on
            a GPU.
    """
    if unknown:
        raise unknown_flash_names(flash_attn_with_kvcache, unknown)
    layout = "(B, S, Hkv, D)" if block_table is None else "(pages, page_size, Hkv, D)"
    check_dimensions(_OP, {"q": "(B, Lq, H, D)", "k_cache": layout, "v_cache": layout}, q, k_cache, v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"{_OP}: k and v must be given together, got {'v' if k is None else 'k'} alone")
    bounds = bounds_of(_OP, causal, window_size)
    rows = _rows_of(q, k_cache, cache_batch_idx, cache_leftpad, block_table)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = _lengths_of(q, cache_seqlens, capacity, k is not None)
    if k is not None and v is not None:
        _check_new(q, k_cache, k, v)
        check_range(_OP, "cache_seqlens and the new keys", lengths + k.shape[1], capacity, "the keys of the cache")
        at = lengths[:, None].long() + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None or rotary_sin is not None:
            tables = _checked_tables(q, rotary_cos, rotary_sin)
            of_query = lengths[:, None].long() + torch.arange(q.shape[1], device=q.device)
            if bounds == (None, None):
                of_query = lengths[:, None].long().expand_as(of_query)
            k = _rotated(k, *tables, at, rotary_interleaved)
            q = _rotated(q, *tables, of_query, rotary_interleaved)
        page = at // k_cache.shape[1]
        place = rows.long().gather(1, page), at - page * k_cache.shape[1]  # ONNX has no remainder by a symbolic size
        k_cache[place], v_cache[place] = k.to(k_cache.dtype), v.to(v_cache.dtype)
        lengths = lengths + k.shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError(f"{_OP}: rotary_cos and rotary_sin need k and v")

    options: dict[str, Any] = {"causal": False, "scale": softmax_scale, "softcap": softcap_of(softcap)}
    options["mask"] = mask_of(bounds, alibi_slopes)
    if cache_leftpad is not None:
        key = torch.arange(capacity, device=q.device)
        seen = torch.ones(q.shape[:2], dtype=torch.int32, device=q.device)
        options["mask"] &= AttentionMask.documents(seen, (key >= cache_leftpad[:, None]).to(torch.int32))
    if block_table is None and cache_batch_idx is None:
        k_cache, v_cache = (t[: q.shape[0]].transpose(1, 2) for t in (k_cache, v_cache))
    else:  # without a block table, a cache row is one page with one sequence
        options["page_table"] = rows.to(torch.int32)
    inputs = q.transpose(1, 2), k_cache, v_cache, lengths
    more = options["return_logsumexp"] = bool(return_softmax_lse)
    out, logsumexp = with_logsumexp(attention_decode(*inputs, **options), more)
    out = out.transpose(1, 2).contiguous()
    return out if logsumexp is None else (out, logsumexp)


def _check_new(q: Tensor, k_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless new keys and values fit the queries and the cache."""
    check_dimensions(_OP, dict.fromkeys(("k", "v"), "(B, Lnew, Hkv, D)"), k, v)
    expected = (q.shape[0], k.shape[1], *k_cache.shape[2:])
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"{_OP}: k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")


def _rows_of(
    q: Tensor, k_cache: Tensor, batch_idx: Tensor | None, leftpad: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """Pages per sequence, int (B, max_pages); without a block table the cache row, (B, 1)."""
    B = q.shape[0]
    for name, t in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
        if t is None:
            continue
        if block_table is not None:
            raise ValueError(f"{_OP}: {name} cannot be combined with block_table")
        _check_per_sequence(name, t, q)
    if block_table is not None:
        check_integers(_OP, "block_table", block_table, "(B, max_pages)", q.device)
        if block_table.shape[0] != q.shape[0]:
            raise ValueError(f"{_OP}: block_table must be (B, max_pages), B = {B}, got {tuple(block_table.shape)}")
        return block_table
    if batch_idx is not None:
        check_range(_OP, "cache_batch_idx", batch_idx, k_cache.shape[0] - 1, "the rows of k_cache")
        return batch_idx[:, None]
    if k_cache.shape[0] < q.shape[0]:
        raise ValueError(f"{_OP}: k_cache must have at least B = {B} rows, got shape {tuple(k_cache.shape)}")
    return torch.arange(B, device=q.device)[:, None]


def _lengths_of(q: Tensor, cache_seqlens: int | Tensor | None, capacity: int, appended: bool) -> Tensor:
    """Number of keys per sequence in the cache before the call, int (B,)."""
    if cache_seqlens is None and appended:
        raise ValueError(f"{_OP}: k and v need cache_seqlens, their positions in the cache")
    lengths: Any = capacity if cache_seqlens is None else cache_seqlens
    if is_int(lengths):
        lengths = torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    _check_per_sequence("cache_seqlens", lengths, q)
    check_range(_OP, "cache_seqlens", lengths, capacity, "the keys of the cache")
    return lengths


def _check_per_sequence(name: str, t: Tensor, q: Tensor) -> None:
    check_integers(_OP, name, t, "(B,)", q.device)
    if t.shape[0] != q.shape[0]:
        raise ValueError(f"{_OP}: {name} must be (B,) = ({q.shape[0]},), got shape {tuple(t.shape)}")


def _checked_tables(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both rotation tables; raise a ValueError unless both are (positions, R / 2) with R up to the head_dim."""
    if cos is None or sin is None:
        raise ValueError(f"{_OP}: rotary_cos and rotary_sin must be given together")
    check_dimensions(_OP, dict.fromkeys(("rotary_cos", "rotary_sin"), "(positions, R / 2)"), cos, sin)
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"{_OP}: rotary_cos and rotary_sin must be (positions, R / 2) with R up to D = {q.shape[-1]}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return cos, sin


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R numbers per head of x (B, L, heads, D) (Su et al., "RoFormer", 2021, section 3.2).

    Args:
        cos, sin: (positions, R / 2).
        positions: int64 (B, L), rows of the tables.
        interleaved: True if a pair's numbers are neighbours, False if they are R / 2 apart.
    """
    check_range(_OP, "positions", positions, cos.shape[0] - 1, "the rows of rotary_cos")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions].unsqueeze(2).to(wide) for table in (cos, sin))
    R = 2 * cos.shape[1]
    pairs = x[..., :R].to(wide)
    first, second = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    rotated = first * c - second * s, first * s + second * c
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([joined.to(x.dtype), x[..., R:]], -1)
