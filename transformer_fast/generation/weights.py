"""Copies of a model's weights in the layout that steps of few rows read fastest, for one call or longer.

The model itself is not changed, so that several threads may decode with it: `prepack` makes a copy of its modules that
shares their parameters, in which plain linear layers are those of `inference/prepacked.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..inference.prepacked import PrepackedLinear
from ..layers import DecoderLayer, EncoderLayer, FeedForward, MultiHeadAttention, PositionalEncoder, dropout
from ..layers.feed_forward import ACTIVATIONS
from ..layers.hooks import is_plain
from ..layers.linear import is_linear
from ..layers.torch_modules import Embedding
from ..models import Decoder, Encoder
from ..ops.weight_layout import AS_IT_IS, WeightLayout

DROPOUTS = (*dropout.KINDS, nn.Identity)
"""Classes without effect in evaluation mode."""
EMBEDDINGS = (nn.Embedding, Embedding)
"""Classes whose weight may be read without calling them."""
_PARENTS = (Encoder, EncoderLayer, Decoder, DecoderLayer, MultiHeadAttention, PositionalEncoder, nn.ModuleList)
"""Classes that call a child, or leave its work to a cache, so that a `PrepackedLinear` can replace it."""


class StepFeedForward:
    """`FeedForward` without dropout; ReLU, if it is the activation, is fused into the first linear layer."""

    def __init__(self, module: FeedForward, rows: int, layout: WeightLayout) -> None:
        self.activation = module.activation
        self.linear_1 = PrepackedLinear([module.linear_1], rows, layout, relu=module.activation == "relu")
        self.linear_2 = PrepackedLinear([module.linear_2], rows, layout)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the network: x (..., d_model) -> (..., d_model)."""
        inner = self.linear_1(x)
        return self.linear_2(inner if self.activation == "relu" else ACTIVATIONS[self.activation](inner))


def prepack(module: nn.Module, rows: int, layout: WeightLayout = AS_IT_IS) -> Any:
    """Copy a module of this package and its children for decoding step by step, in evaluation mode, with shared
    parameters. A module that is not plain stays as it is and is called. A module of another class stays too, except
    for a copy if it contains linear layers.

    rows: how many a step will have at most. The caller has seen to it that what the layout asks for has no
    `obstacle`.
    """
    if is_linear(module):
        return PrepackedLinear([module], rows, layout)
    if is_plain(module, FeedForward) and _is_plain_inside(module):
        return StepFeedForward(module, rows, layout)
    children: dict[str, Any] = {}
    if is_plain(module, *_PARENTS):
        children = {name: prepack(child, rows, layout) for name, child in module._modules.items() if child is not None}
    elif is_plain(module):
        children = _step_children(module, rows, layout)
    if not children and not is_plain(module, *DROPOUTS):
        return module
    clone = _shallow_copy(module)
    # Own buffers, so that a positional table that a call extends is not the model's.
    clone.__dict__.update(_modules={**module._modules, **children}, _buffers=dict(module._buffers), training=False)
    return clone


def _is_plain_inside(module: FeedForward) -> bool:
    """Return True if no part of the module must be called."""
    return is_linear(module.linear_1) and is_linear(module.linear_2) and is_plain(module.dropout, *DROPOUTS)


def _step_children(module: nn.Module, rows: int, layout: WeightLayout) -> dict[str, nn.Module]:
    """Children of a module, by name, in which linear layers are replaced; the module itself, for example an adapter,
    calls them.

    Each remains an `nn.Linear`, because the module may read its weight or its class.
    """
    children = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_linear(child):
            children[name] = clone = _shallow_copy(child)
            clone.__dict__["forward"] = PrepackedLinear([child], rows, layout)
        elif is_plain(child) and (inner := _step_children(child, rows, layout)):
            children[name] = clone = _shallow_copy(child)
            clone.__dict__["_modules"] = {**child._modules, **inner}
    return children


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy as `copy.copy` does, in a fifth of its time: the state of a module is its `__dict__`, unless its class
    defines copying."""
    kind = type(module)
    if hasattr(kind, "__copy__"):
        return copy.copy(module)
    clone = kind.__new__(kind)
    clone.__dict__.update(module.__dict__)
    return clone


def concat_linears(*linears: nn.Module, rows: int = 0) -> Callable[[Tensor], Tensor]:
    """Combine linear layers with the same input into one, with outputs side by side. Unless all are `PrepackedLinear`
    of one layout, they are called one by one. rows: as for `PrepackedLinear`."""
    steps = [linear for linear in linears if isinstance(linear, PrepackedLinear)]
    plain = [one for linear in steps for one in linear.linears]
    layouts = {step.layout for step in steps}
    if len(plain) == len(linears) and len(layouts) == 1 and len({linear.bias is None for linear in plain}) == 1:
        return PrepackedLinear(plain, rows, layouts.pop())
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
