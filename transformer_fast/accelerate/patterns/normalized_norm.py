"""Pattern of RMSNorm by ``F.normalize``: ``normalize(x) * sqrt(d) * gain``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .norm import Norm
from .rms_norm import GAINS, RmsNorm

SMALLEST = 1e-12
"""The least length by which ``F.normalize`` divides."""


class NormalizedNorm(RmsNorm):
    """``normalize(x) * sqrt(d) * gain``: RMSNorm whose eps only matters for a row of zeros."""

    def __init__(self, gain: str) -> None:
        Norm.__init__(self, f"RMSNorm of {gain}, by normalize", gain, "", "rms")
        self.parameters = frozenset((gain,))

    def matches(self, m: Any) -> bool:
        return not m._modules and self._has_gain(m)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        """Test rows of several sizes, all far from zeros."""
        rows = torch.randn(2, 5, getattr(m, self.gain).shape[0])
        return (rows,), (rows * 1e-4,)

    def epsilon(self, m: Any) -> float:
        return SMALLEST**2 / getattr(m, self.gain).shape[0]


PATTERNS = tuple(NormalizedNorm(gain) for gain in GAINS)
KNOWS = (("RMSNorm by `F.normalize`, times sqrt(d) and a gain", "x-transformers"),)
