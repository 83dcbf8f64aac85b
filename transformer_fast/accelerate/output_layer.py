"""The linear layer whose output is logits, and which of a model's layers that is."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.hooks import is_plain
from ..layers.linear import Linear
from ..tracing import is_traced
from . import lazy_logits

NAME = "fused loss"

WORTH_IT = 2**20
"""Fewest logits of a call that are left out."""

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class OutputLayer(Linear):
    """``nn.Linear`` whose output, in training on a CPU, is not made where only ``F.cross_entropy`` reads it."""

    def _get_name(self) -> str:
        return "Linear"  # what a model prints stays

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in training a :class:`.lazy_logits.LazyLogits` where it serves."""
        if torch.compiler.is_compiling() or is_traced() or not self.training or not torch.is_grad_enabled():
            return super().forward(input)
        if not self._leaves_out(input):
            return super().forward(input)
        return lazy_logits.linear(input, self.weight, self.bias)

    def _leaves_out(self, x: Any) -> bool:
        weight, bias = self.weight, self.bias
        return (
            type(x) is Tensor
            and x.dim() >= 2
            and x.numel() // max(1, x.shape[-1]) * self.out_features >= WORTH_IT
            and all(
                type(t) in (Tensor, nn.Parameter)
                and t.dtype == x.dtype
                and t.device.type == "cpu"
                and t.layout is torch.strided
                and not t.is_inference()
                for t in (x, weight, bias)
                if t is not None
            )
            and x.dtype in _FLOATS
            and x.shape[-1] == weight.shape[1]
            and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
            and is_plain(self)
            and lazy_logits.is_served()
        )


def output_layers(model: nn.Module) -> set[int]:
    """The output layers among a model's modules, by id.

    They are the linear layer that ``get_output_embeddings()`` of a model of transformers names, and those that are as
    large as one of the model's embeddings, in a module whose code mentions the cross entropy.
    """
    modules = list(model.modules())
    tables = {tuple(m.weight.shape) for m in modules if isinstance(m, nn.Embedding)}
    named = [head for m in modules if (head := _named(m)) is not None]
    holders = (m for m in modules if _mentions_loss(type(m)))
    named += [m for holder in holders for m in holder.children() if _is_linear(m) and tuple(m.weight.shape) in tables]
    return {id(head) for head in named if _is_linear(head) and head.weight.device.type == "cpu"}


def _is_linear(module: Any) -> bool:
    lazy = nn.parameter.UninitializedParameter
    return type(module) is nn.Linear and not isinstance(module.weight, lazy) and module.weight.dtype in _FLOATS


def _named(module: nn.Module) -> Any:
    """What a model says its output layer is."""
    get = getattr(type(module), "get_output_embeddings", None)
    try:
        return None if get is None else get(module)
    except Exception:  # models without one say so in several ways
        return None


def _mentions_loss(kind: type[nn.Module]) -> bool:
    """Whether the code of a class has the name of the cross entropy, function or module."""
    if kind.__module__.partition(".")[0] in ("torch", "transformer_fast"):
        return False
    functions = (value for base in kind.__mro__ for value in vars(base).values() if issubclass(base, nn.Module))
    names = (f.__code__.co_names for f in functions if isinstance(f, types.FunctionType))
    return any("cross_entropy" in found or "CrossEntropyLoss" in found for found in names)
