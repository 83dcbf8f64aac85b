"""Attention with additive and with bilinear scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layers.linear import apply_linear, is_linear
from ...ops.linear import linear
from ..common import additive_scores, attend, attend_by_scores
from .attention import BlockedMask, blocked_mask


class AdditiveAttention(nn.Module):
    """Attention with the additive score ``v^T tanh(W [k; q])`` (Bahdanau, Cho and Bengio, 2015), not scaled.

    ``W [k; q]`` is the sum of two projections, so each key and each query is projected once, not once per pair.

    Args:
        units: width of the hidden layer.
        key_size, query_size: widths of keys and queries.
    """

    def __init__(self, units: int, key_size: int, query_size: int) -> None:
        super().__init__()
        self.W = nn.Linear(key_size + query_size, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)
        self.key_size, self.query_size = key_size, query_size

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """v (B, Lk, d), k (B, Lk, key_size), q (B, Lq, query_size) -> out (B, Lq, d) and weights (B, Lq, Lk).

        mask: float blocked mask broadcastable to (B, Lq, Lk), or an AttentionMask.
        """
        if is_linear(self.W):
            query = linear(q, self.W.weight[:, self.key_size :])
            key = linear(k, self.W.weight[:, : self.key_size])
            scores = additive_scores(query, key, self.v)
        else:
            shape = k.shape[0], q.shape[1], k.shape[1], -1
            pairs = torch.cat((k.unsqueeze(1).expand(shape), q.unsqueeze(2).expand(shape)), -1)
            scores = self.v(torch.tanh(self.W(pairs))).squeeze(-1)
        mask = blocked_mask("AdditiveAttention", mask, 3)
        return attend_by_scores(scores, v, mask, return_weights=need_weights)


class BilinearAttention(nn.Module):
    """Attention with the bilinear score ``(W_k k)^T (W_q q)`` (Luong, Pham and Manning, "Effective approaches to
    attention-based neural machine translation", 2015, section 3.1, "general"), not scaled.

    Args:
        units: width of both projections.
        key_size, query_size: widths of keys and queries.
    """

    def __init__(self, units: int, key_size: int, query_size: int) -> None:
        super().__init__()
        self.W_k = nn.Linear(key_size, units, bias=False)
        self.W_q = nn.Linear(query_size, units, bias=False)

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as :class:`AdditiveAttention` does."""
        mask = blocked_mask("BilinearAttention", mask, 3)
        query, key = apply_linear(self.W_q, q), apply_linear(self.W_k, k)
        return attend("BilinearAttention", query, key, v, mask, scale=1.0, return_weights=need_weights)
