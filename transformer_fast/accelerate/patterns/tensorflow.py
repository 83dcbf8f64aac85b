"""The patterns of the TensorFlow tutorial's layers and stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...dialects import tensorflow
from ...layers.hooks import TAKES_NEED_WEIGHTS
from .attention import TensorflowHeads, blocked_mask
from .base import ANY, DROPOUT, EMBEDDING, Part, Pattern, random_keep, swapped_by
from .embedding import embedded, random_ids
from .norm import NORM, width_of
from .without_padding import through


def encoder_calls(x: Tensor) -> Iterable[tuple[Any, ...]]:
    """Test calls of an encoder module, (x, mask)."""
    return (x, None), (x, 1.0 - random_keep(2, 1, 1, x.shape[1]).to(torch.get_default_dtype()))


def decoder_calls(x: Tensor, width: int) -> Iterable[tuple[Any, ...]]:
    """Test calls of a decoder module, (x, memory, look-ahead mask, padding mask)."""
    memory = torch.randn(2, 3, width)
    look_ahead = torch.ones(x.shape[1], x.shape[1], dtype=memory.dtype).triu(1)
    return (x, memory, None, None), (x, memory, look_ahead, 1.0 - random_keep(2, 1, 1, 3).to(memory.dtype))


def without_padding(m: Any, x: Tensor, inputs: tuple[Any, ...], decodes: bool, run: Callable[..., Any]) -> Any:
    """Run a layer or a stack by :func:`through`, with a decoder's masks in swapped order."""
    if not decodes:
        return through(m, x, (*inputs, None)[:1], run, blocked_mask)
    memory, look_ahead, padding = (*inputs, None, None)[:3]
    return through(m, x, (memory, padding, look_ahead), lambda x, memory, p, a: run(x, memory, a, p), blocked_mask)


class TensorflowLayer(Pattern):
    """The tutorial's layers: an encoder layer computes no weights, a decoder layer returns the weights of both
    attentions."""

    keywords = ("need_weights",)
    padding = ""

    def __init__(self, name: str, layer: type[nn.Module], *attentions: str) -> None:
        super().__init__(name)
        self.layer, self.decodes = layer, len(attentions) > 1
        self.roles = (TAKES_NEED_WEIGHTS,) if self.decodes else ()
        self.parts = {
            **dict.fromkeys(attentions, Part(swapped_by(TensorflowHeads), fused=not self.decodes)),
            "ffn": ANY,
        }
        for number in range(1, 2 + len(attentions)):
            self.parts |= {f"layernorm{number}": NORM, f"dropout{number}": DROPOUT}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        width = width_of(m.layernorm1)
        x = torch.randn(2, 5, width)
        return decoder_calls(x, width) if self.decodes else encoder_calls(x)

    def fused_forward(self, m: Any, x: Tensor, *inputs: Any, **options: Any) -> Any:
        def run(x: Tensor, *inputs: Any) -> Any:
            return self.layer.forward(m, x, *inputs, **options)

        return without_padding(m, x, inputs, self.decodes, run)


class TensorflowStack(Pattern):
    """The tutorial's stacks: ``dropout(embedding * sqrt(d) + pos_encoding)`` in one pass, then the layers.

    The decoder returns the weights of all its attentions by name.
    """

    padding = ""

    def __init__(self, name: str, layers: str, layer: TensorflowLayer) -> None:
        super().__init__(name)
        self.decodes = layer.decodes
        self.parts = {"embedding": EMBEDDING, "dropout": DROPOUT, layers: Part(swapped_by(layer), many=True)}

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

        def run(x: Tensor, *inputs: Any) -> Any:
            if self.decodes:
                return tensorflow.through_decoder(m.dec_layers, x, inputs[0], [inputs[1:]] * len(m.dec_layers))
            for layer in m.enc_layers:
                x = layer(x, *inputs)
            return x

        return without_padding(m, x, inputs, self.decodes, run)


PATTERNS = (
    ENCODER_LAYER := TensorflowLayer("TensorflowEncoderLayer", tensorflow.EncoderLayer, "mha"),
    DECODER_LAYER := TensorflowLayer("TensorflowDecoderLayer", tensorflow.DecoderLayer, "mha1", "mha2"),
    TensorflowStack("TensorflowEncoder", "enc_layers", ENCODER_LAYER),
    TensorflowStack("TensorflowDecoder", "dec_layers", DECODER_LAYER),
)
KNOWS = (
    (
        "layers `mha`, `ffn`, `layernorm1`...; stacks",
        "TensorFlow's tutorial",
    ),
)
