"""Functions of flash-attention 2 for packed sequences: ``flash_attn_varlen_func`` and its packed forms."""

from __future__ import annotations

from typing import Never

from torch import Tensor

from .bounds import bounds_of, softcap_of
from .flash_attention import Result, check_packed
from .flash_names import no_dropout_p, unknown_flash_names
from .ragged import Call, cached_attention, check_token_layout, ragged_attention, sequences


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **unknown: Never,
) -> Result:
    """``flash_attn_varlen_func`` of flash-attention 2: each sequence of a packed batch attends to its own keys.

    The own key of query i of sequence b is ``i + Lk[b] - Lq[b]``. The call runs
    :func:`transformer_fast.attention_packed`. Two kinds of calls are slower, because they use a padded batch and
    compute B * max_seqlen_q * max_seqlen_k scores: calls with ``alibi_slopes`` (B, H), and calls with dropout and
    ``return_attn_probs``.

    Args:
        q: (Tq, H, D), the queries of all sequences, concatenated; dtypes as for :func:`flash_attn_func`.
        k, v: (Tk, Hkv, D), with ``H % Hkv == 0``; with ``block_table`` pages (pages, page_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), rising from 0 to Tq and Tk: sequence b is rows ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as for
            :func:`flash_attn_func`.
        return_attn_probs: also return the logsumexp, and with dropout the weights.
        block_table: int32 (B, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Any page size is allowed. Excludes dropout and gradients.

    Returns:
        (Tq, H, D) in q's dtype, 0 for a query that sees no key. With ``return_attn_probs`` a tuple of the output, the
        natural logsumexp (H, Tq) in float32 (float64 for float64), -inf for a query that sees no key, and S_dmask.
        S_dmask: with dropout the weights (B, H, max_seqlen_q, max_seqlen_k) before dropout, negative where a weight is
        dropped; without dropout an empty tensor (0,).

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or ``cu_seqlens`` that are not int32.
        ValueError: for shapes, devices or options that do not fit. The values of ``cu_seqlens`` and ``block_table`` are
            checked on a CPU and not on a GPU.
        NotImplementedError: for dropout with ``block_table``.
        RuntimeError: for a gradient through ``block_table``.
    """
    if unknown:
        raise unknown_flash_names(flash_attn_varlen_func, unknown)
    if dropout_p is None:
        raise no_dropout_p("flash_attn_varlen_func")
    op = "flash_attn_varlen_func"
    check_token_layout(op, ("q", "k", "v"), q, k, v, block_table is not None)
    queries = sequences(op, ("cu_seqlens_q", "max_seqlen_q"), cu_seqlens_q, max_seqlen_q, q.shape[0])
    keys = sequences(
        op, ("cu_seqlens_k", "max_seqlen_k"), cu_seqlens_k, max_seqlen_k, k.shape[0] if block_table is None else None
    )
    bounds = bounds_of(op, causal, window_size)
    options = {"scale": softmax_scale, "softcap": softcap_of(softcap)}
    call = Call(op, bounds, alibi_slopes, dropout_p, options)
    weights = None
    if block_table is None:
        out, logsumexp, weights = ragged_attention(q, k, v, queries, keys, call, bool(return_attn_probs))
    else:
        if dropout_p != 0.0:
            raise NotImplementedError(f"{op}: dropout is not supported with block_table, got dropout_p={dropout_p}")
        out, logsumexp = cached_attention(q, k, v, queries, keys.lengths, block_table, call, bool(return_attn_probs))
    if logsumexp is None:
        return out
    return out, logsumexp, q.new_empty(0) if weights is None else weights


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> Result:
    """:func:`flash_attn_varlen_func` of keys and values in one tensor, (Tk, 2, Hkv, D)."""
    if unknown:
        raise unknown_flash_names(flash_attn_varlen_kvpacked_func, unknown)
    check_packed("flash_attn_varlen_kvpacked_func", "kv", kv, "(Tk, 2, Hkv, D)", 2)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> Result:
    """:func:`flash_attn_varlen_func` of queries, keys and values in one tensor, (T, 3, H, D)."""
    if unknown:
        raise unknown_flash_names(flash_attn_varlen_qkvpacked_func, unknown)
    check_packed("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T, 3, H, D)", 3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)
