"""The linear layer as a drop-in module, and functions that run a plain ``nn.Linear`` on the same op."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn

from ..ops.weight_layout import FREED, has_int8
from .by_torch import by_torch
from .hooks import is_plain
from .products import product_of


class Linear(nn.Linear):
    """``nn.Linear`` by the faster of PyTorch's two libraries (:func:`transformer_fast.ops.linear`)."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: x (..., in_features) -> (..., out_features)."""
        if type(input) is not Tensor and not has_int8(self):  # for other weights the op is F.linear itself
            return by_torch(nn.Linear, self, input)
        return product_of(self, input, self.weight, self.bias)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a module is a plain ``x weight^T + bias``, which need not be called, and whose weight may be
    read."""
    return is_plain(module, nn.Linear, Linear) and FREED not in module.__dict__


def apply_in_order(module: nn.Module, x: Tensor) -> Tensor:
    """Compute ``module(x)``; the linear layers of an ``nn.Sequential`` run on our op."""
    if not is_plain(module, nn.Sequential):
        return module(x)
    for child in module:
        x = apply_linear(child, x)
    return x


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """Compute ``module(x)``; an ``nn.Linear`` runs on our op. Any other module, such as a quantised layer, is
    called."""
    return product_of(module, x, module.weight, module.bias) if is_linear(module) else module(x)
