"""Patterns of layers that wrap attention and feed-forward in sublayer modules, ``x + dropout(f(norm(x)))``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.dropout import apply_dropout
from ...layers.norm import Sublayer, Unsummed, norm_and_sum, pre_norm
from .attention import BERT, Heads
from .base import ANY, DROPOUT, Part, Pattern, pattern_of, random_keep, swapped_by
from .layer import decoder_calls, encoder_calls
from .norm import NORM, SUBLAYER, width_of
from .without_padding import through


class AnnotatedLayer(Pattern):
    """Sequence of pre-norm sublayers: dropout and addition of a sublayer run as one op with the norm of the next
    sublayer."""

    padding = ""

    def __init__(self, name: str, arguments: int, *attentions: str, heads: Any = Heads, **others: Part) -> None:
        super().__init__(name)
        self.arguments, self.attentions = arguments, attentions
        sublayers = others or {"sublayer": Part(swapped_by(SUBLAYER), fused=True, many=True)}
        self.parts = {**dict.fromkeys(attentions, Part(swapped_by(heads))), "feed_forward": ANY, **sublayers}

    def matches(self, m: Any) -> bool:
        return super().matches(m) and len(self.connections(m)) == 1 + len(self.attentions)

    def connections(self, m: Any) -> list[nn.Module]:
        """The modules ``x + dropout(f(norm(x)))``, in order."""
        return list(m.sublayer)

    def sublayers(self, m: Any, *args: Any) -> tuple[Sublayer, ...]:
        """Sublayers of the layer, in order, bound to the arguments after x."""
        functions = (*self.attend(m, *args), m.feed_forward)
        return tuple((s.norm, s.dropout, function) for s, function in zip(self.connections(m), functions, strict=True))

    def attend(self, m: Any, mask: Any) -> tuple[Any, ...]:
        """Attentions as functions of the normed input, with the other arguments bound."""
        attention = getattr(m, self.attentions[0])
        return (lambda x: attention(x, x, x, mask),)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return encoder_calls(torch.randn(2, 5, width_of(self.connections(m)[0].norm)))

    def fused_forward(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        return through(m, x, args, functools.partial(self.run, m), self.normal(m))

    def normal(self, m: Any) -> Callable[[Any], Any]:
        """Function that converts masks of the layer's attention to normal form."""
        return pattern_of(m._modules[self.attentions[0]]).normal

    def run(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        """Run the layer on padded or packed arguments."""
        return pre_norm(x, self.sublayers(m, *args)).summed()


class AnnotatedDecoderLayer(AnnotatedLayer):
    """Decoder layer: as AnnotatedLayer, with a second attention to the encoder's outputs."""

    def attend(self, m: Any, memory: Tensor, src_mask: Any, tgt_mask: Any) -> tuple[Any, ...]:
        own, cross = m.self_attn, m.src_attn
        return lambda x: own(x, x, x, tgt_mask), lambda x: cross(x, memory, memory, src_mask)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        width = width_of(m.sublayer[0].norm)
        return decoder_calls(torch.randn(2, 5, width), width)


class AnnotatedStack(Pattern):
    """``layers`` and a final ``norm``: the last sum of a layer and the next norm run as one op."""

    padding = ""

    def __init__(self, name: str, layer: AnnotatedLayer) -> None:
        super().__init__(name)
        self.arguments = layer.arguments
        self.parts = {"layers": Part(swapped_by(layer), fused=True, many=True), "norm": NORM}

    def matches(self, m: Any) -> bool:
        return super().matches(m) and len(m.layers) > 0

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return pattern_of(m.layers[0]).calls(m.layers[0])

    def fused_forward(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        def run(x: Tensor | Unsummed, *args: Any) -> Tensor:
            for layer in m.layers:
                x = pre_norm(x, pattern_of(layer).sublayers(layer, *args))
            return norm_and_sum(m.norm, x)[0]

        return through(m, x, args, run, pattern_of(m.layers[0]).normal(m.layers[0]))


class BertBlock(AnnotatedLayer):
    """BERT's block: ``input_sublayer``, ``output_sublayer``, and one more dropout."""

    def __init__(self, name: str) -> None:
        connection = Part(swapped_by(SUBLAYER), fused=True)
        others = {"input_sublayer": connection, "output_sublayer": connection, "dropout": DROPOUT}
        super().__init__(name, 2, "attention", heads=BERT, **others)
        # Some authors call attention.forward, which skips hooks. So with hooks, the author's own code runs.
        self.parts["attention"] = Part(swapped_by(BERT), fused=True)

    def connections(self, m: Any) -> list[nn.Module]:
        return [m.input_sublayer, m.output_sublayer]

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        x = torch.randn(2, 5, width_of(m.input_sublayer.norm))
        return (x, None), (x, random_keep(2, 1, 1, 5))

    def run(self, m: Any, x: Tensor, *args: Any) -> Tensor:
        return apply_dropout(m.dropout, super().run(m, x, *args))


ENCODER_LAYER = AnnotatedLayer("AnnotatedEncoderLayer", 2, "self_attn")
DECODER_LAYER = AnnotatedDecoderLayer("AnnotatedDecoderLayer", 4, "self_attn", "src_attn")

PATTERNS = (
    ENCODER_LAYER,
    DECODER_LAYER,
    AnnotatedStack("AnnotatedEncoder", ENCODER_LAYER),
    DECODER := AnnotatedStack("AnnotatedDecoder", DECODER_LAYER),
    BertBlock("BertBlock"),
)
KNOWS = (
    (
        "layers of `sublayer`s, and `input_sublayer`, `output_sublayer`; stacks",
        "The Annotated Transformer, BERT by hand",
    ),
)
