"""The linear layer as a drop-in module, and functions that run a plain ``nn.Linear`` on the same op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

from ..ops import eager
from ..ops.linear import linear
from ..ops.weight_layout import FREED, LAYOUT, has_int8
from .by_torch import by_torch
from .hooks import is_plain
from .products import operand_of, product_of


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


def apply_linears(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute ``module(x)`` for each module and its input; linear layers of one input in a row run on one op."""
    results: list[Tensor] = []
    while len(results) < len(inputs):
        start = end = len(results)
        while end < len(inputs) and inputs[end] is inputs[start]:
            end += 1
        results += _of_one_input(modules[start:end], inputs[start])
    return results


def parts_of_product(module: nn.Module, x: Tensor) -> tuple[Any, ...] | None:
    """Weight, bias and operand (:func:`~.products.operand_of`) of a linear layer in evaluation; None for any other
    module, which must be called."""
    if not is_plain(module, nn.Linear, Linear) or module.training:
        return None
    if (weight := module._parameters["weight"]) is None:
        return None
    return weight, module._parameters["bias"], operand_of(module, x, weight)


def evaluated_linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor] | None:
    """Compute ``module(x)`` for linear layers in one call of the extension, in evaluation on a CPU.

    Args:
        modules: linear layers with one input.
        x: (..., in).

    Returns:
        (..., out) for each layer. None for a call that the modules must compute: in training mode, if a gradient is
        needed, in compiled calls, under autocast, for tensors that are not plain ones on a CPU, and for
        modules with hooks.
    """
    direct = eager.native()
    if direct is None or not x.is_cpu:
        return None
    parts = [parts_of_product(module, x) for module in modules]
    return None if None in parts else direct.evaluated_linears(x, tuple(parts))


def _of_one_input(modules: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    linears = [module for module in modules if is_linear(module)]
    if len(linears) != len(modules) or any(LAYOUT in module.__dict__ for module in linears):
        found = evaluated_linears(modules, x) if len(modules) > 1 else None
        return found or [apply_linear(module, x) for module in modules]
    return [linear(x, module.weight, module.bias) for module in linears]
