"""The linear layer as a drop-in module, and a plain ``nn.Linear`` on the same op."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.linear import linear
from .by_torch import by_torch
from .hooks import is_plain


class Linear(nn.Linear):
    """``nn.Linear`` by the faster of PyTorch's two libraries (:func:`transformer_fast.ops.linear`)."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.linear(input, self.weight, self.bias)
        else:  # torch.jit.script compiles what follows an if, but not this
            return self._computed(input)

    def _computed(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor:  # of other weights the op is F.linear itself
            return by_torch(nn.Linear, self, input)
        return linear(input, self.weight, self.bias)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a module is ``x weight^T + bias`` and nothing is missed where it is not called."""
    return is_plain(module, nn.Linear, Linear)


def apply_in_order(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``; the linear layers of an ``nn.Sequential`` by our op."""
    if not is_plain(module, nn.Sequential):
        return module(x)
    for child in module:
        x = apply_linear(child, x)
    return x


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``; an ``nn.Linear`` by our op. Another module, such as a quantised one, is called as it is."""
    return linear(x, module.weight, module.bias) if is_linear(module) else module(x)
