"""The faces of embeddings and positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.hooks import has_hooks
from ..layers.norm import active_dropout
from ..layers.torch_modules import Embedding
from ..ops.dropout import dropout as fused_dropout
from .faces import Face, children, is_dropout, is_known, own_parameters


def embedded(
    ids: Tensor, embedding: nn.Embedding, table: Tensor, scale: float, dropout: nn.Dropout | None, offset: int = 0
) -> Tensor | None:
    """``dropout(embedding(ids) * scale + table[offset : offset + L])`` in one pass, for a table (max_len, d).

    None where the table does not serve these ids (too short, elsewhere, or of a dtype that decides the result's), or
    where a hook would miss it.
    """
    parts = [embedding] if dropout is None else [embedding, dropout]
    if has_hooks(*parts) or not all(map(is_known, parts)):
        return None
    weight = embedding.weight
    fits = table.dim() == 2 and offset + ids.shape[-1] <= table.shape[0] and table.device == ids.device
    if not fits or torch.promote_types(table.dtype, weight.dtype) != weight.dtype:
        return None
    p = 0.0 if dropout is None else active_dropout(dropout)
    padding = embedding.padding_idx
    return ops.embed(ids, weight, table, scale=scale, offset=offset, padding_idx=padding, dropout_p=p)


class EmbedderFace(Face):
    """``lut(ids) * sqrt(d_model)``."""

    face_skips = ("lut",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return children(module) == {"lut"} and isinstance(module.lut, Embedding) and hasattr(module, "d_model")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield (torch.randint(0, module.lut.weight.shape[0], (2, 5)),)

    def face_fused(self, ids: Tensor) -> Tensor:
        return ops.embed(ids, self.lut.weight, scale=math.sqrt(self.d_model), padding_idx=self.lut.padding_idx)


class PositionalFace(Face):
    """``dropout(x + pe[:, :L])`` for a table ``pe`` (1, max_len, d), with the batch first."""

    face_name, face_length = "pe", 1
    face_skips = ("dropout",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        table = getattr(module, cls.face_name, None)
        if children(module) != {"dropout"} or own_parameters(module) or not isinstance(table, Tensor):
            return False
        return is_dropout(module.dropout) and table.dim() == 3 and table.shape[1 - cls.face_length] == 1

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        table = getattr(module, cls.face_name)
        length = min(5, table.shape[cls.face_length])
        yield (torch.randn(*((2, length) if cls.face_length == 1 else (length, 2)), table.shape[-1]),)

    def face_table(self, x: Tensor) -> Tensor | None:
        """The table where it serves x (.., d) of this length, dtype and device; None where it does not."""
        table = getattr(self, self.face_name).squeeze(1 - self.face_length)
        fits = x.dim() == 3 and x.shape[self.face_length] <= table.shape[0] and x.device == table.device
        return table if fits and torch.promote_types(x.dtype, table.dtype) == x.dtype else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        table = self.face_table(*args) if len(args) == 1 and not kwargs and self._face_fits() else None
        return super(Face, self).forward(*args, **kwargs) if table is None else self.face_fused(*args, table)

    def face_fused(self, x: Tensor, table: Tensor) -> Tensor:
        x = x if self.face_length == 1 else x.transpose(0, 1)
        out = ops.add_positional(x, table, 0, active_dropout(self.dropout))
        return out if self.face_length == 1 else out.transpose(0, 1)


class LengthFirstPositionalFace(PositionalFace):
    """The same for a table (max_len, 1, d), with the batch second."""

    face_length = 0


class D2lPositionalFace(PositionalFace):
    """:class:`PositionalFace` as ``P``."""

    face_name = "P"


class BertEmbeddingFace(Face):
    """``dropout(token(ids) + position(ids))``, ``position`` being the table ``pe``; a ``segment`` is added too."""

    face_skips, face_does = ("token", "dropout"), ("position",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) - {"segment"} != {*cls.face_skips, *cls.face_does} or own_parameters(module):
            return False
        table = getattr(module.position, "pe", None)
        if not isinstance(table, Tensor) or table.requires_grad or table.dim() != 3 or table.shape[0] != 1:
            return False
        embeddings = (getattr(module, name) for name in ("token", "segment") if name in module._modules)
        return all(isinstance(m, Embedding) for m in embeddings) and is_dropout(module.dropout)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.token.weight.shape[0], (2, min(5, module.position.pe.shape[1])))
        segment = module._modules.get("segment")
        yield (ids,) if segment is None else (ids, torch.randint(0, segment.weight.shape[0], ids.shape))

    def face_fused(self, ids: Tensor, *labels: Tensor) -> Tensor:
        segment = self._modules.get("segment")
        dropout = self.dropout if segment is None else None
        x = embedded(ids, self.token, self.position.pe[0], 1.0, dropout)
        if x is None:
            return super(Face, self).forward(ids, *labels)
        return x if segment is None else fused_dropout(x + segment(*labels), active_dropout(self.dropout))


class TokenEmbeddingFace(Face, Embedding):
    """A subclass of ``nn.Embedding`` with another constructor and nothing else."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        original = type(module)
        if not issubclass(original, nn.Embedding) or original.forward is not nn.Embedding.forward:
            return False
        return not (module.max_norm is not None or module.sparse or module.scale_grad_by_freq)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield (torch.randint(0, module.weight.shape[0], (2, 5)),)

    forward = Embedding.forward
