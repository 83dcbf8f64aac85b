"""Patterns of norms, and of sublayers that fuse dropout and residual addition with a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...layers.dropout import apply_dropout, dropout_of_any
from ...layers.hooks import TAKES_RESIDUAL
from ...layers.norm import norm_and_sum, unsummed
from ...layers.torch_modules import LayerNorm, RMSNorm
from ..made import is_as_proven
from .base import DROPOUT, Part, Pattern, children, pattern_of


class Norm(Pattern):
    """``gain * (x - mean) / (std + eps) + shift`` with the unbiased std, or LayerNorm with the same attribute names."""

    arguments = 1
    keywords = ("residual", "dropout_p")
    roles = (TAKES_RESIDUAL,)
    eps = "eps"

    def __init__(self, name: str, gain: str, shift: str, kind: str = "std") -> None:
        super().__init__(name)
        self.gain, self.shift, self.kind = gain, shift, kind
        self.parameters = frozenset((gain, shift))

    def matches(self, m: Any) -> bool:
        if not super().matches(m) or not isinstance(getattr(m, "eps", None), float):
            return False
        return getattr(m, self.gain).dim() == 1 and getattr(m, self.gain).shape == getattr(m, self.shift).shape

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, getattr(m, self.gain).shape[0]),)]

    def fused_forward(self, m: Any, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0) -> Any:
        gain, shift = getattr(m, self.gain), getattr(m, self.shift)
        return ops.layer_norm(x, gain, shift, m.eps, kind=self.kind, residual=residual, dropout_p=dropout_p)

    def own_forward(
        self, m: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], ours: dict[str, Any]
    ) -> Any:
        if ours.get("residual") is None:
            return forward(m, *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        summed = dropout_of_any(x, ours.get("dropout_p", 0.0), residual=ours["residual"])
        return forward(m, summed), summed

    def fits(self, m: Any) -> bool:
        return is_as_proven(m)  # a norm has no parts


def width_of(norm: nn.Module) -> int | None:
    """Width of a norm that can fuse the residual addition; None for other modules."""
    if isinstance(pattern := pattern_of(norm), Norm):
        return getattr(norm, pattern.gain).shape[0]
    swapped = type(norm) in (LayerNorm, RMSNorm)
    return norm.normalized_shape[0] if swapped and len(norm.normalized_shape) == 1 else None


NORM = Part(lambda module: width_of(module) is not None, fused=True)


class Sublayer(Pattern):
    """``x + dropout(sublayer(norm(x)))``."""

    parts = children(norm=NORM, dropout=DROPOUT)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, width_of(m.norm)), lambda x: torch.tanh(x) + 0.5)]

    def fused_forward(self, m: Any, x: Tensor, sublayer: Any) -> Tensor:
        return apply_dropout(m.dropout, sublayer(m.norm(x)), residual=x)


class PostNormSublayer(Sublayer):
    """``norm(x + dropout(sublayer(x)))``."""

    def fused_forward(self, m: Any, x: Tensor, sublayer: Any) -> Tensor:
        return norm_and_sum(m.norm, unsummed(x, sublayer(x), m.dropout))[0]


class AddNorm(Pattern):
    """``ln(x + dropout(y))``."""

    parts = children(dropout=DROPOUT, ln=NORM)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, width_of(m.ln)), torch.randn(2, 5, width_of(m.ln)))]

    def fused_forward(self, m: Any, x: Tensor, y: Tensor) -> Tensor:
        return norm_and_sum(m.ln, unsummed(x, y, m.dropout))[0]


PATTERNS = (
    Norm("Norm", "alpha", "bias"),
    Norm("BiasedNorm", "alpha", "bias", "layer"),
    Norm("AnnotatedNorm", "a_2", "b_2"),
    SUBLAYER := Sublayer(),
    PostNormSublayer(),
    AddNorm(),
)
KNOWS = (
    (
        "norm: `alpha`, `bias` or `a_2`, `b_2`, with the unbiased deviation or as LayerNorm",
        "the classic code, The Annotated Transformer",
    ),
    (
        "sublayer: `norm`, `dropout`, pre-norm and post-norm; `dropout`, `ln`",
        "The Annotated Transformer; d2l",
    ),
)
