"""The ops in PyTorch's own operators, for graphs that run without this package: torch.jit.trace, ONNX, ATen.

Each function has the arguments and results of the op of its name (csrc/ops), and sizes need not be known yet. The
formulas are those of :mod:`transformer_fast.reference`, but for one thing: the reference keeps a NaN in a blocked key
from queries that do not see it, which costs a second product. These do not, as eager PyTorch does not. There is no
dropout, which is for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import extension, reference
from ..distance import along_diagonals
from ..masks import dense_keep, same_document
from ..tracing import sizes


def implementation(op: str, backend: str) -> Callable[..., Any]:
    """What computes ``transformer_fast::<op>``: the op itself, or for the backend "plain" its function here."""
    if backend == "plain":
        return _PLAIN[op]
    return getattr(torch.ops.transformer_fast, op).default


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The ops in PyTorch's own operators, for ``torch.export``: ``program.run_decompositions(decompositions())``.

    The result is a program of ATen operators, which runs, and can be compiled or converted, where this package is not
    installed. Of the exported ops all are in it that a forward pass without dropout can hold. Empty where the extension
    is not there, as then no program holds its ops.
    """
    if not extension.load():
        return {}
    return {getattr(torch.ops.transformer_fast, name).default: function for name, function in _PLAIN.items()}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    window: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    zero_empty_rows: bool,
    backend: str,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, Lq, D) and logsumexp (B, H, Lq)."""
    _refuse_dropout("attention", dropout_p)
    mask = keep, key_keep, lengths, bias, causal, window
    scores, allowed = _scores_and_mask(q, k, *mask, scale, distance_bias, query_ids, key_ids, softcap)
    weights = _weights(scores, allowed, zero_empty_rows, q.dtype, sinks)
    return _per_head(weights, v), _logsumexp(scores, allowed, sinks)


def attention_weights(
    q: Tensor,
    k: Tensor,
    logsumexp: Tensor | None,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    window: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    zero_empty_rows: bool,
    backend: str,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The weights (B, H, Lq, Lk)."""
    _refuse_dropout("attention", dropout_p)
    mask = keep, key_keep, lengths, bias, causal, window
    scores, allowed = _scores_and_mask(q, k, *mask, scale, distance_bias, query_ids, key_ids, softcap)
    return _weights(scores, allowed, zero_empty_rows, q.dtype, sinks)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    causal: int | None,
    window: int | None,
    scale: float,
    backend: str,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, Lq, D) and logsumexp (B, H, Lq)."""
    parts = distance_bias, query_ids, key_ids, causal, window
    k, v, keep, bias = reference.attention.cached_keys(q, k_cache, v_cache, lengths, page_table, *parts)
    options: dict[str, Any] = {"sinks": sinks, "softcap": softcap}
    return attention(q, k, v, keep, None, None, bias, None, None, scale, 0.0, None, True, backend, **options)


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: int | None,
    window: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    zero_empty_rows: bool,
    backend: str,
    distance_bias: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out (Tq, H, D) and logsumexp (H, Tq), by the padded batch: it is put together, and taken apart again."""
    _refuse_dropout("attention_packed", dropout_p)
    batch = cu_seqlens_q.shape[0] - 1
    place_q, place_k = (_places(cu, t, n) for cu, t, n in ((cu_seqlens_q, q, max_q), (cu_seqlens_k, k, max_k)))
    padded_q = _padded(q, place_q, batch, max_q)
    padded_k, padded_v = (_padded(t, place_k, batch, max_k) for t in (k, v))
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    if query_ids is not None and key_ids is not None:
        query_ids, key_ids = (
            _padded(ids[:, None, None], place, batch, n)[:, 0, :, 0]
            for ids, place, n in ((query_ids, place_q, max_q), (key_ids, place_k, max_k))
        )
    mask = None, None, lengths, None, causal, window
    parts = distance_bias, query_ids, key_ids, softcap
    scores, allowed = _scores_and_mask(padded_q, padded_k, *mask, scale, *parts)
    assert allowed is not None  # as there are lengths
    if zero_empty_rows or sinks is not None:
        weights = _weights(scores, allowed, True, q.dtype, sinks)
    else:  # a row without keys is uniform over those of its own sequence, and 0 where there are none
        own = dense_keep(None, None, lengths, None, None, scores.shape[2], scores.shape[3], q.device)
        kept = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).masked_fill(~own, float("-inf"))
        weights = torch.softmax(kept, -1).masked_fill(~own.any(-1, keepdim=True), 0.0).to(q.dtype)
    out, logsumexp = _per_head(weights, padded_v), _logsumexp(scores, allowed, sinks).unsqueeze(-1)
    out, logsumexp = (t.transpose(1, 2).flatten(0, 1).index_select(0, place_q) for t in (out, logsumexp))
    return out, logsumexp.squeeze(-1).transpose(0, 1)


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm (..., d), what was normed (empty if x was), and the rows' mean (empty for "rms") and factor.

    LayerNorm is PyTorch's own, for which other programs have a kernel.
    """
    _refuse_dropout("layer_norm", dropout_p)
    summed = x if residual is None else residual + x
    if kind != "layer" or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        out = reference.norm.layer_norm(summed, weight, bias, eps, kind=kind)
    else:
        out = F.layer_norm(summed, sizes(summed)[-1:], weight, bias, eps)
    assert isinstance(out, Tensor)
    wide = summed if summed.dtype == torch.float64 else summed.float()
    if kind == "std":
        factor = 1 / (wide.std(-1) + eps)
    else:
        factor = torch.rsqrt((wide.square().mean(-1) if kind == "rms" else wide.var(-1, unbiased=False)) + eps)
    mean = wide.new_empty(0) if kind == "rms" else wide.mean(-1).flatten()
    return out, x.new_empty(0) if residual is None else summed, mean, factor.flatten()


def dropout(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    p: float,
    seed: Tensor | None,
    backend: str,
) -> Tensor:
    """``[residual +] [relu] (x [+ bias])`` (..., d)."""
    _refuse_dropout("dropout", p)
    return reference.dropout.dropout(x, 0.0, None, bias=bias, residual=residual, relu=relu)


def embed(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    scale: float,
    offset: int,
    offsets: Tensor | None,
    padding_idx: int | None,
    dropout_p: float,
    seed: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """``weight[ids] * scale + table[offset : offset + L]`` (..., L, d)."""
    _refuse_dropout("embed", dropout_p)
    start = offset if offsets is None else offsets
    return reference.embedding.embed(ids, weight, table, scale=scale, offset=start, padding_idx=padding_idx)


def add_positional(
    x: Tensor, table: Tensor, offset: int, offsets: Tensor | None, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """``x + table[offset : offset + L]`` (..., L, d)."""
    _refuse_dropout("add_positional", dropout_p)
    return reference.embedding.add_positional(x, table, offset if offsets is None else offsets)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    ignore_index: int,
    mean: bool,
    gradients: list[bool],
    chunk_elements: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, a scalar; in place of the gradients, and of their scale, there is nothing."""
    if any(gradients):
        raise RuntimeError("linear_cross_entropy: a graph of plain operators has its value, not its gradients")
    reduction = "mean" if mean else "sum"
    loss = reference.cross_entropy.linear_cross_entropy(
        x, weight, bias, target, label_smoothing=smoothing, ignore_index=ignore_index, reduction=reduction
    )
    return loss, x.new_empty(0), weight.new_empty(0), weight.new_empty(0), torch.zeros_like(loss)


_PLAIN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        attention,
        attention_weights,
        attention_decode,
        attention_packed,
        layer_norm,
        dropout,
        embed,
        add_positional,
        linear_cross_entropy,
    )
}


def _scores_and_mask(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    window: int | None,
    scale: float,
    distance_bias: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """The scores (B, H, Lq, Lk) in float32 or wider, and which of them count, broadcastable to that; None: all."""
    heads, key_heads = sizes(q)[1], sizes(k)[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q @ _repeated(k, heads // key_heads).transpose(-2, -1)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = keep, key_keep, lengths, causal, window
    allowed = None
    if any(part is not None for part in mask):
        allowed = dense_keep(*mask, q.shape[2], k.shape[2], q.device)
    if query_ids is not None and key_ids is not None:
        same = same_document(query_ids, key_ids)
        allowed = same if allowed is None else allowed & same
    if distance_bias is not None:
        added = along_diagonals(distance_bias, q.shape[2], k.shape[2], q.shape[2] - 1)
        bias = added if bias is None else bias + added
    if bias is not None:
        scores = scores + bias
        finite = bias != float("-inf")
        allowed = finite if allowed is None else allowed & finite
    return scores, allowed


def _weights(
    scores: Tensor, allowed: Tensor | None, zero_empty_rows: bool, dtype: torch.dtype, sinks: Tensor | None = None
) -> Tensor:
    """The softmax over the scores that count, beside a sink. A row of which none does is uniform, or 0."""
    if sinks is not None:
        kept = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
        return torch.softmax(_with_sinks(kept, sinks), -1)[..., :-1].to(dtype)
    if allowed is None:
        return torch.softmax(scores, -1).to(dtype)
    weights = torch.softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), -1)
    if zero_empty_rows:
        weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return weights.to(dtype)


def _logsumexp(scores: Tensor, allowed: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    kept = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    return torch.logsumexp(kept if sinks is None else _with_sinks(kept, sinks), -1)


def _with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Scores (B, H, Lq, Lk) and the sink of each head, as one more key."""
    return torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])], -1)


def _per_head(weights: Tensor, v: Tensor) -> Tensor:
    """Weights (B, H, Lq, Lk) times values (B, Hkv, Lk, D)."""
    return weights @ _repeated(v, sizes(weights)[1] // sizes(v)[1])


def _repeated(t: Tensor, groups: int) -> Tensor:
    """Keys or values (B, Hkv, Lk, D), each head for ``groups`` heads of the queries."""
    return t if groups == 1 else t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _places(cu_seqlens: Tensor, tokens: Tensor, length: int) -> Tensor:
    """Where each token of a packed batch stands in the padded one (B * length), int64 (T,)."""
    token = torch.arange(tokens.shape[0], device=tokens.device)
    sequence = (token.unsqueeze(1) >= cu_seqlens[1:]).sum(1)  # as many sequences have ended before it
    return sequence * length + token - cu_seqlens.index_select(0, sequence)


def _padded(tokens: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    """Tokens (T, H, D) -> (B, H, length, D), 0 where there is none."""
    padded = tokens.new_zeros(batch * length, *sizes(tokens)[1:]).index_copy(0, places, tokens)
    return padded.view(batch, length, *sizes(tokens)[1:]).transpose(1, 2)


def _refuse_dropout(op: str, p: float) -> None:
    if p > 0.0:
        raise RuntimeError(
            f"{op}: torch.jit.trace, ONNX and decompositions() write no dropout into a graph, and here it is {p}: call "
            "model.eval() before, or set the probability to 0"
        )
