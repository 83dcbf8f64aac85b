"""Attention of a few new queries to a long cache. The op itself is in csrc/ops/attention_decode.cpp."""

from __future__ import annotations

from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..attention_params import AttentionParams, CachedKeys
from ..masks import AttentionMask
from ..masks.checks import kind_of
from . import _plain_attention, eager
from .attention_call import Call
from .attention_checks import can_read_values, check_tensors, is_special, mask_by_position, shape_error
from .registry import Op, register
from .unknown_names import unknown_names

_INTEGERS = {"lengths": (torch.int32, torch.int64), "page_table": (torch.int32,)}


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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    return_logsumexp: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    return_logsumexp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
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
    mask = mask_by_position("attention_decode", mask, causal)
    special = is_special(mask, softcap, sinks)
    offset = mask.causal_offset
    extension, by_triton, _ = eager.fast_path("attention_decode", q, plain=not (special or return_logsumexp))
    if extension is not None:
        given = (q, k_cache, v_cache, lengths, page_table, offset, mask.window_offset, scale)
        out = extension.attention_decode(by_triton, *given)
        if out is not None:
            return out
    options = scale, softcap, sinks
    call = Call(
        "attention_decode", q, k_cache, v_cache, mask, offset, special, *options, return_logsumexp=return_logsumexp
    )
    return call.results(_params(call, lengths, page_table))


def _params(call: Call, lengths: Tensor, page_table: Tensor | None) -> AttentionParams:
    """Arguments of the op for a call of :func:`attention_decode`; raise unless it is valid."""
    q, k_cache, v_cache = call.q, call.k, call.v
    _check_inputs(q, k_cache, v_cache, lengths, page_table)
    call.choose_backend()
    if can_read_values(lengths):
        _check_values(lengths, k_cache, page_table)
    lengths = lengths if lengths.dtype == torch.int32 else lengths.to(torch.int32)
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise RuntimeError(
            "attention_decode has no gradient: call it under torch.no_grad(), or use transformer_fast.attention"
        )
    parts: dict[str, Any] = {"cached": CachedKeys(lengths, page_table)}
    if call.special:
        Lq, S = q.shape[2], _capacity(k_cache, page_table)
        parts |= call.special_arguments((Lq, S), zero=S - 1)
    return call.params(**parts)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor | None) -> None:
    for name, t in (("lengths", lengths), ("page_table", page_table)):
        if t is None and name == "page_table":
            continue
        if not isinstance(t, Tensor) or t.dtype not in _INTEGERS[name]:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in _INTEGERS[name])
            raise TypeError(f"attention_decode: {name} must be an {expected} tensor, got {kind_of(t)}")
    layout = "(B, Hkv, S, D)" if page_table is None else "(pages, page_size, Hkv, D)"
    tensors = {"q": q, "k_cache": k, "v_cache": v}
    check_tensors("attention_decode", tensors, {"q": "(B, H, Lq, D)", "k_cache": layout, "v_cache": layout})
    B, H, _, D = q.shape
    heads = k.shape[1 if page_table is None else 2]
    if page_table is not None:
        layout = f"{layout}, as there is a page table"
    if k.shape != v.shape:
        wrong = "k_cache and v_cache must share their shape"
    elif D == 0 or k.shape[3] != D:
        wrong = "q and the cache must share a head_dim of at least 1"
    elif page_table is None and k.shape[0] != B:
        wrong = f"q and the cache {layout} must share the batch size"
    elif heads == 0 or H % heads != 0:
        wrong = f"the heads of q must be a multiple of those of the cache {layout}"
    else:
        wrong = ""
    if wrong:
        raise shape_error("attention_decode", wrong, tensors)
    _check_lengths(lengths, q, page_table)


def _check_lengths(lengths: Tensor, q: Tensor, page_table: Tensor | None) -> None:
    """Raise unless the lengths (B,) and the page table fit q."""
    for name, t in (("lengths", lengths), ("page_table", page_table)):
        if t is not None and t.device != q.device:
            raise ValueError(f"attention_decode: q is on {q.device} but {name} on {t.device}")
    B = q.shape[0]
    if lengths.shape != (B,):
        raise ValueError(f"attention_decode: lengths must be (B,) = ({B},), got shape {tuple(lengths.shape)}")
    if page_table is not None and (page_table.dim() != 2 or page_table.shape[0] != B):
        raise ValueError(
            f"attention_decode: page_table must be (B, max_pages) with B = {B}, got shape {tuple(page_table.shape)}"
        )


def _check_values(lengths: Tensor, k_cache: Tensor, page_table: Tensor | None) -> None:
    """Raise unless the lengths and the pages in use are in the cache."""
    host, capacity = lengths.tolist(), _capacity(k_cache, page_table)
    if host and (min(host) < 0 or max(host) > capacity):
        raise ValueError(
            f"attention_decode: lengths must lie in [0, {capacity}], the keys the cache can hold, "
            f"got {min(host)} to {max(host)}"
        )
    if page_table is not None:
        _check_pages(page_table, host, k_cache)


def _capacity(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Number of keys per sequence that the cache can hold."""
    return k_cache.shape[2] if page_table is None else page_table.shape[1] * k_cache.shape[1]


def _check_pages(page_table: Tensor, lengths: list[int], k_cache: Tensor) -> None:
    pages, page_size = k_cache.shape[:2]
    used = [row[: -(-n // page_size)] for row, n in zip(page_table.tolist(), lengths, strict=True)]
    for b, row in enumerate(used):
        if row and (min(row) < 0 or max(row) >= pages):
            raise ValueError(
                f"attention_decode: page_table[{b}] names pages {min(row)} to {max(row)}, but k_cache "
                f"{tuple(k_cache.shape)} has pages 0 to {pages - 1}"
            )


# Decoding has no gradient, which a case of the parity table needs.
register(Op("attention_decode", "attention", "triton", (_plain_attention.attention_decode,), lambda draw: ()))
