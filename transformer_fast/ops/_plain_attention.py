"""Attention in PyTorch's own operators: see :mod:`transformer_fast.ops._plain`. Arguments after the inputs of an op's
schema are passed by name, as those of the reference are. Each function computes the reference, with one product each of
queries and keys and of weights and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..attention_params import AttentionParams, PackedBatch
from ..masks.definition import visible
from ..tracing import refuse_dropout
from .attention_checks import scale_of


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_words: int = 0, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out (B, H, Lq, D) and logsumexp (B, H, Lq); packed (Tq, H, D) and (H, Tq). No bits of dropout: (0,)."""
    params = _params(q, options)
    if params.packed is not None:
        out, logsumexp = _attention_packed(q, k, v, params, params.packed)
    else:
        out, _, logsumexp = _attend(q, k, v, params)
    return out, logsumexp, q.new_empty(0, dtype=torch.int32)


def attention_weights(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Compute the weights (B, H, Lq, Lk)."""
    return _attend(q, k, k[..., :0], _params(q, options))[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor]:
    options = params.keywords()
    empty_rows = "zero" if options.pop("zero_empty_rows") else "uniform"
    return reference.attention.attention(q, k, v, **options, empty_rows=empty_rows, contained=False)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, Lq, D) and logsumexp (B, H, Lq)."""
    options |= {"lengths": lengths, "page_table": page_table, "contained": False}
    options["scale"] = scale_of(q, options.get("scale"))
    return reference.attention.attention_decode(q, k_cache, v_cache, **options)


def _params(q: Tensor, options: dict[str, Any]) -> AttentionParams:
    """Arguments of the op as one value; raise for dropout."""
    refuse_dropout("attention", options.get("dropout_p", 0.0))
    return AttentionParams.from_keywords(**options | {"scale": scale_of(q, options.get("scale"))})


def _attention_packed(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, packed: PackedBatch
) -> tuple[Tensor, Tensor]:
    """Compute out (Tq, H, D) and logsumexp (H, Tq): pad the batch, attend, and pack the results."""
    batch = packed.cu_seqlens_q.shape[0] - 1
    Lq, Lk = packed.max_seqlen_q, packed.max_seqlen_k
    place_q, place_k = _places(packed.cu_seqlens_q, q, Lq), _places(packed.cu_seqlens_k, k, Lk)
    q, k, v = (_padded(t, place, batch, n) for t, place, n in ((q, place_q, Lq), (k, place_k, Lk), (v, place_k, Lk)))
    parts: dict[str, Any] = {"lengths": packed.key_lengths}
    if params.query_ids is not None and params.key_ids is not None:
        parts["query_ids"] = _padded(params.query_ids[:, None, None], place_q, batch, Lq)[:, 0, :, 0]
        parts["key_ids"] = _padded(params.key_ids[:, None, None], place_k, batch, Lk)[:, 0, :, 0]
    shift = packed.key_lengths - packed.query_lengths if packed.bottom_right else 0
    keep = visible(Lq, Lk, q.device, **parts, causal=params.causal, window=params.window, shift=shift)
    bias = _bias(params, packed)
    if params.zero_empty_rows or params.sinks is not None:
        empty = None
    else:  # a query without visible keys has equal scores for its sequence's keys
        seen = keep if bias is None else keep & (bias != float("-inf"))
        empty = ~seen.any(-1, keepdim=True)
        keep = torch.where(empty, visible(Lq, Lk, q.device, lengths=packed.key_lengths), keep)
        q = q.masked_fill(empty, 0.0)
        bias = bias if bias is None else torch.where(empty, 0.0, bias)
    out, logsumexp, _ = attention(
        q, k, v, keep=keep, bias=bias, scale=params.scale, softcap=params.softcap, sinks=params.sinks,
        dropout_p=params.dropout_p, zero_empty_rows=True,
    )  # fmt: skip
    if empty is not None:
        logsumexp = logsumexp.masked_fill(empty.squeeze(-1), float("-inf"))
    out, logsumexp = (t.transpose(1, 2).flatten(0, 1).index_select(0, place_q) for t in (out, logsumexp.unsqueeze(-1)))
    return out, logsumexp.squeeze(-1).transpose(0, 1)


def _bias(params: AttentionParams, packed: PackedBatch) -> Tensor | None:
    """Sum of the biases of the padded batch, (B|1, H|1, max_seqlen_q, max_seqlen_k)."""
    i = torch.arange(packed.max_seqlen_q, device=packed.cu_seqlens_q.device).unsqueeze(-1)
    j = torch.arange(packed.max_seqlen_k, device=i.device)
    bias = None
    if params.bias is not None and packed.bias_starts is not None:
        pairs = packed.bias_starts[:-1, None, None] + i * packed.stored_keys[:, None, None] + j
        pairs = pairs.clamp(0, max(params.bias.shape[1] - 1, 0))  # past the end of a sequence any index is valid
        bias = params.bias[:, pairs].transpose(0, 1)
    if params.distance_bias is None:
        return bias
    if packed.bottom_right:
        i = i + (packed.key_lengths - packed.query_lengths)[:, None, None]
    zero = (packed.max_seqlen_k if packed.bottom_right else packed.max_seqlen_q) - 1
    index = (zero + j - i).clamp(0, params.distance_bias.shape[-1] - 1)
    nearness = params.distance_bias[0][:, index]
    nearness = nearness.transpose(0, 1) if packed.bottom_right else nearness.unsqueeze(0)
    return nearness if bias is None else bias + nearness


def _places(cu_seqlens: Tensor, tokens: Tensor, length: int) -> Tensor:
    """Index of each packed token in the padded batch of B * length tokens, int64 (T,)."""
    token = torch.arange(tokens.shape[0], device=tokens.device)
    sequence = (token.unsqueeze(1) >= cu_seqlens[1:]).sum(1)  # number of sequences that end before the token
    return sequence * length + token - cu_seqlens.index_select(0, sequence)


def _padded(tokens: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    """Pad tokens (T, H, D) to (B, H, length, D), with zeros."""
    padded = tokens.new_zeros(batch * length, *tokens.shape[1:]).index_copy(0, places, tokens)
    return padded.view(batch, length, *tokens.shape[1:]).transpose(1, 2)
