"""``flashmask_attention``: FlashMask's function, whose mask is rows of queries that each key does not serve.

Source: G. Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", 2024 (arXiv 2410.01359).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import kind_of
from ..ops.attention import attention
from .bounds import check_dimensions, check_integers, with_logsumexp

_OP = "flashmask_attention"
_COLUMNS = {True: (1, 2), False: (2, 4)}
"""Sizes of the last axis, by ``causal``."""


def startend_mask(startend_row_indices: Tensor, queries: int, *, causal: bool = False) -> AttentionMask:
    """The mask of FlashMask's ``startend_row_indices``: convert once, and use it in every layer.

    Key j is hidden from a range of queries, or from two. By number of columns:

    ======= ========== ===========================================================================================
    columns ``causal`` queries i that do not see key j
    ======= ========== ===========================================================================================
    1       True       ``i >= t[j, 0]``, and ``i < j - (Lk - Lq)``
    2       True       ``t[j, 0] <= i < t[j, 1]``, and ``i < j - (Lk - Lq)``
    2       False      ``i >= t[j, 0]``, and ``i < t[j, 1]``
    4       False      ``t[j, 0] <= i < t[j, 1]``, and ``t[j, 2] <= i < t[j, 3]``
    ======= ========== ===========================================================================================

    The keep mask takes a byte per query and key, for each sequence and head of the indices.

    Args:
        startend_row_indices: int32 (B, 1, Lk, columns), or with a head per query head in place of 1.
        queries: number of queries.
        causal: the last query sees all keys, the one before all but the last, and so on.

    Raises:
        TypeError: for indices that are not an int32 tensor.
        ValueError: for another shape or number of columns.

    Example:
        >>> ends = torch.tensor([2, 2, 4, 4], dtype=torch.int32).view(1, 1, 4, 1)  # two texts of two tokens
        >>> tfast.compat.startend_mask(ends, 4, causal=True).dense(4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    indices, columns = startend_row_indices, _COLUMNS[bool(causal)]
    _check_indices(indices)
    if indices.dim() != 4 or indices.shape[3] not in columns:
        raise ValueError(
            f"{_OP}: startend_row_indices must be (B, H, Lk, columns) with {columns[0]} or {columns[1]} columns for "
            f"causal={bool(causal)}, got shape {tuple(indices.shape)}"
        )
    bounds = indices.unsqueeze(2).unbind(-1)  # each (B, H, 1, Lk)
    i = torch.arange(queries, device=indices.device)[:, None]
    if len(bounds) == 1:
        hidden = i >= bounds[0]
    elif causal:
        hidden = (i >= bounds[0]) & (i < bounds[1])
    elif len(bounds) == 2:
        hidden = (i >= bounds[0]) | (i < bounds[1])
    else:
        hidden = ((i >= bounds[0]) & (i < bounds[1])) | ((i >= bounds[2]) & (i < bounds[3]))
    mask = AttentionMask.keep(~hidden)
    return mask & AttentionMask.causal(indices.shape[2] - queries) if causal else mask


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | AttentionMask | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    training: bool = True,
    softmax_scale: float | None = None,
    bias: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashMask's ``flashmask_attention`` with its PyTorch signature of September 2026, on the CPU and in float32 too,
    with dropout, and with a bias.

    Args:
        query: (B, Lq, H, D); float32, float16, bfloat16 (float64 on CPU). D up to 256 on a GPU.
        key, value: (B, Lk, Hkv, D); H must be a multiple of Hkv.
        startend_row_indices: int32 (B, 1 or Hkv or H, Lk, 1 or 2 or 4), as :func:`startend_mask` explains; or what that
            function returned, with this ``causal``; None for no such mask.
        dropout: probability of dropping an attention weight, where ``training``.
        causal: query i sees keys up to ``i + Lk - Lq`` only.
        window_size: left and right, or one number for both: query i sees keys from ``i - left`` to ``i + right``, with
            ``causal`` to i. For as many queries as keys. Excludes ``startend_row_indices``.
        return_softmax_lse: also return the natural logsumexp.
        softmax_scale: multiplies the scores; ``1 / sqrt(D)`` by default.
        bias: float, broadcastable to (B, H, Lq, Lk), added to the scores; learned or not.
        block_mask: int32 (B, 1 or Hkv or H, ceil(Lq / 128), ceil(Lk / 128)), 0 hides a block of 128 queries and 128
            keys. Requires ``startend_row_indices``.

    Returns:
        (B, Lq, H, D) in query's dtype, 0 for a query that sees no key; or a tuple of it and the logsumexp (B, H, Lq).

    Raises:
        TypeError: for indices of another kind.
        ValueError: for shapes or options that do not fit; the message names them.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)  # (B, L, H, D) each
        >>> ends = torch.tensor([2, 2, 4, 4], dtype=torch.int32).view(1, 1, 4, 1)
        >>> tfast.compat.flashmask_attention(q, k, v, ends, causal=True, dropout=0.1).shape
        torch.Size([1, 4, 2, 8])
    """
    check_dimensions(_OP, dict.fromkeys(("query", "key", "value"), "(B, L, H, D)"), query, key, value)
    heads, key_heads, queries, keys = query.shape[2], key.shape[2], query.shape[1], key.shape[1]
    if startend_row_indices is not None and window_size is not None:
        raise ValueError(f"{_OP}: expected startend_row_indices or window_size, got both")
    if block_mask is not None and startend_row_indices is None:
        raise ValueError(f"{_OP}: block_mask needs startend_row_indices")
    mask = AttentionMask.causal(keys - queries) if causal else AttentionMask()
    if window_size is not None:
        if queries != keys:
            raise ValueError(f"{_OP}: window_size is for as many queries as keys, got {queries} and {keys}")
        mask = mask & _window(window_size)
    if isinstance(startend_row_indices, AttentionMask):
        mask = mask & startend_row_indices
    elif startend_row_indices is not None:
        _check_indices(startend_row_indices)
        indices = _of_query_heads("startend_row_indices", startend_row_indices, heads, key_heads)
        if indices.dim() == 4 and indices.shape[2] != keys:
            raise ValueError(
                f"{_OP}: startend_row_indices must have a row for each of the {keys} keys, got shape "
                f"{tuple(startend_row_indices.shape)}"
            )
        mask = mask & startend_mask(indices, queries, causal=causal)
    if block_mask is not None:
        check_integers(_OP, "block_mask", block_mask, "(B, H, blocks, blocks)", query.device)
        blocks = -(-queries // 128), -(-keys // 128)
        if any(size != count for size, count in zip(block_mask.shape[2:], blocks, strict=True)):
            raise ValueError(
                f"{_OP}: block_mask must be (B, H, {blocks[0]}, {blocks[1]}), blocks of 128 queries and 128 keys, got "
                f"shape {tuple(block_mask.shape)}"
            )
        kept = _of_query_heads("block_mask", block_mask, heads, key_heads) != 0
        kept = kept.repeat_interleave(128, 2)[:, :, :queries].repeat_interleave(128, 3)[..., :keys]
        mask = mask & AttentionMask.keep(kept)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    more = bool(return_softmax_lse)
    results = attention(
        q, k, v, mask, bias=bias, scale=softmax_scale, dropout_p=dropout if training else 0.0, empty_rows="zero",
        return_logsumexp=more,
    )  # fmt: skip
    out, logsumexp = with_logsumexp(results, more)
    return out.transpose(1, 2) if logsumexp is None else (out.transpose(1, 2), logsumexp)


def _check_indices(indices: Tensor) -> None:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        raise TypeError(f"{_OP}: startend_row_indices must be an int32 tensor, got {kind_of(indices)}")


def _window(size: int | tuple[int, int]) -> AttentionMask:
    bounds = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if len(bounds) != 2 or not all(type(bound) is int and bound >= 0 for bound in bounds):
        raise ValueError(
            f"{_OP}: window_size must be one or two ints of at least 0, or None for no window, got {size!r}"
        )
    return AttentionMask.window(*bounds)


def _of_query_heads(name: str, t: Tensor, heads: int, key_heads: int) -> Tensor:
    """Repeat what each key head has for the query heads of its group."""
    if t.dim() != 4:
        return t
    if all(t.shape[1] != count for count in (1, heads, key_heads)):
        raise ValueError(f"{_OP}: {name} must have 1, {key_heads} or {heads} heads, got shape {tuple(t.shape)}")
    return t.repeat_interleave(heads // key_heads, 1) if 1 < t.shape[1] == key_heads != heads else t
