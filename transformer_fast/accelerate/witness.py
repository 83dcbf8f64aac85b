"""A module that stands for another one while a pattern is tried out, and tells with which arguments it was called."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import torch
from torch import Tensor, nn


class Witness(nn.Module):
    """Answers the calls of another module: its output is a function of every argument and of the argument's name.

    So where two ways to compute a layer call its attention with other arguments, their outputs differ; and attention
    itself need not run, with the masks, caches and kernels that it may be written for.

    Args:
        module: the one it stands for; its forward says how the arguments are called.
        returns: how many values it returns; 1 is a tensor alone, more are a tuple with a number for each of the others.
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
