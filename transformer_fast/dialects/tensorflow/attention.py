"""Attention with float blocked masks, which returns its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import backends
from ...layers.hooks import TAKES_NEED_WEIGHTS, has_role, in_role
from ...layers.linear import apply_linear
from ...masks import AttentionMask
from ...tracing import is_traced
from ..common import attend, head_width, merge_heads, project_heads, with_head_axis

BlockedMask = Tensor | AttentionMask | None
"""A float mask broadcastable to (B, H, Lq, Lk), 1.0 = blocked and 0.0 = kept; an AttentionMask; or None."""


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockedMask, *, need_weights: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute ``softmax(q k^T / sqrt(d) + mask * -1e9) v`` and the weights (Vaswani et al., 2017, section 3.2.1).

    Args:
        q: (..., Lq, d), two to four dimensions.
        k, v: (..., Lk, d) and (..., Lk, dv).
        mask: float, 1.0 = blocked, broadcastable to (..., Lq, Lk); an AttentionMask; or None.
        need_weights: False skips the matrix product for the weights and returns None instead of them.

    Returns:
        out (..., Lq, dv) and weights (..., Lq, Lk).

    Raises:
        TypeError: for a bool or integer mask, which is ambiguous.
        ValueError: for a float mask that holds more than 0.0 and 1.0 (checked on CPU), or does not fit.
    """
    where = "scaled_dot_product_attention"
    return attend(where, q, k, v, blocked_mask(where, mask, q.dim()), return_weights=need_weights)


@in_role(TAKES_NEED_WEIGHTS)
class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2) without attention dropout; note the order v, k, q.

    Args:
        d_model: width.
        num_heads: number of heads; must divide ``d_model``.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.depth = head_width(self, d_model, num_heads)
        self.num_heads = num_heads
        self.d_model = d_model
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """v, k (B, Lk, d_model), q (B, Lq, d_model) -> out (B, Lq, d_model) and weights (B, num_heads, Lq, Lk).

        mask, need_weights: as for :func:`scaled_dot_product_attention`.
        """
        mask = blocked_mask("MultiHeadAttention", mask)
        q, k, v = project_heads((self.wq, self.wk, self.wv), (q, k, v), self.num_heads)
        out, weights = attend("MultiHeadAttention", q, k, v, mask, return_weights=need_weights)
        return apply_linear(self.dense, merge_heads(out)), weights


def needs(module: nn.Module, need_weights: bool) -> dict[str, bool]:
    """Return ``need_weights`` as an argument for an attention or layer that takes it, else no argument."""
    return {"need_weights": need_weights} if has_role(module, TAKES_NEED_WEIGHTS) else {}


def blocked_mask(where: str, mask: BlockedMask, axes: int = 4) -> AttentionMask | None:
    """Convert a mask over scores of ``axes`` dimensions to normal form."""
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"{where}: mask must be a float tensor, an AttentionMask or None, got {type(mask).__name__}")
    if not mask.is_floating_point():
        raise TypeError(
            f"{where}: a mask of this dialect is float, 1.0 = blocked; a {mask.dtype} one can be read two ways. "
            "If True or 1 means blocked, pass mask.float(); if it means kept, pass AttentionMask.keep(mask)."
        )
    if mask.dim() > axes or (axes == 4 and mask.dim() == 3):
        hint = "; pass mask[:, None] if its first axis is the batch, mask[None] if it is the heads"
        raise ValueError(
            f"{where}: mask of shape {tuple(mask.shape)} does not fit scores of {axes} dimensions"
            + (hint if mask.dim() == 3 else "")
        )
    # On a GPU this check would wait for the device.
    checked = mask.device.type == "cpu" and not (
        torch.compiler.is_compiling() or is_traced() or backends.in_transform()
    )
    if checked and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{where}: a mask of this dialect holds 1.0 for blocked and 0.0 for kept, and nothing else. If it is added "
            "to the scores as it is, pass AttentionMask.bias(mask)."
        )
    return AttentionMask.blocked(with_head_axis(mask, axes))
