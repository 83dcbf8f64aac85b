"""Shared parts of the dialects: heads, inputs with fewer axes, and attention with given scores."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention import attend as attend_with
from ..layers.attention import attention
from ..layers.dropout import apply_dropout, fused_p
from ..layers.embedding import SinusoidalTable, is_lookup
from ..layers.linear import apply_linear
from ..masks import AttentionMask
from ..masks.packing import PackedMask, take, unpack
from ..ops.attention import attention as attention_op
from ..ops.embedding import add_positional, embed

Weights = bool | str
"""Values of ``return_weights`` of :func:`transformer_fast.attention`: False, True (before dropout) or "dropped"
(after)."""

_ALL = slice(None)
_ADDED = {2: (None, None), 3: (_ALL, None)}
"""Per number of dimensions: the index that adds the missing axes of (B, H, L, d), and the index that removes them."""
_TAKEN = {2: (0, 0), 3: (_ALL, 0)}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split (B, L, heads * d) to (B, heads, L, d), a view."""
    return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)


def project_heads(linears: Iterable[nn.Module], inputs: Iterable[Tensor], heads: int) -> list[Tensor]:
    """Project inputs (B, L, width) to queries, keys and values (B, heads, L, d)."""
    return [split_heads(apply_linear(linear, x), heads) for linear, x in zip(linears, inputs, strict=True)]


def merge_heads(x: Tensor) -> Tensor:
    """Merge (B, heads, L, d) to (B, L, heads * d)."""
    return x.transpose(-3, -2).flatten(-2)


def embed_with_positions(
    ids: Tensor,
    embedding: nn.Module,
    positions: SinusoidalTable,
    dropout: nn.Module,
    *,
    scale: float = 1.0,
    offset: int = 0,
) -> Tensor:
    """Compute ``dropout(embedding(ids) * scale + position)``: ids (B, L), the first at ``offset`` -> (B, L, d).

    Plain embedding and dropout run in one pass. The module ``positions`` is not called; its table is read.
    """
    table, p = positions.table(offset + ids.shape[-1]), fused_p(dropout)
    if p is None or not is_lookup(embedding):
        return apply_dropout(dropout, add_positional(embedding(ids) * scale, table, offset))
    padding_idx = embedding.padding_idx
    return embed(ids, embedding.weight, table, scale=scale, offset=offset, padding_idx=padding_idx, dropout_p=p)


def embed_with_table(
    ids: Tensor, embedding: nn.Module, table: Any, scale: Any, dropout: nn.Module | None, offset: int = 0
) -> Tensor | None:
    """Compute ``dropout(embedding(ids) * scale + table[offset : offset + L])`` in one pass, for a table (max_len, d).

    None if the embedding or the dropout must be called, or if the table is too short, on another device, or of a dtype
    that would change the result's dtype.
    """
    p = 0.0 if dropout is None else fused_p(dropout)
    if p is None or not is_lookup(embedding) or not isinstance(table, Tensor) or not isinstance(scale, float | int):
        return None
    weight = embedding.weight
    fits = table.dim() == 2 and offset + ids.shape[-1] <= table.shape[0] and table.device == ids.device
    if not fits or torch.promote_types(table.dtype, weight.dtype) != weight.dtype:
        return None
    padding = embedding.padding_idx
    return embed(ids, weight, table, scale=scale, offset=offset, padding_idx=padding, dropout_p=p)


def root_of(width: Any) -> float | None:
    """Square root of a width that is a positive number; None for anything else."""
    return math.sqrt(width) if type(width) in (int, float) and width > 0 else None


def packed_heads(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, dropout: Any = None) -> Tensor:
    """Attend with packed q, k and v (1, heads, T, d_k)."""
    return attention(*(t.squeeze(0) for t in (q, k, v)), q.shape[-1], mask, dropout).unsqueeze(0)


def with_padded_weights(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> tuple[Tensor, Tensor]:
    """Attend without dropout; also return the weights (B, heads, Lq, Lk), 0 at padding."""
    q, k, v = (
        unpack(t.squeeze(0).transpose(0, 1), packing).transpose(1, 2)
        for t, packing in ((q, mask.queries), (k, mask.keys), (v, mask.keys))
    )
    queries, keys = (
        unpack(torch.ones(packing.total, dtype=torch.bool, device=k.device), packing)
        for packing in (mask.queries, mask.keys)
    )
    seen = AttentionMask.keep(queries[:, None, :, None] & keys[:, None, None])
    seen = seen if mask.window is None else seen & mask.window
    options: dict[str, Any] = {"causal": mask.causal, "empty_rows": "zero"}
    out, weights = attention_op(q, k, v, seen, return_weights=True, **options)
    return take(out.transpose(1, 2), mask.queries).transpose(0, 1).unsqueeze(0), weights


def padded_weights(q: Tensor, k: Tensor, mask: PackedMask) -> Tensor:
    """Compute only the weights (B, heads, Lq, Lk)."""
    return with_padded_weights(q, k, k, mask)[1]


def with_head_axis(mask: Tensor, axes: int) -> Tensor:
    """Expand a mask over scores of ``axes`` dimensions to (B, H, Lq, Lk): (B, Lq, Lk) gets a head axis."""
    return mask.unsqueeze(1) if axes == 3 == mask.dim() else mask


def attend(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask | None,
    *,
    dropout: nn.Module | None = None,
    scale: float | None = None,
    return_weights: Weights = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`transformer_fast.attention` over inputs (B, H, L, d), (B, L, d) or (L, d).

    Returns the output and the weights (or None) with as many dimensions as the inputs.
    """
    axes = query.dim()
    if axes not in (2, 3, 4) or key.dim() != axes or value.dim() != axes:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"{where}: query, key and value must all be (B, H, L, d), (B, L, d) or (L, d), got {shapes}")
    if axes < 4:
        query, key, value = (t[_ADDED[axes]] for t in (query, key, value))
    result = attend_with(dropout, query, key, value, mask, scale=scale, return_weights=return_weights)
    out, weights = result if return_weights else (result, None)
    if axes < 4:
        out, weights = out[_TAKEN[axes]], None if weights is None else weights[_TAKEN[axes]]
    return out, weights


def attend_by_scores(
    scores: Tensor,
    value: Tensor,
    mask: AttentionMask | None,
    *,
    dropout: nn.Module | None = None,
    return_weights: Weights = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention with given scores (B, Lq, Lk) over values (B, Lk, d): the scores are passed as a bias on zero
    scores."""
    B, Lq, Lk = scores.shape
    q, k = value.new_zeros(1, 1, 1, 1).expand(B, 1, Lq, 1), value.new_zeros(1, 1, 1, 1).expand(B, 1, Lk, 1)
    bias = scores.unsqueeze(1)
    result = attend_with(dropout, q, k, value.unsqueeze(1), mask, bias=bias, scale=1.0, return_weights=return_weights)
    out, weights = result if return_weights else (result, None)
    return out.squeeze(1), None if weights is None else weights.squeeze(1)


def additive_scores(query: Tensor, key: Tensor, v: nn.Module) -> Tensor:
    """Scores ``v^T tanh(q + k)`` (B, Lq, Lk) of projected queries (B, Lq, n) and keys (B, Lk, n); v is a linear layer.

    Additive attention (Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
    translate", 2015, appendix A.1.2). The features (B, Lq, Lk, n) are materialised, because the score has no cheaper
    form.
    """
    return v(torch.tanh(query.unsqueeze(2) + key.unsqueeze(1))).squeeze(-1)


LAST_WEIGHTS = "_last_weights"
"""Name of the attribute with the weights of the last call: a tensor, or a function of the module that computes them."""


class LastWeights:
    """Descriptor of the attention weights of the last call, before dropout and without gradient.

    The weights are computed when the attribute is read. The attribute may also be set.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if LAST_WEIGHTS not in module.__dict__:
            raise AttributeError("no attention weights yet; call the module first")
        weights = module.__dict__[LAST_WEIGHTS]
        if not isinstance(weights, types.FunctionType):
            return weights
        with torch.no_grad():
            return weights(module)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[LAST_WEIGHTS] = value


def leave_weights(module: nn.Module, compute: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Let a module with :class:`LastWeights` compute the weights of this call by ``compute(*tensors)``."""
    detached = [t.detach() for t in tensors]
    setattr(module, LAST_WEIGHTS, None if torch.compiler.is_compiling() else lambda _: compute(*detached))
