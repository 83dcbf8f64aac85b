"""Pattern of linear layers whose weight is stored transposed, (in, out)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...layers.prepacked import product_of
from ...ops.linear import is_faster
from .base import Pattern


class TransposedLinear(Pattern):
    """``x weight + bias`` for a weight (in, out), such as GPT-2's ``Conv1D``; swapped only where our product is
    faster."""

    parameters = frozenset(("weight", "bias"))

    def matches(self, m: Any) -> bool:
        if not super().matches(m) or m.weight.dim() != 2 or m.bias.shape != m.weight.shape[1:]:
            return False
        return is_faster(m.weight.t())

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, m.weight.shape[0]),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor:
        return product_of(m, x, m.weight.t(), m.bias)


PATTERNS = (TransposedLinear(),)
KNOWS = (
    (
        "linear layer with a weight (in, out), where oneDNN is the faster library",
        "GPT-2's `Conv1D`",
    ),
)
