"""Patterns of hand-written RMSNorm, ``x * rsqrt(mean(x * x) + eps) * gain``, as in Llama and T5.

Most hand-written versions compute in float32 and round before the product with the gain. The fused op rounds once, at
the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .norm import Norm

GAINS = ("weight", "scale", "gain", "gamma", "g", "alpha")
EPSILONS = ("eps", "variance_epsilon", "epsilon")


class RmsNorm(Norm):
    """``gain * x / sqrt(mean(x * x) + eps)``, with one pair of attribute names for gain and eps."""

    def __init__(self, gain: str, eps: str) -> None:
        super().__init__(f"RMSNorm of {gain} and {eps}", gain, "", "rms")
        self.eps, self.parameters = eps, frozenset((gain,))

    def matches(self, m: Any) -> bool:
        if not isinstance(getattr(m, self.eps, None), float) or not super(Norm, self).matches(m):
            return False
        return getattr(m, self.gain).dim() == 1

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        """Test rows of ordinary size, and rows as small as eps, whose results show where eps is added."""
        rows = torch.randn(2, 5, getattr(m, self.gain).shape[0])
        return (rows,), (rows * getattr(m, self.eps) ** 0.5,)

    def fused_forward(self, m: Any, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0) -> Any:
        gain = getattr(m, self.gain)
        if (x if residual is None else residual).dtype != gain.dtype:  # authors' result dtypes differ
            return None
        return ops.layer_norm(x, gain, None, getattr(m, self.eps), kind="rms", residual=residual, dropout_p=dropout_p)


PATTERNS = tuple(RmsNorm(gain, eps) for gain in GAINS for eps in EPSILONS)
KNOWS = (
    (
        "RMSNorm: a `weight`, `scale`, `gain`, `gamma`, `g` or `alpha`, and an `eps`, `variance_epsilon` or `epsilon`",
        "Llama, T5, and others of the same formula",
    ),
)
