"""``Combined``: the parts of a mask, their combination, and what the whole mask says."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from .checks import MANY, may_be_keep, not_a_mask
from .definition import either, inside, visible
from .distance import DistanceBias, along_diagonals, distance_table
from .parts import both_documents, combine, shorter, written


def parts_of(mask: Any) -> tuple[str, ...]:
    """Names of the parts that a mask may have, in the order of its fields."""
    return tuple(field.name for field in dataclasses.fields(mask) if field.name != "has_clear_lengths")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Combined:
    """Parts of an ``AttentionMask``; None or () for a part that the mask does not have."""

    keep_mask: Tensor | None = None
    key_keep_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    causal_offset: int | None = None
    additive_bias: Tensor | None = None
    window_offset: int | None = None
    document_ids: tuple[Tensor, Tensor] | None = None
    distance_biases: tuple[DistanceBias, ...] = ()
    first_keys: Tensor | None = None
    end_keys: Tensor | None = None
    unions: tuple[tuple[Self, ...], ...] = ()
    has_clear_lengths: bool | None = None
    """True for lengths that were combined, of which none may be a keep mask; no part."""

    def __and__(self, other: Self) -> Self:
        """Keys that both masks allow; biases add up.

        Raises:
            TypeError: for a tensor, whose meaning is ambiguous; the message lists the constructors to choose from.
        """
        if not isinstance(other, Combined):
            raise not_a_mask(other)
        return type(self)(
            combine("keep", self.keep_mask, other.keep_mask, torch.logical_and),
            combine("keep", self.key_keep_mask, other.key_keep_mask, torch.logical_and),
            combine("lengths", self.key_lengths, other.key_lengths, shorter),
            combine("causal", self.causal_offset, other.causal_offset, min),
            combine("bias", self.additive_bias, other.additive_bias, torch.add),
            combine("window", self.window_offset, other.window_offset, max),
            combine("documents", self.document_ids, other.document_ids, both_documents),
            self.distance_biases + other.distance_biases,
            combine("intervals", self.first_keys, other.first_keys, torch.maximum),
            combine("intervals", self.end_keys, other.end_keys, torch.minimum),
            self.unions + other.unions,
            self._has_clear_lengths(other),
        )

    def __or__(self, other: Self) -> Self:
        """Keys that one of the masks allows, or both. A union whose masks all begin at key 0 reaches the kernels as
        lengths per query, another one as a keep mask of a byte per query and key.

        Raises:
            TypeError: for a tensor, as ``&`` does.
            ValueError: for a mask with a bias; add the bias to the union with ``&``.

        Example:
            >>> first = tfast.AttentionMask.lengths(torch.tensor([1]))  # all see key 0
            >>> (first | tfast.AttentionMask.window(0)).dense(3, 3)[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 0, 1]], dtype=torch.int32)
        """
        if not isinstance(other, Combined):
            raise not_a_mask(other, "|")
        for mask in (self, other):
            if mask.additive_bias is not None or mask.distance_biases:
                raise ValueError(f"a union has no bias, got {mask}; add the bias to the union: (a | b) & bias")
        return type(self)(unions=((*self._alternatives(), *other._alternatives()),))

    def __ror__(self, other: object) -> Self:
        """Raise for ``tensor | mask`` the error of ``mask | tensor``."""
        raise not_a_mask(other, "|")

    def __repr__(self) -> str:
        """Constructors that make the mask, such as ``lengths(int64 (2,)) & causal()``; a tensor is shown by dtype and
        shape."""
        return written(**{name: getattr(self, name) for name in parts_of(self)})

    def __rand__(self, other: object) -> Self:
        """Raise for ``tensor & mask`` the error of ``mask & tensor``."""
        raise not_a_mask(other)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the mask, by name: parts that are tensors, and tensors inside other parts."""
        parts = ((name, getattr(self, name)) for name in parts_of(self))
        tensors = {name: part for name, part in parts if isinstance(part, Tensor)}
        if self.document_ids is not None:
            tensors |= dict(zip(("query_ids", "key_ids"), self.document_ids, strict=True))
        for n, union in enumerate(self.unions):
            for m, mask in enumerate(union):
                tensors |= {f"union {n}.{m} {name}": t for name, t in mask.tensors().items()}
        return tensors | {
            f"{type(bias).__name__.lower()} {n}": bias.tensor for n, bias in enumerate(self.distance_biases)
        }

    def to(self, device: torch.device | str) -> Self:
        """The same mask with its tensors on ``device``."""
        fields = {field.name for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: part.to(device) for name, part in self.tensors().items() if name in fields}
        if self.document_ids is not None:
            moved["document_ids"] = tuple(ids.to(device) for ids in self.document_ids)
        moved["distance_biases"] = tuple(bias.with_tensor(bias.tensor.to(device)) for bias in self.distance_biases)
        moved["unions"] = tuple(tuple(mask.to(device) for mask in union) for union in self.unions)
        return dataclasses.replace(self, **moved)

    def dense(self, Lq: int, Lk: int, device: torch.device | str | None = None) -> Tensor:
        """The whole mask as one bool keep tensor, broadcastable to (B, H, Lq, Lk), for tests and pictures."""
        allowed = self.visible(Lq, Lk, next((t.device for t in self.tensors().values()), device))
        return allowed if self.additive_bias is None else allowed & (self.additive_bias != float("-inf"))

    @property
    def has_ranges(self) -> bool:
        """True for a mask with parts that reach the kernels as lengths or as a keep mask."""
        return self.first_keys is not None or self.end_keys is not None or len(self.unions) > 0

    def visible(self, Lq: int, Lk: int, device: torch.device | str | None, shift: int | Tensor = 0) -> Tensor:
        """The parts without biases by their :func:`~.definition.visible`, with its ``device`` and ``shift``."""
        ids = dict(zip(("query_ids", "key_ids"), self.document_ids or (), strict=False))
        others = [either([mask.visible(Lq, Lk, device, shift) for mask in union]) for union in self.unions]
        if self.first_keys is not None or self.end_keys is not None:
            others.append(inside(self.first_keys, self.end_keys, Lk))
        return visible(
            Lq, Lk, device, keep=self.keep_mask, key_keep=self.key_keep_mask, lengths=self.key_lengths,
            causal=self.causal_offset, window=self.window_offset, others=others, shift=shift, **ids,
        )  # fmt: skip

    def added(self, Lq: int, Lk: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Sum of all biases as one tensor, broadcastable to (B, H, Lq, Lk), for tests and pictures."""
        table = self.table(Lq, Lk, dtype)
        if table is None:
            return self.additive_bias
        by_distance = along_diagonals(table, Lq, Lk, Lq - 1)
        return by_distance if self.additive_bias is None else self.additive_bias + by_distance

    def table(self, Lq: int, Lk: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Sum of ALiBi and relative positions, by distance: (B|1, H, Lq + Lk - 1), entry ``Lq - 1 + j - i`` for query
        i and key j."""
        return distance_table(self.distance_biases, Lq, Lk, Lq - 1, dtype)

    def _has_clear_lengths(self, other: Self) -> bool | None:
        a, b = self.key_lengths, other.key_lengths
        if a is None or b is None:
            return self.has_clear_lengths if b is None else other.has_clear_lengths
        pairs = (a, self.has_clear_lengths), (b, other.has_clear_lengths)
        return True if all(clear or not may_be_keep(lengths, MANY) for lengths, clear in pairs) else None

    def _alternatives(self) -> tuple[Self, ...]:
        """The masks of a union; a mask that is not one union alone is itself one of several."""
        others = (getattr(self, name) for name in parts_of(self) if name != "unions")
        alone = len(self.unions) == 1 and all(part is None or part == () for part in others)
        return self.unions[0] if alone else (self,)
