"""Multi-head attention as a drop-in module."""

from __future__ import annotations

import math

from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from .norm import active_dropout


def layer_mask(mask: Tensor | AttentionMask | None) -> AttentionMask | None:
    """A layer's mask as an :class:`~transformer_fast.AttentionMask`: keep masks (B, 1, Lk) and (B, Lq, Lk) get their
    head axis here.

    Raises:
        ValueError: for a tensor of another rank; a (B, L) padding mask is named as such.
        TypeError: for a float tensor, which can be read two ways.
    """
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a tensor, an AttentionMask or None, got {type(mask).__name__}")
    if mask.dim() != 3:
        hint = "; give a (B, L) padding mask as mask.unsqueeze(1)" if mask.dim() == 2 else ""
        raise ValueError(f"mask: expected a keep mask (B, 1, Lk) or (B, Lq, Lk), got shape {tuple(mask.shape)}{hint}")
    return AttentionMask.keep(mask.unsqueeze(1))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_k: int,
    mask: Tensor | AttentionMask | None = None,
    dropout: nn.Dropout | None = None,
    verbose: bool = False,
) -> Tensor:
    """``dropout(softmax(q k^T / sqrt(d_k))) v``.

    Args:
        q: (B, h, Lq, d_k).
        k, v: (B, h, Lk, d_k).
        d_k: the scale is ``1 / sqrt(d_k)``.
        mask: keep mask (B, 1, Lk) or (B, Lq, Lk), bool or int, or an AttentionMask.
        dropout: acts on the weights when it is in training mode.
        verbose: print the weights after dropout.
    """
    options = {"scale": 1.0 / math.sqrt(d_k), "dropout_p": active_dropout(dropout) if dropout is not None else 0.0}
    if verbose:
        out, weights = ops.attention(q, k, v, layer_mask(mask), return_weights="dropped", **options)
        print(weights)
        return out
    return ops.attention(q, k, v, layer_mask(mask), **options)


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
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMask | None = None, verbose: bool = False
    ) -> Tensor:
        """q (B, Lq, d_model); k, v (B, Lk, d_model); mask as in :func:`attention` -> (B, Lq, d_model)."""
        B = q.shape[0]
        q, k, v = (
            linear(x).view(B, x.shape[1], self.h, self.d_k).transpose(1, 2)
            for linear, x in ((self.q_linear, q), (self.k_linear, k), (self.v_linear, v))
        )
        heads = attention(q, k, v, self.d_k, mask, self.dropout, verbose)
        return self.out(heads.transpose(1, 2).reshape(B, -1, self.d_model))
