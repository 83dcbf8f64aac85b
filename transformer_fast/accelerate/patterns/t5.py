"""Patterns of sublayers and blocks of T5 and similar models: ``x + dropout(f(norm(x)))`` with RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...layers.dropout import apply_dropout
from ...layers.norm import norm_and_sum
from .base import ANY, DROPOUT, LINEAR, Part, Pattern, children, pattern_of, swapped_by
from .blocks import activated, block_calls, unsummed
from .norm import NORM, width_of


class T5Dense(Pattern):
    """``wo(dropout(act(wi(x))))``, or gated, ``wo(dropout(act(wi_0(x)) * wi_1(x)))``."""

    def __init__(self, name: str, *inner: str) -> None:
        super().__init__(name)
        self.inner = inner
        self.parts = {**dict.fromkeys(inner, LINEAR), "wo": LINEAR, "dropout": DROPOUT, "act": ANY}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, getattr(m, self.inner[0]).in_features),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor | None:
        weight = getattr(m.wo, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():  # a quantised layer
            return None
        first, *gate = (getattr(m, name) for name in self.inner)
        y = apply_dropout(m.dropout, m.act(first(x)) * gate[0](x)) if gate else activated(first, m.act, x, m.dropout)
        return m.wo(y.to(weight.dtype))  # wo may be float32 while the other layers are not


class T5Sublayer(Pattern):
    """``x + dropout(f(norm(x)))``."""


class T5FeedForward(T5Sublayer):
    """``x + dropout(DenseReluDense(norm(x)))``."""

    parts = children(DenseReluDense=Part(lambda module: True, returns=1), layer_norm=NORM, dropout=DROPOUT)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, width_of(m.layer_norm)),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor:
        return unsummed(x, m.DenseReluDense(m.layer_norm(x)), m.dropout).summed()


class T5Attention(T5Sublayer):
    """``x + dropout(attention(norm(x)))``, also returns the position bias and the weights.

    Args:
        name: name of the pattern.
        attention: name of the attention child.
        memory: name of the argument with the encoder's outputs; empty for self-attention.
    """

    named = True

    def __init__(self, name: str, attention: str, memory: str = "") -> None:
        super().__init__(name)
        self.attention = attention
        self.parts = {attention: Part(lambda module: True, returns=3), "layer_norm": NORM, "dropout": DROPOUT}
        self.passed_on = (*((memory,) if memory else ()), "position_bias", "past_key_values")

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return block_calls(width_of(m.layer_norm), *self.passed_on)

    def fused_forward(
        self, m: Any, hidden_states: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> tuple[Any, ...]:
        y, *rest = getattr(m, self.attention)(m.layer_norm(hidden_states), mask=attention_mask, **others)
        return unsummed(hidden_states, y, m.dropout).summed(), *rest


SELF_ATTENTION = T5Attention("T5SelfAttention", "SelfAttention")
CROSS_ATTENTION = T5Attention("T5CrossAttention", "EncDecAttention", memory="key_value_states")
FEED_FORWARD = T5FeedForward("T5FeedForward")


class T5Block(Pattern):
    """Self-attention, cross-attention (decoder only) and feed-forward: each sum and the next norm run as one op."""

    named = True
    parts = children(layer=Part(swapped_by(T5Sublayer), fused=True, many=True))

    def matches(self, m: Any) -> bool:
        return super().matches(m) and self.sublayers(m) is not None

    def sublayers(self, m: Any) -> tuple[Any, Any, Any] | None:
        """Sublayers: attention, cross-attention (None in an encoder) and feed-forward; None if the structure
        differs."""
        patterns = [pattern_of(layer) for layer in m.layer]
        if patterns == [SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD]:
            return tuple(m.layer)
        return (m.layer[0], None, m.layer[1]) if patterns == [SELF_ATTENTION, FEED_FORWARD] else None

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        own, cross, _ = self.sublayers(m)
        memory = ("encoder_hidden_states", "encoder_attention_mask", "encoder_decoder_position_bias")
        return block_calls(width_of(own.layer_norm), "position_bias", "past_key_values", *(memory if cross else ()))

    def fused_forward(
        self,
        m: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        encoder_decoder_position_bias: Tensor | None,
        past_key_values: Any,
        **others: Any,
    ) -> tuple[Any, ...] | None:
        if hidden_states.dtype == torch.float16 or (sublayers := self.sublayers(m)) is None:  # T5 clamps float16
            return None
        own, cross, ff = sublayers
        if encoder_hidden_states is not None and (cross is None or not m.is_decoder):
            return None
        others["past_key_values"] = past_key_values
        normed = own.layer_norm(hidden_states)
        y, bias, _ = own.SelfAttention(normed, mask=attention_mask, position_bias=position_bias, **others)
        x, cross_bias = unsummed(hidden_states, y, own.dropout), None
        if encoder_hidden_states is not None:
            others |= {"key_value_states": encoder_hidden_states, "mask": encoder_attention_mask}
            normed, summed = norm_and_sum(cross.layer_norm, x)
            y, cross_bias, _ = cross.EncDecAttention(normed, position_bias=encoder_decoder_position_bias, **others)
            x = unsummed(summed, y, cross.dropout)
        normed, summed = norm_and_sum(ff.layer_norm, x)
        x = unsummed(summed, ff.DenseReluDense(normed), ff.dropout)
        return x.summed(), bias, cross_bias


PATTERNS = (
    T5Dense("T5Dense", "wi"),
    T5Dense("T5GatedDense", "wi_0", "wi_1"),
    FEED_FORWARD,
    SELF_ATTENTION,
    CROSS_ATTENTION,
    T5Block("T5Block"),
)
KNOWS = (
    (
        "sublayers and blocks with RMSNorm",
        "T5 and its relatives",
    ),
)
