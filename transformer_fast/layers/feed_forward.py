"""The position-wise feed-forward network as a drop-in module."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .. import backends
from ..ops.linear import linear as product
from .activated import activated_linear
from .dropout import apply_dropout, dropout_of_any, fused_p
from .linear import apply_linear, is_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu}
"""Activations by name: ReLU; x * sigmoid(x) (Ramachandran et al., 2017, "Searching for Activation Functions"); x times
the normal distribution's cumulative function (Hendrycks and Gimpel, 2016, "Gaussian Error Linear Units")."""


class FeedForward(nn.Module):
    """``linear_2(dropout(activation(linear_1(x))))`` (Vaswani et al., 2017, section 3.3, with ReLU).

    Args:
        d_model: width in and out.
        d_ff: inner width.
        dropout: probability, after the activation.
        activation: a name in ``ACTIVATIONS``.

    Raises:
        ValueError: for another activation.
    """

    def __init__(self, d_model: int, d_ff: int = 2048, dropout: float = 0.1, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network: x (..., d_model) -> (..., d_model)."""
        if self.activation == "relu":
            return apply_linear(self.linear_2, linear_relu_dropout(self.linear_1, x, self.dropout))
        activation = ACTIVATIONS[self.activation]
        if (inner := activated_linear(self.linear_1, x, activation)) is None:
            inner = activation(apply_linear(self.linear_1, x))
        return apply_linear(self.linear_2, apply_dropout(self.dropout, inner))


def linear_relu_dropout(linear: nn.Module, x: Tensor, drop: nn.Module | float | None) -> Tensor:
    """Compute ``drop(relu(linear(x)))``; in Triton, one pass adds the bias and applies ReLU and dropout.

    That pass makes the bias free in the forward, and saves a pass over the activations' gradient in the backward.
    Without dropout, the matrix product adds the bias, free on a GPU too, and ReLU overwrites the product. On a CPU the
    matrix product always adds the bias: adding it in the later pass was 0.77 to 1.02 times as fast
    (benchmarks/bench_feed_forward.py).

    Args:
        linear: an ``nn.Linear``; any other module is called as it is.
        x: (..., d_in).
        drop: a dropout module, a probability, or None; any other module is called as it is.
    """
    if isinstance(drop, nn.Module):
        p = fused_p(drop)
        if p is None:
            return drop(linear_relu_dropout(linear, x, None))
    else:
        p = drop or 0.0
    if p == 0.0 and (activated := activated_linear(linear, x, F.relu)) is not None:
        return activated
    if not is_linear(linear):
        return dropout_of_any(linear(x), p, relu=True)
    if p > 0.0 and linear.bias is not None and backends.resolve("dropout", x.device, x.dtype) == "triton":
        return dropout_of_any(product(x, linear.weight), p, bias=linear.bias, relu=True)
    inner = apply_linear(linear, x)
    if p == 0.0 and type(inner) is Tensor:
        return inner.relu_()  # in place, because no other code holds this tensor
    return dropout_of_any(inner, p, relu=True)
