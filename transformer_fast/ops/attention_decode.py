"""Attention of a few new queries to a long cache. The op itself is in csrc/ops/attention_decode.cpp."""

from __future__ import annotations

from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..attention_params import CachedKeys
from ..masks import AttentionMask
from . import _plain_attention, eager
from .argument_types import as_number
from .attention_call import choose_backend, params_of, results
from .attention_checks import is_special, mask_by_position, special_arguments
from .registry import Op, register
from .unknown_names import unknown_names

NO_FURTHER_PARTS = (None,) * 5
"""Arguments of the op's door behind the scale, for a call without them."""


class _Options(TypedDict, total=False):
    """Keyword arguments of :func:`attention_decode` that do not change the number of results."""

    page_table: Tensor | None
    mask: AttentionMask | None
    causal: bool
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, return_logsumexp: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, return_logsumexp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    mask: AttentionMask | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_logsumexp: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest positions per sequence to a cache of keys and values, for generation.

    The cache is split over its keys, and the partial results are joined by their logsumexp. So one long sequence uses a
    whole GPU (T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference", 2023). There is no
    backward.

    Args:
        q: (B, H, Lq, D), the last Lq positions of each sequence; dtypes as for :func:`transformer_fast.attention`.
        k_cache, v_cache: (B, Hkv, S, D) with ``H % Hkv == 0``; or, with ``page_table``, pages shared by all sequences,
            (pages, page_size, Hkv, D).
        lengths: int32 or int64 (B,), number of keys per sequence in the cache, *including* those of the new positions.
            Keys past the length are never read.
        page_table: int32 (B, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries past the last key may hold anything.
        mask: an ``AttentionMask`` with the parts ``window``, ``causal``, ``alibi`` and ``relative``, whose positions
            are relative to the query's own key, as for ``causal``: with ``window(left)`` query i sees keys ``j >= i +
            lengths[b] - Lq - left``; and ``documents``, with ids for all S keys of the cache.
        causal: bottom-right: query i sees keys ``j <= i + lengths[b] - Lq``, its own key being the last; False: all
            keys.
        scale: multiplies ``q k^T``; ``1 / sqrt(D)`` by default.
        softcap, sinks: as for ``attention``.
        return_logsumexp: also return the logsumexp of each query's scores.

    Returns:
        (B, H, Lq, D) in q's dtype, 0 for a query that sees no key; or a tuple of it and the logsumexp (B, H, Lq) in
        float32 (float64 for float64), -inf for such a query.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or lengths or a page table that are not integer.
        ValueError: for shapes and devices that do not fit. On a CPU, in graphs too, the values of ``lengths`` and of
            the page table are checked. On a GPU, reading these values would wait for the device; the kernels clamp them
            to the cache.
        RuntimeError: if q or the cache requires a gradient.

    Example:
        >>> k_cache, v_cache = torch.randn(2, 2, 4, 100, 64)  # room for 100 keys
        >>> q = torch.randn(2, 4, 1, 64)  # the newest token of each sentence
        >>> tfast.attention_decode(q, k_cache, v_cache, torch.tensor([12, 9])).shape
        torch.Size([2, 4, 1, 64])
    """
    if unknown:
        raise unknown_names(attention_decode, unknown)
    if not isinstance(q, Tensor):
        raise TypeError(f"attention_decode: q must be a tensor, got {type(q).__name__}")
    if scale is not None and type(scale) is not float:
        scale = as_number("attention_decode", "scale", scale)
    mask = mask_by_position("attention_decode", mask, causal)
    special = is_special(mask, softcap, sinks)
    offset = mask.causal_offset
    door, by_triton, _ = eager.fast_path("attention_decode", q, plain=not (special or return_logsumexp))
    if door is not None:
        given = (q, k_cache, v_cache, lengths, page_table, offset, mask.window_offset, scale, *NO_FURTHER_PARTS)
        out = door.attention_decode(by_triton, *given)
        if out is not None:
            return out
    backend = choose_backend("attention_decode", (q, k_cache, v_cache), return_logsumexp)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, k_cache, v_cache)):
        raise RuntimeError(
            "attention_decode has no gradient: call it under torch.no_grad(), or use transformer_fast.attention"
        )
    parts: dict[str, Any] = {"causal": offset, "cached": CachedKeys(lengths, page_table)}
    if special:
        sizes = q.shape[2], k_cache.shape[2] if page_table is None else page_table.shape[1] * k_cache.shape[1]
        parts |= special_arguments("attention_decode", q, mask, softcap, sinks, sizes, zero=sizes[1] - 1)
    params = params_of(q, mask, scale, None, **parts)
    return results(backend, (q, k_cache, v_cache), params, return_logsumexp=return_logsumexp)


# Decoding has no gradient, which a case of the parity table needs.
register(Op("attention_decode", "attention", "triton", (_plain_attention.attention_decode,), lambda draw: ()))
