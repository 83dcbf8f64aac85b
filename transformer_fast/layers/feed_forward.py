"""The position-wise feed-forward network as a drop-in module."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .. import backends
from ..ops.dropout import dropout as fused_dropout
from ..tracing import is_traced
from .hooks import is_plain
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
        return self.linear_2(linear_relu_dropout(self.linear_1, x, active_dropout(self.dropout)))


def linear_relu_dropout(linear: nn.Module, x: Tensor, p: float) -> Tensor:
    """``dropout(relu(linear(x)))``; in Triton with the bias in the same pass as ReLU and dropout.

    So the bias costs nothing forward, and its gradient no further pass over the gradient of all activations. Without
    dropout it is left to the matrix product, which on a GPU adds it for nothing too, and ReLU overwrites the product.
    On a CPU it is left there always: in the pass after it was 0.77 to 1.02 times as fast
    (benchmarks/bench_feed_forward.py).

    Args:
        linear: an ``nn.Linear``; any other module is called as it is.
        x: (..., d_in).
        p: dropout probability, 0 outside training.
    """
    if not is_plain(linear, nn.Linear):
        return fused_dropout(linear(x), p, relu=True)
    if p > 0.0 and linear.bias is not None and backends.resolve("dropout", x.device, x.dtype) == "triton":
        return fused_dropout(F.linear(x, linear.weight), p, bias=linear.bias, relu=True)
    inner = linear(x)
    if p == 0.0 and type(inner) is Tensor and not is_traced():
        return inner.relu_()  # in place, because no one else has this tensor
    return fused_dropout(inner, p, relu=True)
