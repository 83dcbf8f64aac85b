"""The faces of the TensorFlow tutorial's layers and stacks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.norm import active_dropout
from ..layers.torch_modules import Embedding
from .attention_faces import TensorflowHeadsFace, some_keep
from .embedding_faces import embedded
from .faces import Face, children, is_dropout, own_parameters, width_of


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


class TensorflowEncoderFace(Face):
    """The tutorial's encoder: ``dropout(embedding * sqrt(d) + pos_encoding)`` in one pass, then ``enc_layers``."""

    face_skips = ("embedding", "dropout")
    face_layers, face_layer = "enc_layers", TensorflowEncoderLayerFace

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_skips, cls.face_layers} or own_parameters(module):
            return False
        stack, table = getattr(module, cls.face_layers), getattr(module, "pos_encoding", None)
        if not isinstance(stack, nn.ModuleList) or not isinstance(table, Tensor) or table.dim() != 3:
            return False
        attentions = cls.face_layer.face_attentions
        exact = (isinstance(m, cls.face_layer) and m.face_attentions == attentions for m in stack)
        return isinstance(module.embedding, Embedding) and is_dropout(module.dropout) and all(exact)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.embedding.weight.shape[0], (2, min(5, module.pos_encoding.shape[1])))
        yield ids, None
        yield ids, 1.0 - some_keep(2, 1, 1, ids.shape[1]).to(torch.get_default_dtype())

    def face_embedded(self, ids: Tensor) -> Tensor | None:
        """What enters the first layer; None where the fused op does not serve."""
        scale = math.sqrt(self.embedding.embedding_dim)
        return embedded(ids, self.embedding, self.pos_encoding[0], scale, self.dropout)

    def face_fused(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.face_embedded(ids)
        if x is None:
            return super(Face, self).forward(ids, mask)
        for layer in self.enc_layers:
            x = layer(x, mask)
        return x


class TensorflowDecoderFace(TensorflowEncoderFace):
    """The tutorial's decoder, which returns the weights of all its attentions by name."""

    face_layers, face_layer = "dec_layers", TensorflowDecoderLayerFace

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.embedding.weight.shape[0], (2, min(5, module.pos_encoding.shape[1])))
        L, memory = ids.shape[1], torch.randn(2, 3, module.embedding.embedding_dim)
        yield ids, memory, None, None
        yield ids, memory, torch.ones(L, L, dtype=memory.dtype).triu(1), 1.0 - some_keep(2, 1, 1, 3).to(memory.dtype)

    def face_fused(
        self, ids: Tensor, memory: Tensor, own: Tensor | None = None, cross: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.face_embedded(ids)
        if x is None:
            return super(Face, self).forward(ids, memory, own, cross)
        weights = {}
        for number, layer in enumerate(self.dec_layers, start=1):
            x, *both = layer(x, memory, own, cross)
            weights |= {f"decoder_layer{number}_block{block}": w for block, w in enumerate(both, start=1)}
        return x, weights
