"""Whole layers as one function, in place of the calls of the modules inside.

A layer looks at each call if a module inside has a hook or code of a user, and then runs the code of transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..layers.dropout import KINDS
from ..layers.linear import Linear
from ..layers.norm import norm_and_sum
from ..layers.products import product_of
from ..layers.torch_modules import LayerNorm
from .attention import weights_are_captured
from .blocks import ActivatedLinear, DropoutAddNorm, Fast, activated, unsummed
from .inside import is_plain_inside
from .tokens import BOUNDARIES, Boundaries


class BertLayer(Fast):
    """BERT's layer: attention, and the feed-forward network, each with dropout, sum and norm."""

    methods = ("feed_forward_chunk",)

    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *args: Any,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        boundaries: Boundaries | None = kwargs.get(BOUNDARIES)
        others = (encoder_hidden_states, cache, past_key_values, *args)
        if any(value is not None for value in others) or self.chunk_size_feed_forward:
            return None
        if not (is_plain_inside(self) if boundaries is None else boundaries.is_plain):
            return None
        if boundaries is None and (torch.compiler.is_compiling() or weights_are_captured()):
            return None
        parts = self._modules
        attention, inner, last = parts["attention"]._modules, parts["intermediate"], parts["output"]
        scores, first = attention["self"], attention["output"]
        if not (isinstance(first, DropoutAddNorm) and isinstance(last, DropoutAddNorm)):
            return None
        if not isinstance(inner, ActivatedLinear) or type(drop := scores._modules["dropout"]) not in KINDS:
            return None
        x = hidden_states if boundaries is None else hidden_states[0]
        heads, p = (*x.shape[:-1], -1, scores.attention_head_size), drop.p if scores.training else 0.0
        q, k, v = (product(scores._modules[name], x).view(heads) for name in ("query", "key", "value"))
        if boundaries is not None:
            out = boundaries.among_tokens(q, k, v, boundaries.own, scale=scores.scaling, dropout_p=p)
        else:
            attend = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            function = attend[scores.config._attn_implementation]
            out, _ = function(scores, q, k, v, attention_mask, dropout=p, scaling=scores.scaling, **kwargs)
        x = dropout_add_norm(first, out.flatten(-2), x)
        x = dropout_add_norm(last, activated(inner._modules["dense"], inner.intermediate_act_fn, x), x)
        return x if boundaries is None else x.unsqueeze(0)


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``; a linear layer of torch or of this package is not called."""
    kind, own = type(linear), linear._parameters
    if len(own) < 2:  # weights that are attributes, as those of replicas
        return linear(x)
    if kind is nn.Linear:
        return F.linear(x, own["weight"], own["bias"])
    return product_of(linear, x, own["weight"], own["bias"]) if kind is Linear else linear(x)


def dropout_add_norm(module: Any, x: Tensor, residual: Tensor) -> Tensor:
    """``norm(residual + dropout(dense(x)))`` of the children of a :class:`~.blocks.DropoutAddNorm`."""
    parts = module._modules
    y, drop, norm = product(parts["dense"], x), parts["dropout"], parts["LayerNorm"]
    own = norm._parameters
    if type(norm) is LayerNorm and type(drop) in KINDS and own.get("weight") is not None:
        p = drop.p if drop.training else 0.0
        if y.dtype != residual.dtype:  # as under autocast: here, so that the norm needs no dispatcher
            wide = torch.promote_types(y.dtype, residual.dtype)
            y, residual = y.to(wide), residual.to(wide)
        return ops.layer_norm(y, own["weight"], own["bias"], norm.eps, residual=residual, dropout_p=p)[0]
    return norm_and_sum(norm, unsummed(residual, y, drop))[0]
