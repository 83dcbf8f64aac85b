"""Modules that torch.jit.script compiles by their annotations, which must be no strings: no future import here."""

from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn


class Typed(nn.Module):
    """Module whose annotations TorchScript needs: a constant, and a tensor that may be None."""

    size: Final[int]
    shift: Tensor | None

    def __init__(self, shift: Tensor | None) -> None:
        super().__init__()
        self.size, self.shift = 32, shift

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x)
        shift = self.shift
        if shift is not None:  # TorchScript refines local variables only
            y = y + shift
        return F.dropout(y.view(-1, self.size), 0.5, self.training)


class Holds(nn.Module):
    """Module with the function in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, 0.5, self.training)
