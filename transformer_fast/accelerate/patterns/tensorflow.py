"""The patterns of the TensorFlow tutorial's layers and stacks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...dialects import tensorflow
from ...dialects.tensorflow.models import through_decoder
from .attention import TensorflowHeads
from .base import ANY, DROPOUT, EMBEDDING, Part, Pattern, by, children, random_keep
from .embedding import embedded, random_ids
from .norm import NORM, width_of


def encoder_calls(x: Tensor) -> Iterable[tuple[Any, ...]]:
    """Calls of an encoder's module, (x, mask)."""
    return (x, None), (x, 1.0 - random_keep(2, 1, 1, x.shape[1]).to(torch.get_default_dtype()))


def decoder_calls(x: Tensor, width: int) -> Iterable[tuple[Any, ...]]:
    """Calls of a decoder's module, (x, memory, look-ahead mask, padding mask)."""
    memory = torch.randn(2, 3, width)
    look_ahead = torch.ones(x.shape[1], x.shape[1], dtype=memory.dtype).triu(1)
    return (x, memory, None, None), (x, memory, look_ahead, 1.0 - random_keep(2, 1, 1, 3).to(memory.dtype))


class TensorflowEncoderLayer(Pattern):
    """The tutorial's encoder layer, which looks at no weights."""

    parts = children(
        mha=Part(by(TensorflowHeads), fused=True),
        ffn=ANY,
        layernorm1=NORM,
        layernorm2=NORM,
        dropout1=DROPOUT,
        dropout2=DROPOUT,
    )

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return encoder_calls(torch.randn(2, 5, width_of(m.layernorm1)))

    def fused_forward(self, m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return tensorflow.EncoderLayer.forward(m, x, mask)


class TensorflowDecoderLayer(Pattern):
    """The tutorial's decoder layer, which returns the weights of both attentions."""

    keywords = ("need_weights",)
    parts = children(
        mha1=Part(by(TensorflowHeads)),
        mha2=Part(by(TensorflowHeads)),
        ffn=ANY,
        layernorm1=NORM,
        layernorm2=NORM,
        layernorm3=NORM,
        dropout1=DROPOUT,
        dropout2=DROPOUT,
        dropout3=DROPOUT,
    )

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        width = width_of(m.layernorm1)
        return decoder_calls(torch.randn(2, 5, width), width)

    def fused_forward(
        self, m: Any, x: Tensor, memory: Tensor, *masks: Tensor | None, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return tensorflow.DecoderLayer.forward(m, x, memory, *masks, need_weights=need_weights)


class TensorflowStack(Pattern):
    """The tutorial's stacks: ``dropout(embedding * sqrt(d) + pos_encoding)`` in one pass, then the layers.

    The decoder returns the weights of all its attentions by name.
    """

    def __init__(self, name: str, layers: str, layer: type[Pattern]) -> None:
        super().__init__(name)
        self.decodes = layer is TensorflowDecoderLayer
        self.parts = {"embedding": EMBEDDING, "dropout": DROPOUT, layers: Part(by(layer), many=True)}

    def matches(self, m: Any) -> bool:
        table = getattr(m, "pos_encoding", None)
        return super().matches(m) and isinstance(table, Tensor) and table.dim() == 3

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.embedding, min(5, m.pos_encoding.shape[1]))
        return decoder_calls(ids, m.embedding.embedding_dim) if self.decodes else encoder_calls(ids)

    def fused_forward(self, m: Any, ids: Tensor, *inputs: Any) -> Any:
        x = embedded(ids, m.embedding, m.pos_encoding[0], math.sqrt(m.embedding.embedding_dim), m.dropout)
        if x is None:
            return None
        if self.decodes:
            return through_decoder(m.dec_layers, x, *inputs)
        for layer in m.enc_layers:
            x = layer(x, *inputs)
        return x


PATTERNS = (
    TensorflowEncoderLayer(),
    TensorflowDecoderLayer(),
    TensorflowStack("TensorflowEncoder", "enc_layers", TensorflowEncoderLayer),
    TensorflowStack("TensorflowDecoder", "dec_layers", TensorflowDecoderLayer),
)
