"""The faces of the layers and stacks around attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import layers, ops
from ..layers.norm import active_dropout
from .attention_faces import ClassicHeadsFace, TensorflowHeadsFace, keep_mask, some_keep
from .faces import EmbedderFace, Face, PositionalFace, children, is_dropout, own_parameters, unwatched, width_of


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
        weight = embed.lut.weight
        fits = ids.shape[-1] <= table.shape[0] and table.device == ids.device
        fits = fits and torch.promote_types(table.dtype, weight.dtype) == weight.dtype
        if not (fits and unwatched(embed.lut, positions.dropout)):
            return positions(embed(ids))
        return ops.embed(
            ids,
            weight,
            table,
            scale=math.sqrt(embed.d_model),
            padding_idx=embed.lut.padding_idx,
            dropout_p=active_dropout(positions.dropout),
        )


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


class TensorflowEncoderLayerFace(Face):
    """The TensorFlow tutorial's encoder layer, which looks at no weights."""

    face_skips = ("mha", "layernorm1", "layernorm2", "dropout1", "dropout2")
    face_attentions = ("mha",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_skips, *cls.face_attentions, "ffn"} or own_parameters(module):
            return False
        if not all(isinstance(getattr(module, name), TensorflowHeadsFace) for name in cls.face_attentions):
            return False
        norms, dropouts = ([n for n in cls.face_skips if n.startswith(k)] for k in ("layernorm", "dropout"))
        return all(width_of(getattr(module, n)) for n in norms) and all(
            is_dropout(getattr(module, n)) for n in dropouts
        )

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        x = torch.randn(2, 5, width_of(module.layernorm1))
        yield x, None
        yield x, 1.0 - some_keep(2, 1, 1, 5).to(x.dtype)

    def face_fused(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended, _ = self.mha.face_fused(x, x, x, mask, weights=False)
        x, _ = self.layernorm1(attended, residual=x, dropout_p=active_dropout(self.dropout1))
        return self.layernorm2(self.ffn(x), residual=x, dropout_p=active_dropout(self.dropout2))[0]


class TensorflowDecoderLayerFace(TensorflowEncoderLayerFace):
    """The TensorFlow tutorial's decoder layer, which returns the weights of both attentions."""

    face_skips = ("layernorm1", "layernorm2", "layernorm3", "dropout1", "dropout2", "dropout3")
    face_attentions = ("mha1", "mha2")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d = width_of(module.layernorm1)
        x, memory = torch.randn(2, 5, d), torch.randn(2, 3, d)
        yield x, memory, None, None
        yield x, memory, torch.ones(5, 5, dtype=x.dtype).triu(1), 1.0 - some_keep(2, 1, 1, 3).to(x.dtype)

    def face_fused(
        self, x: Tensor, memory: Tensor, own: Tensor | None = None, cross: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, weights_1 = self.mha1(x, x, x, own)
        x, _ = self.layernorm1(attended, residual=x, dropout_p=active_dropout(self.dropout1))
        attended, weights_2 = self.mha2(memory, memory, x, cross)
        x, _ = self.layernorm2(attended, residual=x, dropout_p=active_dropout(self.dropout2))
        x, _ = self.layernorm3(self.ffn(x), residual=x, dropout_p=active_dropout(self.dropout3))
        return x, weights_1, weights_2
