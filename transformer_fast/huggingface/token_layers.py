"""Layers on tokens: one function in place of the calls of the modules inside.

The door of the stack has found no hook and no code of a user inside, so a module of a known class need not be called.
Boundaries come from such a door alone. A checkpoint hands them to the layer again, so it computes the same again.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..integrations.tokens import BOUNDARIES, Boundaries
from ..layers.dropout import KINDS
from ..layers.linear import Linear
from ..layers.norm import norm_and_sum
from ..layers.prepacked import product_of
from ..layers.torch_modules import LayerNorm
from .blocks import ActivatedLinear, DropoutAddNorm, Fast, activated, unsummed


class BertLayer(Fast):
    """BERT's layer: attention, and the feed-forward network, each with dropout, sum and norm."""

    def compute(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        boundaries: Boundaries | None = kwargs.get(BOUNDARIES)
        if boundaries is None or boundaries.source is not None or self.chunk_size_feed_forward:
            return None
        parts = self._modules
        attention, inner, last = parts["attention"]._modules, parts["intermediate"], parts["output"]
        scores, first = attention["self"], attention["output"]
        if not (isinstance(first, DropoutAddNorm) and isinstance(last, DropoutAddNorm)):
            return None
        if not isinstance(inner, ActivatedLinear) or type(drop := scores._modules["dropout"]) not in KINDS:
            return None
        x, size = hidden_states[0], scores.attention_head_size
        q, k, v = (product(scores._modules[name], x).view(x.shape[0], -1, size) for name in ("query", "key", "value"))
        p = drop.p if scores.training else 0.0
        context = boundaries.among_tokens(q, k, v, boundaries.own, scale=scores.scaling, dropout_p=p)
        x = dropout_add_norm(first, context.flatten(1), x)
        linear, activation = inner._modules["dense"], inner.intermediate_act_fn
        return dropout_add_norm(last, activated(linear, activation, x), x).unsqueeze(0)


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``; a linear layer of torch or of this package is not called."""
    kind, own = type(linear), linear._parameters
    if kind is nn.Linear:
        return F.linear(x, own["weight"], own["bias"])
    return product_of(linear, x, own["weight"], own["bias"]) if kind is Linear else linear(x)


def dropout_add_norm(module: Any, x: Tensor, residual: Tensor) -> Tensor:
    """``norm(residual + dropout(dense(x)))`` of the children of a :class:`~.blocks.DropoutAddNorm`."""
    parts = module._modules
    y, drop, norm = product(parts["dense"], x), parts["dropout"], parts["LayerNorm"]
    if type(norm) is LayerNorm and type(drop) in KINDS and y.dtype == residual.dtype:
        own, p = norm._parameters, drop.p if drop.training else 0.0
        return ops.layer_norm(y, own["weight"], own["bias"], norm.eps, residual=residual, dropout_p=p)[0]
    return norm_and_sum(norm, unsummed(residual, y, drop))[0]
