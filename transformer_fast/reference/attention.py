"""Masked scaled dot-product attention, in plain PyTorch: the reference of all attention kernels.

``softmax(q k^T * scale + bias, over the allowed keys) v`` with dropout on the weights (Vaswani et al.,
"Attention Is All You Need", 2017, section 3.2.1).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..masks.definition import visible
from ..masks.distance import along_diagonals
from .dropout import attention_keep, rescale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    causal: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    empty_rows: str = "uniform",
    sinks: Tensor | None = None,
    contained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the keys that every part of the mask allows.

    Args:
        q: (B, H, Lq, D), any float dtype.
        k, v: (B, Hkv, Lk, D) with ``H % Hkv == 0``: query head h reads key head ``h // (H / Hkv)``.
        keep, key_keep, lengths, causal, window: the mask in normal form (see :mod:`transformer_fast.masks`).
        bias: added to the scaled scores, broadcastable to (B, H, Lq, Lk); ``-inf`` blocks.
        distance_bias: (B|1, H|1, Lq + Lk - 1), whose entry ``Lq - 1 + j - i`` is added too.
        query_ids, key_ids: (B|1, Lq) and (B|1, Lk): query i sees the keys of its own id.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before anything is added.
        scale: multiplies ``q k^T``.
        dropout_p, seed: dropout on the weights by :func:`~transformer_fast.reference.dropout.attention_keep`.
        empty_rows: a query with no allowed key gets weight ``1 / Lk`` on every key ("uniform", as filling with -1e9
            gives) or weight 0 on every key ("zero"). In both modes such a query gives q and k no gradient.
        sinks: (H,): per head, the score of one additional key, whose value is 0 and whose weight is not returned. With
            sinks, a query with no allowed key puts all its weight on the sink; a sink of -inf takes none.
        contained: a NaN or Inf in a key or value reaches only the queries that may see the key, which takes second
            matrix products. False computes one product each, as graphs for other runtimes do: the numbers are equal
            where k and v are finite.

    Returns:
        out (B, H, Lq, D) in q's dtype; weights before dropout (B, H, Lq, Lk) in q's dtype; logsumexp (B, H, Lq) of
        the scores, fp32 (fp64 for fp64 input), ``-inf`` for an empty row.
    """
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    parts = {"keep": keep, "key_keep": key_keep, "lengths": lengths, "query_ids": query_ids, "key_ids": key_ids}
    if distance_bias is not None:
        added = along_diagonals(distance_bias, Lq, Lk, Lq - 1)
        bias = added if bias is None else bias + added
    allowed = None
    if contained or any(part is not None for part in (*parts.values(), causal, window, bias, sinks)):
        allowed = visible(Lq, Lk, q.device, **parts, causal=causal, window=window)
        if bias is not None:
            allowed = allowed & (bias != float("-inf"))
        allowed = allowed.expand(B, H, Lq, Lk)
    kept = attention_keep(seed, dropout_p, B, H, Lq, Lk) if dropout_p > 0.0 else None
    options = bias, softcap, scale, kept, rescale(dropout_p), empty_rows == "zero", sinks
    return _attend(q, k, v, allowed, *options, contained)


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    bias_starts: Tensor | None = None,
    bottom_right: bool = False,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    causal: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    zero_empty_rows: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Attention within each sequence of a packed batch, sequence by sequence.

    Args:
        q: (Tq, H, D), the queries of sequence b in rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        k, v: (Tk, Hkv, D), likewise by ``cu_seqlens_k``.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), rising from 0 to Tq and to Tk.
        max_seqlen_q, max_seqlen_k: at least the lengths of the longest sequences.
        seqused_k: (B,), number of keys in use per sequence; later keys are not read.
        bottom_right: query i has position ``i + keys - queries`` in its sequence: the last query is at the last key.
        bias, bias_starts: (H|1, pairs); ``bias[:, bias_starts[b] : bias_starts[b + 1]]`` is the (Lq, Lk) of sequence b.
        causal, window: as for :func:`attention`, within each sequence.
        distance_bias: (1, H|1, max_seqlen_q + max_seqlen_k - 1), of which entry ``max_seqlen_q - 1 + j - i`` is added;
            with ``bottom_right`` entry ``max_seqlen_k - 1 + j - i``, i as counted there.
        query_ids, key_ids: (Tq,) and (Tk,).
        softcap, sinks: as for :func:`attention`.
        scale, dropout_p, seed: as for :func:`attention`; b is the sequence, and i and j count within the sequence, so
            packed and padded batches have the same dropout mask.
        zero_empty_rows: a query with no allowed key is 0, instead of the mean of its own sequence's values.

    Returns:
        out (Tq, H, D) in q's dtype; for each sequence its weights (H, Lq, Lk) before and after dropout; and logsumexp
        (H, Tq), fp32 (fp64 for fp64 input), ``-inf`` for an empty row.
    """
    # An empty sequence is appended, so that there is at least one.
    starts_q, starts_k = [*cu_seqlens_q.tolist(), q.shape[0]], [*cu_seqlens_k.tolist(), k.shape[0]]
    H, B = q.shape[1], len(starts_q) - 1
    kept = attention_keep(seed, dropout_p, B, H, max_seqlen_q, max_seqlen_k) if dropout_p > 0.0 else None
    used = [end - start for start, end in itertools.pairwise(starts_k)]
    if seqused_k is not None:
        used[:-1] = seqused_k.tolist()
    factor = rescale(dropout_p)
    outs, logsumexps, weights = [], [], []
    for b in range(B):
        of_q, of_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b] + used[b])
        qs = q[of_q].transpose(0, 1).unsqueeze(0)
        ks, vs = (t[of_k].transpose(0, 1).unsqueeze(0) for t in (k, v))
        Lq, Lk, stored = qs.shape[2], ks.shape[2], starts_k[b + 1] - starts_k[b]
        shift = Lk - Lq if bottom_right else 0
        ids = {}
        if query_ids is not None and key_ids is not None:
            ids = {"query_ids": query_ids[None, of_q], "key_ids": key_ids[None, of_k]}
        allowed = visible(Lq, Lk, q.device, causal=causal, window=window, shift=shift, **ids)
        added = None
        if bias is not None and bias_starts is not None:
            pair = int(bias_starts[b])
            added = bias[None, :, pair : pair + Lq * stored].unflatten(2, (Lq, stored))[..., :Lk]
        if distance_bias is not None:
            nearness = along_diagonals(
                distance_bias, Lq, Lk, max_seqlen_k - 1 - shift if bottom_right else max_seqlen_q - 1
            )
            added = nearness if added is None else added + nearness
        if added is not None:
            allowed = allowed & (added != float("-inf"))
        allowed = allowed.expand(1, H, Lq, Lk)
        own = kept if kept is None else kept[b : b + 1, :, :Lq, :Lk]
        options = (added, softcap, scale, own, factor, zero_empty_rows, sinks)
        out, before, logsumexp = _attend(qs, ks, vs, allowed, *options)
        outs.append(out[0].transpose(0, 1))
        logsumexps.append(logsumexp[0])
        weights.append((before[0], _dropped(before, own, factor)[0]))
    return torch.cat(outs), weights[:-1], torch.cat(logsumexps, 1)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    lengths: Tensor,
    page_table: Tensor | None = None,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    causal: int | None = 0,
    window: int | None = None,
    softcap: float | None = None,
    scale: float,
    sinks: Tensor | None = None,
    contained: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest queries per sequence to a cache of keys, which includes the new keys.

    Args:
        q: (B, H, Lq, D), the last Lq positions of each sequence.
        k_cache, v_cache: (B, Hkv, S, D); or, with a page table, (pages, page_size, Hkv, D).
        lengths: int (B,), number of keys per sequence in the cache; later keys are never read.
        page_table: int32 (B, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries past the last key may hold anything.
        distance_bias: (B|1, H|1, Lq + S - 1), of which entry ``S - 1 + j - (i + lengths[b] - Lq)`` is added.
        query_ids, key_ids: (B, Lq) and (B, S): query i sees the keys of its own id.
        causal, window: query i sees keys ``i + lengths[b] - Lq + window <= j <= i + lengths[b] - Lq + causal``.
        softcap, sinks, contained: as for :func:`attention`.
        scale: multiplies ``q k^T``.

    Returns:
        out (B, H, Lq, D) in q's dtype, 0 for a query without keys; logsumexp (B, H, Lq), fp32 (fp64 for fp64 input),
        ``-inf`` there.
    """
    k, v, bias = _cached_keys(q, k_cache, v_cache, lengths, page_table, distance_bias)
    ids = {"query_ids": query_ids, "key_ids": key_ids}
    bounds = {"causal": causal, "window": window, "shift": lengths - q.shape[2]}
    keep = visible(q.shape[2], k.shape[2], q.device, lengths=lengths, **ids, **bounds)
    options = {"scale": scale, "softcap": softcap, "empty_rows": "zero", "sinks": sinks}
    out, _, logsumexp = attention(q, k, v, keep=keep, bias=bias, **options, contained=contained)
    return out, logsumexp


def _cached_keys(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    distance_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of a cache, (B, Hkv, S, D), and the bias by distance (B, H, Lq, S)."""
    if page_table is not None:
        pages = page_table.clamp(0, max(k_cache.shape[0] - 1, 0)).long()
        # (B, max_pages, page_size, Hkv, D) -> (B, Hkv, S, D)
        k_cache, v_cache = (t[pages].flatten(1, 2).transpose(1, 2) for t in (k_cache, v_cache))
    Lq, S = q.shape[2], k_cache.shape[2]
    bias = None
    if distance_bias is not None:
        B, H = q.shape[:2]
        j = torch.arange(S, device=q.device)
        i = torch.arange(Lq, device=q.device).unsqueeze(1) + lengths[:, None, None, None] - Lq
        index = (S - 1 + j - i).clamp(0, Lq + S - 2).expand(B, H, Lq, S)  # clamped entries are masked or not read
        bias = distance_bias.expand(B, H, -1).gather(2, index.flatten(2)).view(B, H, Lq, S)
    return k_cache, v_cache, bias


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    kept: Tensor | None,
    factor: float,
    zero_empty_rows: bool,
    sinks: Tensor | None,
    contained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attention` with its mask (``allowed``, None for all keys) and its dropout (``kept``, times ``factor``) as
    (B, H, Lq, Lk)."""
    k, v = (_for_query_heads(t, q.shape[1] // t.shape[1]) for t in (k, v))
    empty = None if allowed is None else ~allowed.any(-1, keepdim=True)

    scores = _scores(q, k, contained) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None and empty is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        joined = torch.cat([scores, sink], -1)
        nothing = empty & (sink == float("-inf"))
        joined = joined.masked_fill(nothing, 0.0)  # softmax of nothing but -inf is NaN, and so is its gradient
        logsumexp = torch.logsumexp(joined, -1).masked_fill(nothing.squeeze(-1), float("-inf"))
        weights = torch.softmax(joined, -1).masked_fill(nothing, 0.0)[..., :-1].to(q.dtype)
        return _weighted_sum(_dropped(weights, kept, factor), v, allowed, contained), weights, logsumexp
    logsumexp = torch.logsumexp(scores, -1)

    # A row of equal scores has uniform weights; the constant fill passes no gradient to q and k.
    weights = torch.softmax(scores if empty is None else scores.masked_fill(empty, 0.0), -1)
    if zero_empty_rows and empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    weights = weights.to(q.dtype)
    return _weighted_sum(_dropped(weights, kept, factor), v, allowed, contained), weights, logsumexp


def _for_query_heads(t: Tensor, groups: int) -> Tensor:
    """Repeat each head of keys or values (B, Hkv, Lk, D) for ``groups`` heads of the queries."""
    return t if groups == 1 else t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _dropped(weights: Tensor, kept: Tensor | None, factor: float) -> Tensor:
    return weights if kept is None else (weights * factor).masked_fill(~kept, 0.0)


def _scores(q: Tensor, k: Tensor, contained: bool) -> Tensor:
    """q k^T, fp32 or wider. A non-finite key is kept out of the product, and its column is set to NaN. Otherwise its
    zero gradient times NaN would reach all queries, also blocked ones."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not contained:
        return (q @ k.transpose(-2, -1)).to(wide)
    bad = ~k.isfinite()
    scores = (q @ k.masked_fill(bad, 0.0).transpose(-2, -1)).to(wide)
    return scores.masked_fill(bad.any(-1).unsqueeze(-2), float("nan"))


def _weighted_sum(weights: Tensor, v: Tensor, allowed: Tensor | None, contained: bool) -> Tensor:
    """Compute weights @ v, where a NaN or Inf value of a blocked key counts as 0."""
    if not contained or allowed is None:
        return weights @ v
    bad = ~v.isfinite()
    out = weights @ v.masked_fill(bad, 0.0)
    reached = allowed.to(torch.float32) @ bad.to(torch.float32) > 0
    return out.masked_fill(reached, float("nan"))
