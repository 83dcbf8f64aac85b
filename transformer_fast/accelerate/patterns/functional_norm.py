"""Patterns of LayerNorm around ``F.layer_norm`` or written by hand, with or without a shift, as in nanoGPT and
x-transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .base import parameters_of
from .norm import Norm
from .rms_norm import EPSILONS

NAMES = (("weight", "bias"), ("gamma", "beta"), ("g", "b"))
WRITTEN = (1e-5, 1e-6, 1e-8, 1e-12)
"""Default eps of modules without an attribute for it."""


class FunctionalNorm(Norm):
    """``gain * (x - mean) / sqrt(var + eps) + shift``; the shift may be missing or a buffer. ``eps`` is the name of an
    attribute or a number."""

    def __init__(self, gain: str, shift: str, eps: str | float) -> None:
        super().__init__(f"LayerNorm of {gain}, {shift} and {eps}", gain, shift, "layer")
        self.given = eps

    def matches(self, m: Any) -> bool:
        names = {name for name, parameter in m._parameters.items() if parameter is not None}
        if len(parameters_of(type(m)) or ()) != self.arguments:
            return False
        if m._modules or not {self.gain} <= names <= {self.gain, self.shift}:
            return False
        named = [name for name in EPSILONS if isinstance(getattr(m, name, None), float)]
        if named[:1] != [self.given] if named else isinstance(self.given, str):
            return False
        gain, shift = self._weights(m)
        return gain.dim() == 1 and (shift is None or shift.shape == gain.shape)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        """Test rows of ordinary size, and rows as small as eps, whose results depend on eps."""
        rows = torch.randn(2, 5, self._weights(m)[0].shape[0])
        return (rows,), (rows * self._eps(m) ** 0.5,)

    def fused_forward(self, m: Any, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0) -> Any:
        gain, shift = self._weights(m)
        normed = x if residual is None else residual
        cast = normed.is_cuda and torch.is_autocast_enabled("cuda")  # to float32
        if cast or normed.dtype != gain.dtype or normed.shape[-1:] != gain.shape:  # left to its own code
            return None
        return ops.layer_norm(x, gain, shift, self._eps(m), residual=residual, dropout_p=dropout_p)

    def _weights(self, m: Any) -> tuple[Tensor, Tensor | None]:
        return getattr(m, self.gain), getattr(m, self.shift, None)

    def _eps(self, m: Any) -> float:
        return getattr(m, self.given) if isinstance(self.given, str) else self.given


PATTERNS = tuple(FunctionalNorm(*names, eps) for names in NAMES for eps in (*EPSILONS, *WRITTEN))
KNOWS = (
    (
        "LayerNorm around `F.layer_norm` or by hand: `weight`, `bias`; `gamma`, `beta`; `g`, `b`; or without a shift",
        "nanoGPT, x-transformers",
    ),
)
