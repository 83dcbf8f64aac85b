"""The faces of the classic layers and stacks around attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import layers
from .attention_faces import ClassicHeadsFace, keep_mask, some_keep
from .embedding_faces import EmbedderFace, PositionalFace, embedded
from .faces import Face, children, is_dropout, own_parameters, width_of


class EncoderLayerFace(Face):
    """The classic encoder layer, pre-norm; dropout, residual addition and the norm that follows run as one op."""

    face_skips = ("norm_1", "norm_2", "dropout_1", "dropout_2")
    face_attentions = ("attn",)
    norm_first = True

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_skips, *cls.face_attentions, "ff"} or own_parameters(module):
            return False
        if not all(isinstance(getattr(module, name), ClassicHeadsFace) for name in cls.face_attentions):
            return False
        checks = {"norm": width_of, "dropout": is_dropout}
        return all(checks[name.rpartition("_")[0]](getattr(module, name)) for name in cls.face_skips)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        x = torch.randn(2, 5, width_of(module.norm_1))
        yield x, None
        yield x, some_keep(2, 1, 5)

    face_fused = layers.EncoderLayer.forward
    sublayers = layers.EncoderLayer.sublayers  # which it calls


class PostNormEncoderLayerFace(EncoderLayerFace):
    """The same, post-norm."""

    norm_first = False


class DecoderLayerFace(EncoderLayerFace):
    """The classic decoder layer, pre-norm."""

    face_skips = ("norm_1", "norm_2", "norm_3", "dropout_1", "dropout_2", "dropout_3")
    face_attentions = ("attn_1", "attn_2")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d = width_of(module.norm_1)
        x, memory = torch.randn(2, 5, d), torch.randn(2, 3, d)
        yield x, memory, None, None
        yield x, memory, some_keep(2, 1, 3), torch.ones(1, 5, 5, dtype=torch.bool).tril()

    face_fused = layers.DecoderLayer.forward
    sublayers = layers.DecoderLayer.sublayers  # which it calls


class PostNormDecoderLayerFace(DecoderLayerFace):
    """The same, post-norm."""

    norm_first = False


class EncoderFace(Face):
    """The classic encoder: embedding and positions in one pass, the layers, a norm."""

    face_skips = ("embed", "pe")
    face_layer: type[Face] = EncoderLayerFace

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"embed", "pe", "layers", "norm"} or own_parameters(module):
            return False
        stack = module.layers if isinstance(module.layers, nn.ModuleList) else ()
        attentions = cls.face_layer.face_attentions
        exact = (isinstance(layer, cls.face_layer) and layer.face_attentions == attentions for layer in stack)
        return isinstance(module.embed, EmbedderFace) and isinstance(module.pe, PositionalFace) and all(exact)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.embed.lut.weight.shape[0], (2, 5))
        yield ids, None
        yield ids, some_keep(2, 1, 5)

    def face_fused(self, ids: Tensor, mask: Any) -> Tensor:
        x, mask = self.face_embedded(ids), keep_mask(mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)

    def face_embedded(self, ids: Tensor) -> Tensor:
        embed, positions = self.embed, self.pe
        table = getattr(positions, positions.face_name)[0] if positions.face_length == 1 else ids.new_empty(0)
        x = embedded(ids, embed.lut, table, math.sqrt(embed.d_model), positions.dropout)
        return positions(embed(ids)) if x is None else x


class DecoderFace(EncoderFace):
    """The classic decoder."""

    face_layer = DecoderLayerFace

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.embed.lut.weight.shape[0], (2, 5))
        memory = torch.randn(2, 3, module.embed.lut.weight.shape[1])
        yield ids, memory, None, None
        yield ids, memory, some_keep(2, 1, 3), torch.ones(1, 5, 5, dtype=torch.bool).tril()

    def face_fused(self, ids: Tensor, e_outputs: Tensor, src_mask: Any, trg_mask: Any) -> Tensor:
        x, src_mask, trg_mask = self.face_embedded(ids), keep_mask(src_mask), keep_mask(trg_mask)
        for layer in self.layers:
            x = layer(x, e_outputs, src_mask, trg_mask)
        return self.norm(x)
