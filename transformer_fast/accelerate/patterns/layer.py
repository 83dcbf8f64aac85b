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
from .base import ANY, DROPOUT, Part, Pattern, pattern_of, random_keep, swapped_by
from .embedding import Embedder, Positional, embedded, random_ids
from .norm import NORM, width_of
from .without_padding import through


def encoder_calls(x: Tensor) -> Iterable[tuple[Any, ...]]:
    """Test calls of an encoder module with keep masks, (x, mask), for an x of length 5."""
    return (x, None), (x, random_keep(2, 1, 5))


def decoder_calls(x: Tensor, width: int) -> Iterable[tuple[Any, ...]]:
    """Test calls of a decoder module with keep masks, (x, memory, src_mask, trg_mask), for an x of length 5."""
    memory, look_ahead = torch.randn(2, 3, width), torch.ones(1, 5, 5, dtype=torch.bool).tril()
    return (x, memory, None, None), (x, memory, random_keep(2, 1, 3), look_ahead)


class Layer(Pattern):
    """The classic layers; dropout, residual addition and the next norm run as one op."""

    padding = ""

    def __init__(self, name: str, layer: type[layers.EncoderLayer | layers.DecoderLayer], *, norm_first: bool) -> None:
        super().__init__(name)
        self.layer, self.norm_first, self.decodes = layer, norm_first, layer is layers.DecoderLayer
        attentions = ("attn_1", "attn_2") if self.decodes else ("attn",)
        self.parts = {**dict.fromkeys(attentions, Part(swapped_by(CLASSIC))), "ff": ANY}
        for number in range(1, 2 + len(attentions)):
            self.parts |= {f"norm_{number}": NORM, f"dropout_{number}": DROPOUT}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        width = width_of(m.norm_1)
        x = torch.randn(2, 5, width)
        return decoder_calls(x, width) if self.decodes else encoder_calls(x)

    def fused_forward(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        def run(x: Tensor, *args: Any) -> Tensor:
            sublayers = self.layer.sublayers(m, *args)
            return pre_norm(x, sublayers).summed() if self.norm_first else post_norm(x, sublayers)

        return through(m, x, args, run)


ENCODER_LAYERS = (
    Layer("EncoderLayer", layers.EncoderLayer, norm_first=True),
    Layer("PostNormEncoderLayer", layers.EncoderLayer, norm_first=False),
)
DECODER_LAYERS = (
    Layer("DecoderLayer", layers.DecoderLayer, norm_first=True),
    Layer("PostNormDecoderLayer", layers.DecoderLayer, norm_first=False),
)


class Stack(Pattern):
    """The classic stacks: embedding and positions in one pass, the layers, a norm."""

    padding = ""

    def __init__(self, name: str, kinds: tuple[Layer, ...]) -> None:
        super().__init__(name)
        self.decodes = kinds is DECODER_LAYERS
        self.parts = {
            "embed": Part(swapped_by(Embedder), fused=True),
            "pe": Part(swapped_by(Positional), fused=True),
            "layers": Part(lambda layer: pattern_of(layer) in kinds, many=True),
            "norm": ANY,
        }

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.embed.lut)
        return decoder_calls(ids, m.embed.lut.weight.shape[1]) if self.decodes else encoder_calls(ids)

    def fused_forward(self, m: Any, ids: Tensor, *inputs: Any) -> Tensor:
        memory, masks = (inputs[:1], inputs[1:]) if self.decodes else ((), inputs)
        positions = pattern_of(m.pe)
        table = getattr(m.pe, positions.table)[0] if positions.length_axis == 1 else ids.new_empty(0)
        x = embedded(ids, m.embed.lut, table, math.sqrt(m.embed.d_model), m.pe.dropout)
        x = m.pe(m.embed(ids)) if x is None else x

        def run(x: Tensor, *args: Any) -> Tensor:
            for layer in m.layers:
                x = layer(x, *args)
            return m.norm(x)

        return through(m, x, (*memory, *map(keep_mask, masks)), run)


PATTERNS = (
    *ENCODER_LAYERS,
    *DECODER_LAYERS,
    Stack("Encoder", ENCODER_LAYERS),
    Stack("Decoder", DECODER_LAYERS),
)
KNOWS = (
    (
        "layers `attn`, `ff`, `norm_1`..., pre-norm and post-norm; stacks",
        "the classic code",
    ),
)
