"""``OutputLayer``, the linear layer that makes logits, and the search for it in a model."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.hooks import is_plain
from ..layers.linear import Linear
from . import lazy_logits

NAME = "fused loss"

WORTH_IT = 2**20
"""Minimum number of logits per call that are skipped."""

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class OutputLayer(Linear):
    """``nn.Linear`` that skips its output in training on a CPU if only ``F.cross_entropy`` reads the output."""

    def _get_name(self) -> str:
        return "Linear"  # keep the printed class name

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: (..., in_features) -> (..., out_features), in training a :class:`.lazy_logits.LazyLogits` if
        possible."""
        if torch.compiler.is_compiling() or not self.training or not torch.is_grad_enabled():
            return super().forward(input)
        if not self._skips_logits(input):
            return super().forward(input)
        _used.add(self)
        return lazy_logits.linear(input, self.weight, self.bias)

    def _skips_logits(self, x: Any) -> bool:
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
            and lazy_logits.takes_fused_ops()
        )


_used: weakref.WeakSet[OutputLayer] = weakref.WeakSet()
"""Layers that have made lazy logits: those of copies and of loaded models too, which no report knows."""


class Watching:
    """The hook on the optimizers, a change of ``accelerate``. The first lazy logits register it."""

    def undo(self) -> None:
        """Remove the hook unless an output layer is left that has made lazy logits."""
        if not any(isinstance(layer, OutputLayer) for layer in list(_used)):
            lazy_logits.leave_optimizers()


def output_layers(model: nn.Module) -> set[int]:
    """Output layers among a model's modules, by id.

    For a model of transformers, the linear layer of ``get_output_embeddings()``. Otherwise, linear layers with the
    shape of an embedding that has more rows than columns.
    """
    modules: list[Any] = list(model.modules())
    found = []
    for module in modules:
        with contextlib.suppress(Exception):  # models without an output layer raise different errors
            get = getattr(type(module), "get_output_embeddings", None)
            if get is not None and (head := get(module)) is not None:
                found.append(head)
    if not found:
        tables = {tuple(m.weight.shape) for m in modules if isinstance(m, nn.Embedding)}
        linears = (m for m in modules if _is_linear(m) and m.out_features > m.in_features)
        found = [m for m in linears if tuple(m.weight.shape) in tables]
    return {id(head) for head in found if _is_linear(head) and head.weight.device.type == "cpu"}


def _is_linear(module: Any) -> bool:
    if type(module) not in (nn.Linear, Linear, OutputLayer):
        return False
    return not isinstance(module.weight, nn.parameter.UninitializedParameter) and module.weight.dtype in _FLOATS
