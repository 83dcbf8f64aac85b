"""The patterns of embeddings and positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...layers.dropout import apply_dropout, fused_p
from ...layers.embedding import is_lookup
from ...layers.hooks import LOOKS_UP
from ...layers.torch_modules import Embedding
from ...tracing import sizes
from .base import DROPOUT, EMBEDDING, INLINED, Pattern, children


def embedded(
    ids: Tensor, embedding: nn.Module, table: Tensor, scale: float, dropout: nn.Module | None, offset: int = 0
) -> Tensor | None:
    """Compute ``dropout(embedding(ids) * scale + table[offset : offset + L])`` in one pass, for a table (max_len, d).

    None if the embedding or the dropout must be called, or if the table is too short, on another device, or of a dtype
    that would change the result's dtype.
    """
    p = 0.0 if dropout is None else fused_p(dropout)
    if p is None or not is_lookup(embedding):
        return None
    weight = embedding.weight
    fits = table.dim() == 2 and offset + sizes(ids)[-1] <= sizes(table)[0] and table.device == ids.device
    if not fits or torch.promote_types(table.dtype, weight.dtype) != weight.dtype:
        return None
    padding = embedding.padding_idx
    return ops.embed(ids, weight, table, scale=scale, offset=offset, padding_idx=padding, dropout_p=p)


def random_ids(embedding: nn.Embedding, length: int = 5) -> Tensor:
    """Random ids (2, length)."""
    return torch.randint(0, embedding.weight.shape[0], (2, length))


class Embedder(Pattern):
    """``lut(ids) * sqrt(d_model)``."""

    parts = children(lut=EMBEDDING)

    def matches(self, m: Any) -> bool:
        return super().matches(m) and hasattr(m, "d_model")

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(random_ids(m.lut),)]

    def fused_forward(self, m: Any, ids: Tensor) -> Tensor:
        return ops.embed(ids, m.lut.weight, scale=math.sqrt(m.d_model), padding_idx=m.lut.padding_idx)


class Positional(Pattern):
    """``dropout(x + table[:, :L])`` for a table (1, max_len, d) with batch first, or (max_len, 1, d) with batch
    second."""

    parts = children(dropout=DROPOUT)

    def __init__(self, name: str, table: str, length_axis: int = 1) -> None:
        super().__init__(name)
        self.table, self.length_axis = table, length_axis

    def matches(self, m: Any) -> bool:
        table = getattr(m, self.table, None)
        return (
            super().matches(m)
            and isinstance(table, Tensor)
            and table.dim() == 3
            and table.shape[1 - self.length_axis] == 1
        )

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        table = getattr(m, self.table)
        x = torch.randn(2, min(5, table.shape[self.length_axis]), table.shape[-1])
        return [(x if self.length_axis == 1 else x.transpose(0, 1).contiguous(),)]

    def fused_forward(self, m: Any, x: Tensor, *offset: Any) -> Tensor | None:
        table, axis = getattr(m, self.table).squeeze(1 - self.length_axis), self.length_axis
        fits = x.dim() == 3 and sizes(x)[axis] <= sizes(table)[0] and x.device == table.device
        if offset or not fits or torch.promote_types(x.dtype, table.dtype) != x.dtype:
            return None
        if (p := fused_p(m.dropout)) is None:
            return None
        if axis == 1:
            return ops.add_positional(x, table, 0, p)
        return ops.add_positional(x.transpose(0, 1), table, 0, p).transpose(0, 1)


_SEGMENT = dataclasses.replace(EMBEDDING, optional=True)


class BertEmbedding(Pattern):
    """``dropout(token(ids) + position(ids))``, ``position`` being the table ``pe``; a ``segment`` embedding may be
    added."""

    parts = children(token=EMBEDDING, position=INLINED, segment=_SEGMENT, dropout=DROPOUT)

    def matches(self, m: Any) -> bool:
        if not super().matches(m):
            return False
        table = getattr(m.position, "pe", None)
        return isinstance(table, Tensor) and not table.requires_grad and table.dim() == 3 and table.shape[0] == 1

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.token, min(5, m.position.pe.shape[1]))
        return [(ids, random_ids(m.segment, ids.shape[1])) if "segment" in m._modules else (ids,)]

    def fused_forward(self, m: Any, ids: Tensor, *labels: Tensor) -> Tensor | None:
        segment = m._modules.get("segment")
        x = embedded(ids, m.token, m.position.pe[0], 1.0, m.dropout if segment is None else None)
        if x is None or segment is None:
            return x
        return apply_dropout(m.dropout, x + segment(*labels))


class TokenEmbedding(Pattern):
    """Subclass of ``nn.Embedding`` that only changes the constructor."""

    parameters = frozenset(("weight",))
    bases = (Embedding,)
    roles = (LOOKS_UP,)

    def matches(self, m: Any) -> bool:
        if not isinstance(m, nn.Embedding) or type(m).forward is not nn.Embedding.forward or not super().matches(m):
            return False
        return not (m.max_norm is not None or m.sparse or m.scale_grad_by_freq)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(random_ids(m),)]

    def fused_forward(self, m: Any, ids: Tensor) -> Tensor | None:
        return ops.embed(ids, m.weight, padding_idx=m.padding_idx) if ids.dim() else None


PATTERNS = (
    Embedder(),
    Positional("Positional", "pe"),
    Positional("LengthFirstPositional", "pe", 0),
    D2L_POSITIONAL := Positional("D2lPositional", "P"),
    BertEmbedding(),
    TokenEmbedding(),
)
KNOWS = (
    (
        "embedding and positions: `lut` times sqrt(d), `pe`, `P`, `token` + `position` + `segment`",
        "The Annotated Transformer, d2l, BERT by hand",
    ),
)
