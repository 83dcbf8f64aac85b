"""Activations by name; an activation in the pass of the linear layer before it, for layers with int8 weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.weight_layout import has_int8
from .hooks import is_plain

_OF_TRANSFORMERS = {
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
}
"""Activations of transformers, by class."""
_OF_PRODUCT = ("relu", "gelu", "gelu_tanh")
"""Activations of the op ``packed_linear``, with int8 weights."""


def activated_linear(linear: nn.Module, x: Tensor, activation: Any) -> Tensor | None:
    """Compute ``activation(linear(x))`` for a function or a module; None if that is not one pass here."""
    if not has_int8(linear) or type(x) is not Tensor or not is_plain(linear):
        return None
    if (name := name_of(activation)) not in _OF_PRODUCT:
        return None
    from ..inference.int8 import int8_product

    return int8_product(linear, x, linear.weight, linear.bias, name)


def name_of(activation: Any) -> str:
    """Name of a function or module: "relu", "gelu", "gelu_tanh" or "quick_gelu"; "" for another one."""
    if activation is F.relu or activation is torch.relu:
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if not isinstance(activation, nn.Module) or not is_plain(activation):
        return ""
    kind = type(activation)
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    name = _OF_TRANSFORMERS.get(f"{kind.__module__}.{kind.__qualname__}", "")
    return name if _calls(activation.__dict__.get("act"), name) else ""


def _calls(act: Any, name: str) -> bool:
    """Return True if the function that some activations of transformers hold is none, or PyTorch's own of this name."""
    if name == "gelu_tanh" and isinstance(act, functools.partial):
        return act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
    return act is None or (name == "gelu" and act is F.gelu)
