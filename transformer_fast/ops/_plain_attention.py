"""Attention in PyTorch's own operators: see :mod:`transformer_fast.ops._plain`. Arguments after the inputs of an op's
schema are passed by name and become an AttentionParams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..attention_params import AttentionParams, PackedBatch
from ..masks import AttentionMask
from ..masks.distance import along_diagonals
from ..masks.lower import allowed as allowed_keys
from ..tracing import refuse_dropout


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, Lq, D) and logsumexp (B, H, Lq)."""
    params = AttentionParams.from_keywords(**options)
    refuse_dropout("attention", params.dropout_p)
    scores, allowed = _scores_and_mask(q, k, params)
    weights = _weights(scores, allowed, params, q.dtype)
    return _per_head(weights, v), _logsumexp(scores, allowed, params.sinks)


def attention_weights(q: Tensor, k: Tensor, logsumexp: Tensor | None, **options: Any) -> Tensor:
    """Compute the weights (B, H, Lq, Lk)."""
    params = AttentionParams.from_keywords(**options)
    refuse_dropout("attention", params.dropout_p)
    return _weights(*_scores_and_mask(q, k, params), params, q.dtype)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, Lq, D) and logsumexp (B, H, Lq)."""
    k, v, bias = reference.attention.cached_keys(
        q, k_cache, v_cache, lengths, page_table, options.pop("distance_bias", None)
    )
    parts = {name: options.pop(name, None) for name in ("query_ids", "key_ids", "causal", "window")}
    mask = _mask_of(AttentionParams(lengths=lengths, **parts))
    keep = allowed_keys(mask, q.shape[2], k.shape[2], q.device, shift=lengths - q.shape[2])
    return attention(q, k, v, keep=keep, bias=bias, zero_empty_rows=True, **options)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute out (Tq, H, D) and logsumexp (H, Tq): pad the batch, attend, and pack the results."""
    params = AttentionParams.from_keywords(**options)
    refuse_dropout("attention_packed", params.dropout_p)
    packed = params.packed
    assert packed is not None
    cu_seqlens_q, cu_seqlens_k = packed.cu_seqlens_q, packed.cu_seqlens_k
    max_q, max_k, batch = packed.max_q, packed.max_k, cu_seqlens_q.shape[0] - 1
    place_q, place_k = (_places(cu, t, n) for cu, t, n in ((cu_seqlens_q, q, max_q), (cu_seqlens_k, k, max_k)))
    padded_q = _padded(q, place_q, batch, max_q)
    padded_k, padded_v = (_padded(t, place_k, batch, max_k) for t in (k, v))
    lengths = packed.key_lengths
    params = _positioned(replace(params, lengths=lengths), packed)
    if params.query_ids is not None and params.key_ids is not None:
        query_ids, key_ids = (
            _padded(ids[:, None, None], place, batch, n)[:, 0, :, 0]
            for ids, place, n in ((params.query_ids, place_q, max_q), (params.key_ids, place_k, max_k))
        )
        params = replace(params, query_ids=query_ids, key_ids=key_ids)
    scores, allowed = _scores_and_mask(padded_q, padded_k, params)
    assert allowed is not None  # the lengths block padded keys
    if params.zero_empty_rows or params.sinks is not None:
        weights = _weights(scores, allowed, params, q.dtype)
    else:  # a query without visible keys is uniform over its sequence's keys; 0 without keys
        own = allowed_keys(AttentionMask(key_lengths=lengths), scores.shape[2], scores.shape[3], q.device)
        assert own is not None
        kept = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).masked_fill(~own, float("-inf"))
        weights = torch.softmax(kept, -1).masked_fill(~own.any(-1, keepdim=True), 0.0).to(q.dtype)
    out, logsumexp = _per_head(weights, padded_v), _logsumexp(scores, allowed, params.sinks).unsqueeze(-1)
    out, logsumexp = (t.transpose(1, 2).flatten(0, 1).index_select(0, place_q) for t in (out, logsumexp))
    return out, logsumexp.squeeze(-1).transpose(0, 1)


def _positioned(params: AttentionParams, packed: PackedBatch) -> AttentionParams:
    """Params of the padded batch: the bias as (B, H|1, max_q, max_k), with it the distances
    from bottom-right positions."""
    device, max_k = packed.cu_seqlens_q.device, packed.max_k
    i = torch.arange(packed.max_q, device=device).unsqueeze(-1)
    j = torch.arange(max_k, device=device)
    bias = None
    if params.bias is not None and packed.bias_starts is not None:
        pairs = packed.bias_starts[:-1, None, None] + i * packed.stored_keys[:, None, None] + j
        pairs = pairs.clamp(0, max(params.bias.shape[1] - 1, 0))  # past the end of a sequence any index is valid
        bias = params.bias[:, pairs].transpose(0, 1)
    if not packed.bottom_right:
        return replace(params, bias=bias)
    if params.distance_bias is not None:
        own = i + (packed.key_lengths - packed.query_lengths)[:, None, None, None]  # (B, 1, max_q, 1): own key
        index = (max_k - 1 + j - own).clamp(0, params.distance_bias.shape[-1] - 1)[:, 0]
        nearness = params.distance_bias[0][:, index].transpose(0, 1)
        bias = nearness if bias is None else bias + nearness
    return replace(params, bias=bias, distance_bias=None)


def _shift(packed: PackedBatch | None) -> int | Tensor:
    """Position of the first query among the keys."""
    return packed.key_lengths - packed.query_lengths if packed is not None and packed.bottom_right else 0


def _mask_of(params: AttentionParams) -> AttentionMask:
    """The mask of a call, without what is added to the scores."""
    ids = None
    if params.query_ids is not None and params.key_ids is not None:
        ids = params.query_ids, params.key_ids
    return AttentionMask(
        keep_mask=params.keep,
        key_keep_mask=params.key_keep,
        key_lengths=params.lengths,
        causal_offset=params.causal,
        window_offset=params.window,
        document_ids=ids,
    )


def _scores_and_mask(q: Tensor, k: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
    """Scores (B, H, Lq, Lk) in float32 or wider, and a bool mask of the visible scores, broadcastable; None: all
    visible."""
    heads, key_heads = q.shape[1], k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q @ _repeated(k, heads // key_heads).transpose(-2, -1)).to(wide) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    allowed = allowed_keys(_mask_of(params), q.shape[2], k.shape[2], q.device, shift=_shift(params.packed))
    bias = params.bias
    if params.distance_bias is not None:
        added = along_diagonals(params.distance_bias, q.shape[2], k.shape[2], q.shape[2] - 1)
        bias = added if bias is None else bias + added
    if bias is not None:
        scores = scores + bias
        finite = bias != float("-inf")
        allowed = finite if allowed is None else allowed & finite
    return scores, allowed


def _weights(scores: Tensor, allowed: Tensor | None, params: AttentionParams, dtype: torch.dtype) -> Tensor:
    """Softmax over the visible scores and the sink. A row without visible scores is uniform, or 0."""
    if params.sinks is not None:
        kept = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
        joined = _with_sinks(kept, params.sinks)
        nothing = joined.amax(-1, keepdim=True) == float("-inf")  # no key, and a sink of -inf
        return torch.softmax(joined, -1).masked_fill(nothing, 0.0)[..., :-1].to(dtype)
    if allowed is None:
        return torch.softmax(scores, -1).to(dtype)
    weights = torch.softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), -1)
    if params.zero_empty_rows:
        weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return weights.to(dtype)


def _logsumexp(scores: Tensor, allowed: Tensor | None, sinks: Tensor | None) -> Tensor:
    kept = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    return torch.logsumexp(kept if sinks is None else _with_sinks(kept, sinks), -1)


def _with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Append the sink of each head to scores (B, H, Lq, Lk), as one more key."""
    return torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])], -1)


def _per_head(weights: Tensor, v: Tensor) -> Tensor:
    """Multiply weights (B, H, Lq, Lk) by values (B, Hkv, Lk, D)."""
    return weights @ _repeated(v, weights.shape[1] // v.shape[1])


def _repeated(t: Tensor, groups: int) -> Tensor:
    """Repeat each head of keys or values (B, Hkv, Lk, D) for ``groups`` heads of the queries."""
    return t if groups == 1 else t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _places(cu_seqlens: Tensor, tokens: Tensor, length: int) -> Tensor:
    """Index of each packed token in the padded batch of B * length tokens, int64 (T,)."""
    token = torch.arange(tokens.shape[0], device=tokens.device)
    sequence = (token.unsqueeze(1) >= cu_seqlens[1:]).sum(1)  # number of sequences that end before the token
    return sequence * length + token - cu_seqlens.index_select(0, sequence)


def _padded(tokens: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    """Pad tokens (T, H, D) to (B, H, length, D), with zeros."""
    padded = tokens.new_zeros(batch * length, *tokens.shape[1:]).index_copy(0, places, tokens)
    return padded.view(batch, length, *tokens.shape[1:]).transpose(1, 2)
