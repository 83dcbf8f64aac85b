"""The faces of layers that are made of sublayers: attention and feed-forward handed to ``x + dropout(f(norm(x)))``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.hooks import is_plain
from ..layers.norm import Unsummed, active_dropout, norm_and_sum
from .attention_faces import BertHeadsFace, HeadsFace, some_keep
from .faces import Face, PostNormSublayerFace, SublayerFace, children, is_dropout, own_parameters, takes, width_of


class SublayersFace(Face):
    """Pre-norm sublayers in a row: dropout and addition of each run as one op with the norm of the next."""

    face_arguments: int
    face_attentions: tuple[str, ...]
    face_heads: type[HeadsFace] = HeadsFace
    face_others: tuple[str, ...] = ("sublayer",)

    @classmethod
    def face_sublayers(cls, module: nn.Module) -> tuple[nn.Module, ...]:
        """The sublayer connections in their order."""
        return tuple(module.sublayer)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_attentions, "feed_forward", *cls.face_others} or own_parameters(module):
            return False
        if not takes(module, cls.face_arguments):
            return False
        sublayers, attentions = cls.face_sublayers(module), [getattr(module, name) for name in cls.face_attentions]
        pre_norm = (isinstance(s, SublayerFace) and not isinstance(s, PostNormSublayerFace) for s in sublayers)
        heads = (isinstance(a, cls.face_heads) for a in attentions)
        return len(sublayers) == 1 + len(attentions) and all(pre_norm) and all(heads)

    def _face_skipped(self) -> list[nn.Module]:
        return [m for sublayer in self.face_sublayers(self) for m in (sublayer, sublayer.norm, sublayer.dropout)]

    def face_functions(self, *args: Any) -> tuple[Any, ...]:
        """What each sublayer is given to call, for the arguments that follow x."""
        raise NotImplementedError

    def face_unsummed(self, x: Tensor | Unsummed, *args: Any) -> Unsummed:
        """The layer's output, its last sum left to the norm that follows; x may be such an output."""
        for function, sublayer in zip(self.face_functions(*args), self.face_sublayers(self), strict=True):
            normed, x = norm_and_sum(sublayer.norm, x)
            x = Unsummed(x, function(normed), active_dropout(sublayer.dropout))
        return x

    def face_fused(self, x: Tensor, *args: Any) -> Tensor:
        return self.face_unsummed(x, *args).summed()


class AnnotatedEncoderLayerFace(SublayersFace):
    """``self_attn``, ``feed_forward`` and two of ``sublayer``: (x, mask)."""

    face_arguments, face_attentions = 2, ("self_attn",)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        x = torch.randn(2, 5, width_of(cls.face_sublayers(module)[0].norm))
        yield x, None
        yield x, some_keep(2, 1, 5)

    def face_functions(self, mask: Any) -> tuple[Any, ...]:
        return lambda x: self.self_attn(x, x, x, mask), self.feed_forward


class AnnotatedDecoderLayerFace(SublayersFace):
    """The same with ``src_attn`` and three of ``sublayer``: (x, memory, src_mask, tgt_mask)."""

    face_arguments, face_attentions = 4, ("self_attn", "src_attn")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d = width_of(cls.face_sublayers(module)[0].norm)
        x, memory = torch.randn(2, 5, d), torch.randn(2, 3, d)
        yield x, memory, None, None
        yield x, memory, some_keep(2, 1, 3), torch.ones(1, 5, 5, dtype=torch.bool).tril()

    def face_functions(self, memory: Tensor, src_mask: Any, tgt_mask: Any) -> tuple[Any, ...]:
        own, cross = self.self_attn, self.src_attn
        return lambda x: own(x, x, x, tgt_mask), lambda x: cross(x, memory, memory, src_mask), self.feed_forward


class AnnotatedEncoderFace(Face):
    """``layers`` and a last ``norm``, (x, mask): the sum that ends a layer is one op with the norm that follows."""

    face_skips = ("norm",)
    face_layer: type[SublayersFace] = AnnotatedEncoderLayerFace

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"layers", "norm"} or own_parameters(module):
            return False
        if not isinstance(module.layers, nn.ModuleList) or not takes(module, cls.face_layer.face_arguments):
            return False
        exact = [isinstance(layer, cls.face_layer) for layer in module.layers]
        return bool(exact) and all(exact) and width_of(module.norm) is not None

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        return cls.face_layer.calls(module.layers[0])

    def _face_skipped(self) -> list[nn.Module]:
        return [*super()._face_skipped(), *self.layers]

    def _face_fits(self) -> bool:
        return super()._face_fits() and all(map(self._face_layer_fits, self.layers))

    def _face_layer_fits(self, layer: nn.Module) -> bool:
        """Whether nobody would miss it if this layer were not called, and its last sum left to the next norm."""
        return isinstance(layer, self.face_layer) and is_plain(layer) and layer._face_fits()

    def face_fused(self, x: Tensor, *args: Any) -> Tensor:
        for layer in self.layers:
            x = layer.face_unsummed(x, *args)
        return norm_and_sum(self.norm, x)[0]


class AnnotatedDecoderFace(AnnotatedEncoderFace):
    """The same of decoder layers, (x, memory, src_mask, tgt_mask)."""

    face_layer = AnnotatedDecoderLayerFace


class BertBlockFace(SublayersFace):
    """BERT's block: ``attention``, ``feed_forward``, ``input_sublayer``, ``output_sublayer``, and one more dropout."""

    face_arguments, face_attentions, face_heads = 2, ("attention",), BertHeadsFace
    face_others = ("input_sublayer", "output_sublayer", "dropout")

    @classmethod
    def face_sublayers(cls, module: nn.Module) -> tuple[nn.Module, ...]:
        return module.input_sublayer, module.output_sublayer

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and is_dropout(module.dropout)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        x = torch.randn(2, 5, width_of(module.input_sublayer.norm))
        yield x, None
        yield x, some_keep(2, 1, 1, 5)

    def face_functions(self, mask: Any) -> tuple[Any, ...]:
        return lambda x: self.attention(x, x, x, mask), self.feed_forward

    def face_fused(self, x: Tensor, mask: Any) -> Tensor:
        return self.dropout(super().face_fused(x, mask))
