"""``varlen_attn`` with the signature of ``torch.nn.attention.varlen``."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention_checks import can_read_values
from .bounds import bounds_of, check_heads, check_integers
from .ragged import Call, cached_attention, check_token_layout, ragged_attention, sequences

_OP = "varlen_attn"


class AuxRequest(NamedTuple):
    """Request for additional results of :func:`varlen_attn`. torch's own class works too."""

    lse: bool = False


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.11 to 2.14, on the CPU too and in float32.

    The own key of query i of a sequence is ``i + Lk - Lq``.

    Args:
        query: (Tq, H, D), the queries of all sequences, concatenated; float32, float16, bfloat16 (float64 on CPU). D up
            to 256 on a GPU.
        key, value: (Tk, Hkv, D); with ``block_table`` pages (pages, page_size, Hkv, D).
        cu_seq_q, cu_seq_k: int32 (N + 1,), rising from 0 to Tq and Tk. ``cu_seq_k`` may be None with ``block_table``.
        max_q, max_k: lengths of the longest sequences.
        return_aux: an object with ``lse``, such as ``AuxRequest(lse=True)``: also return the logsumexp.
        scale: multiplies the scores; ``1 / sqrt(D)`` by default.
        window_size: (left, right), number of visible keys on either side of a query's own key; -1 is no bound. (-1, 0)
            is causal.
        enable_gqa: H may be a multiple of Hkv.
        seqused_k: int32 (N,), number of keys in use per sequence, counted from its first key.
        block_table: int32 (N, max_pages): key j of sequence n is row ``j % page_size`` of page
            ``block_table[n, j // page_size]``. Requires ``seqused_k``. No gradient.
        num_splits: accepted. On a CPU the result does not depend on it, bit for bit.

    Returns:
        (Tq, H, D) in query's dtype, 0 for a query that sees no key; or a tuple of the output and the natural logsumexp
        (H, Tq) in float32 (float64 for float64), -inf for a query that sees no key.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or lengths that are not int32.
        ValueError: for shapes, devices or options that do not fit; the message names them.
        RuntimeError: for a gradient through ``block_table``.
    """
    check_token_layout(_OP, ("query", "key", "value"), query, key, value, block_table is not None)
    check_heads(_OP, query, key, -2, enable_gqa)
    queries = sequences(_OP, ("cu_seq_q", "max_q"), cu_seq_q, max_q, query.shape[0])
    call = Call(_OP, bounds_of(_OP, False, window_size), options={"scale": scale})
    more = return_aux is not None and bool(return_aux.lse)
    if seqused_k is not None:
        check_integers(_OP, "seqused_k", seqused_k, "(N,)", query.device)
    if block_table is None:
        keys = sequences(_OP, ("cu_seq_k", "max_k"), cu_seq_k, max_k, key.shape[0])
        if seqused_k is not None:
            keys = dataclasses.replace(keys, used=_at_most(keys.lengths, seqused_k))
        out, logsumexp, _ = ragged_attention(query, key, value, queries, keys, call, more)
    else:
        if seqused_k is None:
            raise ValueError(f"{_OP}: block_table needs seqused_k, the number of keys of each sequence")
        out, logsumexp = cached_attention(query, key, value, queries, seqused_k, block_table, call, more)
    return out if logsumexp is None else (out, logsumexp)


def _at_most(lengths: Tensor, used: Tensor) -> Tensor:
    """Numbers of keys in use, as int32; checked on a CPU."""
    if can_read_values(used) and used.shape == lengths.shape and bool((used > lengths).any()):
        raise ValueError(
            f"{_OP}: seqused_k must be at most the lengths of cu_seq_k, {lengths.tolist()}, got {used.tolist()}"
        )
    return used.to(torch.int32)
