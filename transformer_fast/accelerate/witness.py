"""Witness: a replacement for a called child during a trial, whose output depends on the arguments of the call."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import torch
from torch import Tensor, nn


class Witness(nn.Module):
    """Replacement of a module whose output is a function of every argument and of the argument's name.

    If two implementations of a layer call attention with different arguments, their outputs differ. The attention
    itself, with its masks, caches and kernels, need not run.

    Args:
        module: module to replace; its forward gives the argument names.
        returns: number of returned values. 1 is a single tensor; more are a tuple of the tensor and numbers.
    """

    def __init__(self, module: nn.Module, returns: int) -> None:
        super().__init__()
        self.signature, self.returns = inspect.signature(module.forward), returns
        for name in ("in_features", "out_features"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument is (..., d), the output too. A tensor of its shape is added by element. All others are
        factors, since a norm may follow, which would hide what is added to all elements alike."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            inner = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            values |= value if inner else {name: value}
        x = next(iter(values.values()))
        out = torch.tanh(x) + 0.5
        for name, value in sorted(values.items()):
            weight = 1.0 + zlib.crc32(name.encode()) % 997 / 997
            if isinstance(value, Tensor) and value.shape == x.shape:
                out = out + weight * value
            elif isinstance(value, Tensor):
                places = torch.linspace(1.0, 2.0, value.numel(), dtype=x.dtype) / value.numel()
                out = out * (1.0 + weight * (value.to(x.dtype).flatten() @ places))
            elif isinstance(value, bool | int | float):
                out = out * (1.0 + weight * float(value))
        return out if self.returns == 1 else (out, *(out.detach().mean() + i for i in range(1, self.returns)))
