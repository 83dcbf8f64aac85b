"""Attention modules; each stores the tensors from which its weights are computed on request."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...layers.attention import attend as attend_with
from ...layers.hooks import SCALED_DOT_PRODUCT, has_role, in_role
from ...layers.linear import apply_linear
from ...masks import AttentionMask
from ...ops.attention import attention
from ..common import (
    LAST_WEIGHTS,
    LastWeights,
    additive_scores,
    attend_by_scores,
    head_width,
    leave_weights,
    merge_heads,
    project_heads,
)
from .sequences import ValidLens, lengths_mask, masked_softmax


class _Attention(nn.Module):
    """Attention with dropout on its weights. ``attention_weights`` holds the weights of the last call, None before a
    call."""

    attention_weights = LastWeights()

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.attention_weights = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), LAST_WEIGHTS: None}


@in_role(SCALED_DOT_PRODUCT)
class DotProductAttention(_Attention):
    """Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1).

    ``attention_weights`` (B * heads, Lq, Lk) has the weights of the last call, before dropout and without gradient,
    computed when it is read; None before a call.

    Args:
        dropout: probability, on the attention weights.
    """

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """Attend: queries (B, Lq, d), keys (B, Lk, d), values (B, Lk, dv), valid_lens (B,) or (B, Lq) -> (B, Lq,
        dv)."""
        _three_axes("DotProductAttention", queries, keys, values)
        mask = lengths_mask("DotProductAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        return attend(self, queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), mask).squeeze(1)


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> Tensor:
    """Compute :class:`DotProductAttention` per head: q (B, H, Lq, d), k and v (B, H, Lk, d) -> (B, H, Lq, d)."""
    leave_weights(module, lambda q, k: attention(q, k, k, mask, return_weights=True)[1].flatten(0, 1), q, k)
    return attend_with(module.dropout, q, k, v, mask)


class AdditiveAttention(_Attention):
    """Attention with the score ``w_v^T tanh(W_q q + W_k k)`` (Bahdanau, Cho and Bengio, 2015, appendix A.1.2).

    ``attention_weights`` (B, Lq, Lk) as for :class:`DotProductAttention`.

    Args:
        num_hiddens: width of the hidden layer.
        dropout: probability, on the attention weights.
        query_size, key_size: widths; taken from the first call where they are not given (``nn.LazyLinear``).
    """

    def __init__(
        self, num_hiddens: int, dropout: float, *, query_size: int | None = None, key_size: int | None = None
    ) -> None:
        super().__init__(dropout)
        self.W_k = linear(key_size, num_hiddens, bias=False)
        self.W_q = linear(query_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """queries (B, Lq, query_size), keys (B, Lk, key_size), values (B, Lk, dv) -> (B, Lq, dv)."""
        _three_axes("AdditiveAttention", queries, keys, values)
        mask = lengths_mask("AdditiveAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        scores = additive_scores(apply_linear(self.W_q, queries), apply_linear(self.W_k, keys), self.w_v)
        leave_weights(self, lambda scores: masked_softmax(scores, mask), scores)
        return attend_by_scores(scores, values, mask, dropout=self.dropout)[0]


MLPAttention = AdditiveAttention
"""Another name of :class:`AdditiveAttention`."""


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Args:
        num_hiddens: width of the projections and of the output.
        num_heads: number of heads; must divide ``num_hiddens``.
        dropout: probability, on the attention weights.
        bias: True adds a bias to the four projections.
        query_size, key_size, value_size: widths of the inputs; taken from the first call where they are not given
            (``nn.LazyLinear``).
    """

    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float,
        bias: bool = False,
        *,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
    ) -> None:
        super().__init__()
        head_width(self, num_hiddens, num_heads)
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = linear(query_size, num_hiddens, bias)
        self.W_k = linear(key_size, num_hiddens, bias)
        self.W_v = linear(value_size, num_hiddens, bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """queries (B, Lq, query_size), keys and values (B, Lk, ...), valid_lens (B,) or (B, Lq) ->
        (B, Lq, num_hiddens). ``attention.attention_weights`` then has the weights (B * num_heads, Lq, Lk)."""
        _three_axes("MultiHeadAttention", queries, keys, values)
        mask = lengths_mask("MultiHeadAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        q, k, v = project_heads((self.W_q, self.W_k, self.W_v), (queries, keys, values), self.num_heads)
        if has_role(self.attention, SCALED_DOT_PRODUCT):
            return apply_linear(self.W_o, merge_heads(attend(self.attention, q, k, v, mask)))
        if isinstance(valid_lens, Tensor):
            valid_lens = valid_lens.repeat_interleave(self.num_heads, dim=0)
        heads = self.attention(*(t.flatten(0, 1) for t in (q, k, v)), valid_lens)
        return apply_linear(self.W_o, merge_heads(heads.unflatten(0, (-1, self.num_heads))))


def linear(size: int | None, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.LazyLinear(outputs, bias=bias) if size is None else nn.Linear(size, outputs, bias=bias)


def _three_axes(where: str, *inputs: Tensor) -> None:
    if any(t.dim() != 3 for t in inputs):
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        raise ValueError(f"{where}: queries, keys and values must be (batch, length, width), got {shapes}")
