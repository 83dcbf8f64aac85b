"""The position-wise feed-forward network as a drop-in module."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.dropout import dropout as fused_dropout
from .norm import active_dropout


class FeedForward(nn.Module):
    """``linear_2(dropout(relu(linear_1(x))))`` (Vaswani et al., 2017, section 3.3).

    Args:
        d_model: width in and out.
        d_ff: inner width.
        dropout: probability, after the ReLU.
    """

    def __init__(self, d_model: int, d_ff: int = 2048, dropout: float = 0.1) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) -> (..., d_model)."""
        return self.linear_2(fused_dropout(self.linear_1(x), active_dropout(self.dropout), relu=True))
