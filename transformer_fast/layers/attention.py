"""Multi-head attention as a drop-in module."""

from __future__ import annotations

import math
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from ..masks.checks import how_to_convert
from ..masks.packing import PackedMask, packing_of, take, unpack
from ..ops.scaled_dot_product_attention import TORCH
from .devices import attends_by_torch
from .dropout import fused_p
from .linear import apply_linear

_TORCHS = {"scale", "empty_rows"}
"""Options of an attention that torch computes too."""

LayerMask = Tensor | AttentionMask | PackedMask | None
"""Mask argument of a layer: a keep mask (B, 1, Lk) or (B, Lq, Lk), bool or int; an AttentionMask; a PackedMask for
packed inputs (T, d_model); or None."""


class KeyValues(Protocol):
    """Cached keys and values of one attention module: a part of a generation cache."""

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        """Attend from x (rows, 1, d_model), the newest position, to the cache -> outputs of the heads (rows, 1,
        d_model)."""


@overload
def layer_mask(mask: Tensor | AttentionMask | None) -> AttentionMask | None: ...
@overload
def layer_mask(mask: LayerMask) -> AttentionMask | PackedMask | None: ...
def layer_mask(mask: LayerMask) -> AttentionMask | PackedMask | None:
    """Normalise a layer's mask: a keep mask (B, 1, Lk) or (B, Lq, Lk) gets a head axis and becomes an
    :class:`~transformer_fast.AttentionMask`.

    Raises:
        ValueError: for a tensor of another rank; the message for a (B, L) padding mask says how to reshape the mask.
        TypeError: for a float tensor, which is ambiguous: additive or a keep mask.
    """
    if mask is None or isinstance(mask, AttentionMask | PackedMask):
        return mask
    if not isinstance(mask, Tensor):
        hint = how_to_convert(mask)
        raise TypeError(f"mask: expected a tensor, an AttentionMask or None, got {type(mask).__name__}{hint}")
    if mask.dim() != 3:
        hint = "; give a (B, L) padding mask as mask.unsqueeze(1), a (Lq, Lk) mask as mask[None]" * (mask.dim() == 2)
        raise ValueError(f"mask: expected a keep mask (B, 1, Lk) or (B, Lq, Lk), got shape {tuple(mask.shape)}{hint}")
    return AttentionMask.keep(mask.unsqueeze(1))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_k: int,
    mask: LayerMask = None,
    dropout: nn.Dropout | None = None,
    verbose: bool = False,
) -> Tensor:
    """``dropout(softmax(q k^T / sqrt(d_k))) v``.

    Args:
        q: (B, h, Lq, d_k); packed (h, Tq, d_k).
        k, v: (B, h, Lk, d_k); packed (h, Tk, d_k).
        d_k: the scale is ``1 / sqrt(d_k)``.
        mask: keep mask (B, 1, Lk) or (B, Lq, Lk), bool or int, or an AttentionMask; a PackedMask where q, k and v are
            packed.
        dropout: module applied to the weights, active in training mode.
        verbose: print the weights after dropout; padded only.
    """
    scale = 1.0 / math.sqrt(d_k)
    if isinstance(mask, PackedMask):
        if verbose:
            raise ValueError("attention: verbose prints weights (B, h, Lq, Lk), which packed inputs do not have")
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        p = 0.0 if dropout is None else fused_p(dropout)
        if p is None:
            return _padded_attention(q, k, v, mask, dropout, scale).transpose(0, 1)
        return packed_attention(q, k, v, mask, scale=scale, dropout_p=p).transpose(0, 1)
    if verbose:
        out, weights = attend(dropout, q, k, v, layer_mask(mask), scale=scale, return_weights="dropped")
        print(weights)
        return out
    return attend(dropout, q, k, v, layer_mask(mask), scale=scale)


def attend(
    dropout: nn.Module | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: bool | str = False,
    **options: Any,
) -> Any:
    """:func:`transformer_fast.attention` with a module that drops attention weights.

    A plain dropout runs inside the fused op. For any other module the weights (B, H, Lq, Lk) are computed and the
    module is called with them. Returns the output, or with ``return_weights`` the tuple (output, weights).
    """
    p = 0.0 if dropout is None else fused_p(dropout)
    if p is not None:
        return module_attention(q, k, v, mask, dropout_p=p, return_weights=return_weights, **options)
    assert dropout is not None
    _, weights = ops.attention(q, k, v, mask, return_weights=True, **options)
    dropped = dropout(weights)
    out = torch.matmul(dropped, v)
    return (out, dropped if return_weights == "dropped" else weights) if return_weights else out


def module_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: bool | str = False,
    **options: Any,
) -> Any:
    """:func:`transformer_fast.attention` in a module; a call that torch computes faster (``attends_by_torch``) is
    torch's."""
    if attends_by_torch(q, mask, bias, dropout_p) and not return_weights and options.keys() <= _TORCHS:
        causal = isinstance(mask, AttentionMask) and mask.causal_offset is not None
        return TORCH(q, k, v, is_causal=causal, scale=options.get("scale"), enable_gqa=q.shape[1] != k.shape[1])
    return ops.attention(q, k, v, mask, bias=bias, dropout_p=dropout_p, return_weights=return_weights, **options)


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, dropout: nn.Module | None, scale: float
) -> Tensor:
    """Attention of packed q (Tq, h, d), k and v (Tk, h, d), padded for a dropout module that needs the weights."""
    queries, keys = (
        packing_of(p.cu_seqlens.diff(), p.batch, p.max_length, q.device) for p in (mask.queries, mask.keys)
    )
    q, k, v = (unpack(t, packing).transpose(1, 2) for t, packing in ((q, queries), (k, keys), (v, keys)))
    allowed = AttentionMask.lengths(mask.keys.cu_seqlens.diff())
    if mask.window is not None:
        allowed = allowed & mask.window
    out = attend(dropout, q, k, v, allowed, causal=mask.causal, scale=scale, empty_rows="zero")
    return take(out.transpose(1, 2), queries)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """:func:`transformer_fast.attention_packed` of q (Tq, h, d), k and v (Tk, h, d), packed as the mask says."""
    return ops.attention_packed(
        q,
        k,
        v,
        mask.queries.cu_seqlens,
        mask.keys.cu_seqlens,
        max_seqlen_q=mask.queries.max_length,
        max_seqlen_k=mask.keys.max_length,
        mask=mask.window,
        causal=mask.causal,
        scale=scale,
        dropout_p=dropout_p,
    )


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Args:
        heads: number of heads h; must divide ``d_model``.
        d_model: width.
        dropout: probability, on the attention weights.
    """

    def __init__(self, heads: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        if heads < 1 or d_model % heads != 0:
            raise ValueError(
                f"MultiHeadAttention: d_model must be a multiple of heads, got d_model={d_model}, heads={heads}"
            )
        self.d_model = d_model
        self.d_k = d_model // heads
        self.h = heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: LayerMask = None,
        verbose: bool = False,
        *,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """Attend: q (B, Lq, d_model); k, v (B, Lk, d_model); mask as in :func:`attention` -> (B, Lq, d_model).

        With a PackedMask q is (Tq, d_model), k and v (Tk, d_model), and the result (Tq, d_model). With a cache q is the
        newest position, (rows, 1, d_model); the cache replaces k, v and mask.
        """
        if cache is not None:
            return apply_linear(self.out, cache.attend(self, q))
        pairs = (self.q_linear, q), (self.k_linear, k), (self.v_linear, v)
        projected = (apply_linear(linear, x) for linear, x in pairs)
        q, k, v = (x.view(*x.shape[:-1], self.h, self.d_k).transpose(-3, -2) for x in projected)
        heads = attention(q, k, v, self.d_k, mask, self.dropout, verbose)
        return apply_linear(self.out, heads.transpose(-3, -2).flatten(-2))
