"""Calls by which a hand-written module is tried: sizes, masks that hide the first key, and sentences without a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Calls = list[tuple[Any, ...]]
Mask = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a call.

    Attributes:
        batch, queries, keys: number of sentences, of their positions, and of positions of other inputs.
        empty: True hides every key of the last of several sentences, and of the last query of the first one.
        trains: True tries training, too, with gradients.
        generator: source of the random numbers.
    """

    batch: int
    queries: int
    keys: int
    empty: bool = False
    trains: bool = False
    generator: Any = None

    @property
    def own(self) -> Size:
        """The size of self-attention, whose keys are the queries."""
        return dataclasses.replace(self, keys=self.queries)

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32)

    def x(self, width: int) -> Tensor:
        """Random inputs (batch, queries, width)."""
        return self.normal(self.batch, self.queries, width)

    def memory(self, width: int) -> Tensor:
        """Random inputs (batch, keys, width)."""
        return self.normal(self.batch, self.keys, width)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def ids(self, embedding: Any) -> Tensor:
        """Random ids (batch, queries); the first is the padding, if the embedding has one."""
        found = self.integers(0, embedding.weight.shape[0], self.batch, self.queries)
        if embedding.padding_idx is not None:
            found[0, 0] = embedding.padding_idx
        return found

    def keep(self, queries: int = 1) -> Tensor:
        """Keep mask (batch, queries, keys) that hides the first key of the first sentence."""
        keep = torch.rand(self.batch, queries, self.keys, generator=self.generator, dtype=torch.float32) > 0.4
        keep[..., 0] = True
        if self.keys > 1:
            keep[0, :, 0], keep[0, :, -1] = False, True
        if self.empty and queries > 1:
            keep[0, -1] = False
        if self.empty and self.batch > 1:
            keep[-1] = False
        return keep

    def look_ahead(self) -> Tensor:
        """Keep mask (batch, queries, queries) of look-ahead and padding; the first position may be padding."""
        ahead = torch.ones(1, self.queries, self.queries, dtype=torch.bool).tril()
        return ahead & self.own.keep() if self.empty else ahead

    def lengths(self, keys: int) -> list[Tensor | None]:
        """Lengths: none, per sentence, and per query."""
        least = 0 if self.empty else 1
        sentences = self.integers(1, keys + 1, self.batch)
        sentences[0] = keys + 3
        if self.batch > 1:
            sentences[-1] = least
        return [None, sentences, self.integers(least, keys + 1, self.batch, self.queries)]


FULL = (
    Size(2, 7, 5, trains=True),
    Size(4, 4, 4, empty=True, trains=True),
    Size(1, 1, 1),
    Size(2, 2, 3, empty=True),
    Size(1, 300, 300),
)
"""Sizes for the first module of a class with the same attributes."""
SMALL = Size(3, 3, 3, empty=True)
"""Size for each further one."""


def same(keep: Tensor) -> Tensor:
    """Keep mask (B, Lq, Lk)."""
    return keep


def with_head_axis(keep: Tensor) -> Tensor:
    """Keep mask (B, 1, Lq, Lk)."""
    return keep.unsqueeze(1)


def blocked(keep: Tensor) -> Tensor:
    """Mask of TensorFlow's tutorial."""
    return 1.0 - keep.unsqueeze(1).float()


def attention(size: Size, widths: Sequence[int], mask: Mask = same) -> Calls:
    """Calls (q, k, v, mask) with a mask (B, 1, Lk) or (B, Lq, Lk)."""
    q, k, v = size.x(widths[0]), size.memory(widths[1]), size.memory(widths[2])
    return [(q, k, v), (q, k, v, mask(size.keep())), (q, k, v, mask(size.keep(size.queries)))]


def tensorflow_attention(size: Size, widths: Sequence[int]) -> Calls:
    """Calls (v, k, q, mask)."""
    v, k, q = size.memory(widths[2]), size.memory(widths[1]), size.x(widths[0])
    return [(v, k, q, None), (v, k, q, blocked(size.keep(size.queries))[0, 0]), (v, k, q, blocked(size.keep()))]


def d2l_attention(size: Size, widths: Sequence[int]) -> Calls:
    """Calls (q, k, v, lengths)."""
    q, k, v = size.x(widths[0]), size.memory(widths[1]), size.memory(widths[2])
    return [(q, k, v, lengths) for lengths in size.lengths(size.keys)]


def layer(
    size: Size, width: Any, decodes: bool, embedding: Any = None, mask: Mask = same, swapped: bool = False
) -> Calls:
    """Calls (x, mask) of a layer or stack; of a decoder (x, memory, src_mask, trg_mask), or ``swapped`` masks.

    With an ``embedding``, x are ids.
    """
    x = size.x(width) if embedding is None else size.ids(embedding)
    if not decodes:
        return [(x, None), (x, mask(size.own.keep()))]
    memory, masks = size.memory(width), (mask(size.keep()), mask(size.look_ahead()))
    return [(x, memory, None, None), (x, memory, *(masks[::-1] if swapped else masks))]


def d2l_layer(size: Size, width: int, blocks: int, embedding: Any = None) -> Calls:
    """Calls (x, lengths) of a layer or stack; of a decoder with ``blocks`` (x, state), with and without inputs seen
    before."""
    x = size.x(width) if embedding is None else size.ids(embedding)
    if not blocks:
        return [(x, lengths) for lengths in size.lengths(size.queries)]
    memory, seen = size.memory(width), size.normal(size.batch, 3, width)
    states = zip(size.lengths(size.keys), (None, None, seen))
    return [(x, [memory, lengths, [known] * blocks]) for lengths, known in states]
