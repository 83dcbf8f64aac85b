"""Patterns of BERT's layer in Hugging Face transformers, and of its relatives, such as RoBERTa and ELECTRA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...integrations.names import is_ours
from ...layers.evaluated_block import block_end
from ...layers.linear import evaluated_linears
from ...layers.norm import norm_and_sum
from .base import ANY, DROPOUT, LINEAR, Part, Pattern, children, pattern_of, swapped_by
from .blocks import ATTENTION, activated, block_calls, in_chunks, is_off, unsummed
from .norm import NORM


class DenseNorm(Pattern):
    """``norm(dropout(dense(x)) + residual)``."""

    def __init__(self, norm: str) -> None:
        super().__init__(f"dense, dropout, {norm}")
        self.norm, self.parts = norm, {"dense": LINEAR, "dropout": DROPOUT, norm: NORM}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, m.dense.in_features), torch.randn(2, 5, m.dense.out_features))]

    def fused_forward(self, m: Any, x: Tensor, residual: Tensor) -> Tensor:
        return norm_and_sum(getattr(m, self.norm), unsummed(residual, m.dense(x), m.dropout))[0]


class Intermediate(Pattern):
    """``intermediate_act_fn(dense(x))``."""

    title = "BERT layer"
    parts = children(dense=LINEAR, intermediate_act_fn=ANY)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, m.dense.in_features),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor:
        return activated(m.dense, m.intermediate_act_fn, x, 0.0)


class SelfAttention(Pattern):
    """``query``, ``key`` and ``value`` of one input, between them the attention of transformers' interface."""

    title = "BERT layer"
    named = True
    parts = children(query=LINEAR, key=LINEAR, value=LINEAR, dropout=DROPOUT)

    def matches(self, m: Any) -> bool:
        return super().matches(m) and is_ours(m.config._attn_implementation)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return block_calls(m.query.in_features)

    def fused_forward(
        self, m: Any, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Any, **others: Any
    ) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = m.config._attn_implementation
        if past_key_values is not None or not is_ours(name):
            return None
        linears = (m.query, m.key, m.value)
        states = evaluated_linears(linears, hidden_states) or [linear(hidden_states) for linear in linears]
        shape = (*hidden_states.shape[:-1], -1, m.attention_head_size)
        heads = (state.view(shape).transpose(1, 2) for state in states)
        p = m.dropout.p if m.training else 0.0
        out, weights = ALL_ATTENTION_FUNCTIONS[name](m, *heads, attention_mask, dropout=p, scaling=m.scaling, **others)
        return out.reshape(*hidden_states.shape[:-1], -1), weights


class AttentionOutput(Pattern):
    """``self`` attention and ``output``, which is :class:`DenseNorm`."""

    title = "BERT layer"
    named = True
    parts = children(self=ATTENTION, output=Part(swapped_by(DenseNorm), fused=True))
    passed_on = ("attention_mask", "encoder_hidden_states", "past_key_values")

    def matches(self, m: Any) -> bool:
        return super().matches(m) and not m.is_cross_attention

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        names = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values")
        return block_calls(m.output.dense.out_features, *names)

    def fused_forward(self, m: Any, hidden_states: Tensor, encoder_attention_mask: Any, **others: Any) -> Any:
        context, weights = m.self(hidden_states, **others)
        return pattern_of(m.output).fused_forward(m.output, context, hidden_states), weights


class BertLayer(Pattern):
    """BERT's layer: :class:`AttentionOutput`, ``intermediate``, and ``output``, which is :class:`DenseNorm`."""

    title = "BERT layer"
    named = True
    parts = children(
        attention=Part(swapped_by(AttentionOutput), fused=True),
        intermediate=Part(swapped_by(Intermediate), fused=True),
        output=Part(swapped_by(DenseNorm), fused=True),
    )
    passed_on = ("attention_mask", "past_key_values")

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return block_calls(m.output.dense.out_features, "past_key_values")

    def fused_forward(
        self, m: Any, hidden_states: Tensor, encoder_hidden_states: Any, encoder_attention_mask: Any, **others: Any
    ) -> Tensor | None:
        if encoder_hidden_states is not None or in_chunks(m):
            return None
        end, out = m.attention.output, m.output
        context = m.attention.self(hidden_states, encoder_hidden_states=None, **others)[0]
        if is_off(end.dropout) and is_off(out.dropout):
            network = (m.intermediate.dense, m.intermediate.intermediate_act_fn, out.dense)
            norms = (getattr(part, pattern_of(part).norm) for part in (end, out))
            found = block_end(hidden_states, context, end.dense, next(norms), *network, next(norms), norm_first=False)
            if found is not None:
                return found
        attended = pattern_of(end).fused_forward(end, context, hidden_states)
        inner = pattern_of(m.intermediate).fused_forward(m.intermediate, attended)
        return pattern_of(out).fused_forward(out, inner, attended)


PATTERNS = (
    *(DenseNorm(name) for name in ("LayerNorm", "layer_norm", "norm")),
    Intermediate("dense, activation"),
    SelfAttention("query, key, value"),
    AttentionOutput("attention, dense, norm"),
    BertLayer("BertLayer"),
)
KNOWS = (("layer of `attention`, `intermediate` and `output`", "BERT and its relatives, of transformers"),)
