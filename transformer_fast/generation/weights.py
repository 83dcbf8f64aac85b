"""A model's weights in the form in which steps of few rows read them fastest, for the time of one call.

Nothing of the model itself is changed, so that several threads may decode with one model: `prepared` is a copy of its
modules that shares their parameters, in which plain linear layers are `StepLinear`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 512
"""Rows from which PyTorch's own product is as fast."""


class StepLinear(nn.Module):
    """A linear layer for few rows at a time, in fp32 on a CPU. One row is a product of matrix and vector, which reads
    the weight twice as fast as that of two matrices. From two rows on it multiplies with a copy of the weight in the
    blocked layout of oneDNN, made when it is first needed: PyTorch's own product rearranges the weight in every call,
    which for few rows costs more than the product. Everything else is PyTorch's.

    weight: (out, in). bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._blocked: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        rows = x.numel() // x.shape[-1]
        if not 0 < rows <= FEW or not _is_served(self.weight, x):
            return F.linear(x, self.weight, self.bias)
        if rows == 1:
            row = x.reshape(-1)
            out = self.weight.mv(row) if self.bias is None else torch.addmv(self.bias, self.weight, row)
            return out.view(*x.shape[:-1], -1)
        if self._blocked is None:
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)
        return torch.ops.mkldnn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")


def _is_served(weight: Tensor, x: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a module is exactly a linear layer: no subclass, no hook."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module) is nn.Linear and not any(getattr(module, name, None) for name in hooks)


def prepared(module: nn.Module) -> nn.Module:
    """A copy of a module and all below it, with the same parameters, in evaluation mode, for decoding step by step."""
    if is_plain(module):
        return StepLinear(module.weight, module.bias)
    clone = copy.copy(module)
    clone.__dict__["_modules"] = {name: prepared(child) for name, child in module._modules.items() if child is not None}
    clone.training = False
    return clone


def joined(*linears: nn.Module, once: bool = False) -> Callable[[Tensor], Tensor]:
    """Several linear layers of one input as one, their outputs side by side; where one is not a plain linear layer,
    all are called one by one. once: for a single call, which a copy in another layout would not repay."""
    same = all(isinstance(linear, StepLinear) for linear in linears)
    if not same or len({linear.bias is None for linear in linears}) > 1:
        return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    weight = torch.cat([linear.weight for linear in linears])
    return (lambda x: F.linear(x, weight, bias)) if once else StepLinear(weight, bias)
