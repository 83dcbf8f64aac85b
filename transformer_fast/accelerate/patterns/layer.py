"""The patterns of the classic layers and stacks around attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ... import layers
from ...layers.norm import post_norm, pre_norm
from .attention import CLASSIC, keep_mask
from .base import ANY, DROPOUT, Part, Pattern, by, pattern_of, random_keep
from .embedding import Embedder, Positional, embedded, random_ids
from .norm import NORM, width_of


def encoder_calls(x: Tensor) -> Iterable[tuple[Any, ...]]:
    """Calls of an encoder's module with keep masks, (x, mask), for an x of length 5."""
    return (x, None), (x, random_keep(2, 1, 5))


def decoder_calls(x: Tensor, width: int) -> Iterable[tuple[Any, ...]]:
    """Calls of a decoder's module with keep masks, (x, memory, src_mask, trg_mask), for an x of length 5."""
    memory, look_ahead = torch.randn(2, 3, width), torch.ones(1, 5, 5, dtype=torch.bool).tril()
    return (x, memory, None, None), (x, memory, random_keep(2, 1, 3), look_ahead)


class EncoderLayer(Pattern):
    """The classic encoder layer; dropout, residual addition and the norm that follows run as one op."""

    attentions: tuple[str, ...] = ("attn",)

    def __init__(self, name: str, *, norm_first: bool) -> None:
        super().__init__(name)
        self.norm_first = norm_first
        numbers = range(1, 2 + len(self.attentions))
        self.parts = {
            **{f"norm_{n}": NORM for n in numbers},
            **{f"dropout_{n}": DROPOUT for n in numbers},
            **dict.fromkeys(self.attentions, Part(by(CLASSIC))),
            "ff": ANY,
        }

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return encoder_calls(torch.randn(2, 5, width_of(m.norm_1)))

    def sublayers(self, m: Any, *args: Any) -> tuple[layers.norm.Sublayer, ...]:
        """The layer's sublayers in their order, for the arguments that follow x."""
        return layers.EncoderLayer.sublayers(m, *args)

    def fused_forward(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        sublayers = self.sublayers(m, *args)
        return pre_norm(x, sublayers).summed() if self.norm_first else post_norm(x, sublayers)


class DecoderLayer(EncoderLayer):
    """The classic decoder layer."""

    attentions = ("attn_1", "attn_2")

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        width = width_of(m.norm_1)
        return decoder_calls(torch.randn(2, 5, width), width)

    def sublayers(self, m: Any, *args: Any) -> tuple[layers.norm.Sublayer, ...]:
        return layers.DecoderLayer.sublayers(m, *args)


PRE_NORM_ENCODER, POST_NORM_ENCODER = (
    EncoderLayer("EncoderLayer", norm_first=True),
    EncoderLayer("PostNormEncoderLayer", norm_first=False),
)
PRE_NORM_DECODER, POST_NORM_DECODER = (
    DecoderLayer("DecoderLayer", norm_first=True),
    DecoderLayer("PostNormDecoderLayer", norm_first=False),
)


class Stack(Pattern):
    """The classic stacks: embedding and positions in one pass, the layers, a norm."""

    def __init__(self, name: str, *layer_patterns: EncoderLayer) -> None:
        super().__init__(name)
        self.decodes = isinstance(layer_patterns[0], DecoderLayer)
        self.parts = {
            "embed": Part(by(Embedder), fused=True),
            "pe": Part(by(Positional), fused=True),
            "layers": Part(lambda layer: pattern_of(layer) in layer_patterns, many=True),
            "norm": ANY,
        }

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.embed.lut)
        return decoder_calls(ids, m.embed.lut.weight.shape[1]) if self.decodes else encoder_calls(ids)

    def fused_forward(self, m: Any, ids: Tensor, *inputs: Any) -> Tensor:
        *memory, masks = (inputs[:-2], inputs[-2:]) if self.decodes else ((), inputs)
        positions = pattern_of(m.pe)
        table = getattr(m.pe, positions.table)[0] if positions.length_axis == 1 else ids.new_empty(0)
        x = embedded(ids, m.embed.lut, table, math.sqrt(m.embed.d_model), m.pe.dropout)
        x = m.pe(m.embed(ids)) if x is None else x
        inputs = (*memory[0], *map(keep_mask, masks))
        for layer in m.layers:
            x = layer(x, *inputs)
        return m.norm(x)


PATTERNS = (
    PRE_NORM_ENCODER,
    POST_NORM_ENCODER,
    PRE_NORM_DECODER,
    POST_NORM_DECODER,
    Stack("Encoder", PRE_NORM_ENCODER, POST_NORM_ENCODER),
    Stack("Decoder", PRE_NORM_DECODER, POST_NORM_DECODER),
)
