"""Keys and values that decoding has computed already, so that a step costs one position and not the whole prefix.

`DecoderCache` serves `models.Decoder`. Its rows are the open hypotheses. Self-attention has one tensor for all layers,
preallocated and doubled when it is full; attention to the source has one more, computed once, with one entry for each
*sentence*, which all its hypotheses share. The order of the rows is the cache's own business: a survivor keeps its
place where it can, and only rows that moved are copied; `rows` says where the caller's rows stand.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import extension, ops
from ..layers.attention import MultiHeadAttention
from ..layers.decoder import LayerCache
from ..masks import AttentionMask
from .weights import joined

BLOCK = 64


class DecoderCache:
    """The cache of one batch, for a decoder of `transformer_fast`.

    Args:
        decoder: whose layers will be given `self.layers`.
        memory: (B, S, d_model), the encoder's outputs; row i is at first the only hypothesis of sentence i.
        mask: keep mask (B, 1, S) of the source, or None.
        rows: how many hypotheses there will be at most.
        record: keep the last layer's attention to the source, as `weights`.

    Attributes:
        length: positions held.
        layers: for each layer the pair of caches that it takes.
        weights: (rows, S) attention of the newest position to the source, the mean of the heads, or None.
    """

    def __init__(
        self, decoder: nn.Module, memory: Tensor, mask: Tensor | None, *, rows: int, record: bool = False
    ) -> None:
        self.length = 0
        self.records = record
        self.weights: Tensor | None = None
        self._most_rows = max(rows, memory.shape[0])
        self._states: Tensor | None = None  # (layers, rows, 2, heads, capacity, d_k)
        layers = list(decoder.layers)
        self._heads, self._width = layers[0].attn_1.h, layers[0].attn_1.d_k
        known = []
        for layer in layers:
            states = joined(layer.attn_2.k_linear, layer.attn_2.v_linear)(memory)
            known.append(states.unflatten(-1, (2, layer.attn_2.h, -1)).permute(0, 2, 3, 1, 4))
        self.cross = torch.stack(known)  # (layers, B, 2, heads, S, d_k)
        self._mask = None if mask is None else mask.squeeze(1).clone()  # its rows will move; the caller's must not
        self._set_mask()
        batch = memory.shape[0]
        self._slots = list(range(batch))  # of the caller's rows
        self._sentences = list(range(batch))  # of the slots: where in _cross
        self._order: tuple[Tensor, Tensor] | None = None
        self.grid: tuple[Tensor, Tensor, int] | None = None
        me = weakref.proxy(self)  # no circle: what was cached is free at once, not when garbage is next collected
        self.layers = [
            LayerCache(_Own(me, i, layer.attn_1, self._most_rows), _Cross(me, i, record and i == len(layers) - 1))
            for i, layer in enumerate(layers)
        ]

    def enter(self, tokens: Tensor) -> Tensor:
        """(rows,) in the caller's order -> the order of the cache."""
        return tokens if self._order is None else tokens.index_select(0, self._order[0])

    def leave(self, rows: Tensor) -> Tensor:
        """(rows, ...) in the order of the cache -> the caller's."""
        return rows if self._order is None else rows.index_select(0, self._order[1])

    def select(self, rows: list[int]) -> None:
        """Keep these of the caller's rows, in this order; one named several times is continued several times."""
        parents = [self._slots[row] for row in rows]
        slots, moves = assign_slots(parents)
        sentences = [0] * len(slots)
        for slot, parent in zip(slots, parents, strict=True):
            sentences[slot] = self._sentences[parent]
        if moves and self._states is not None:
            move_rows(self._states, moves, self.length)
        self._slots = slots
        self._order = None if slots == list(range(len(slots))) else self._orders(slots)
        self._sentences = self._leave_sentences(sentences)
        self.grid = None
        if self._sentences != list(range(self.cross.shape[1])):
            self.grid = self._new_grid()

    def append(self, layer: int, states: Tensor) -> Tensor:
        """(rows, 2, heads, d_k), keys and values of the newest position -> all of them, (rows, 2, heads, L, d_k)."""
        rows, length = states.shape[0], self.length
        own = self.own(rows)[layer, :rows]
        own[:, :, :, length] = states
        return own[:, :, :, : length + 1]

    def own(self, rows: int) -> Tensor:
        """Keys and values of self-attention, (layers, most rows, 2, heads, capacity, d_k), with room for one more."""
        if self._states is None or self._states.shape[4] <= self.length:
            capacity = BLOCK if self._states is None else 2 * self._states.shape[4]
            grown = self.cross.new_empty(len(self.layers), self._most_rows, 2, self._heads, capacity, self._width)
            if self._states is not None:
                grown[:, :rows, :, :, : self.length] = self._states[:, :rows, :, :, : self.length]
            self._states = grown
        return self._states

    def _orders(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        leaving = torch.tensor(slots)
        return leaving.argsort().to(self.cross.device), leaving.to(self.cross.device)

    def _leave_sentences(self, sentences: list[int]) -> list[int]:
        """Drop the sources that no row reads any more; (slots,) places in _cross, before and after."""
        kept = sorted(set(sentences))
        if len(kept) == self.cross.shape[1]:
            return sentences
        places, moves = assign_slots(kept)
        _move(self.cross.unbind(0), moves)
        self.cross = self.cross[:, : len(kept)]
        if self._mask is not None:
            _move([self._mask], moves)
            self._mask = self._mask[: len(kept)]
        self._set_mask()
        moved = dict(zip(kept, places, strict=True))
        return [moved[sentence] for sentence in sentences]

    def _new_grid(self) -> tuple[Tensor, Tensor, int]:
        """Where the rows of each sentence stand: slots (sentences * width,), places of the slots in it, width.

        An entry without a row repeats row 0; nobody reads what it gets.
        """
        seen = [0] * self.cross.shape[1]
        ranks = []
        for sentence in self._sentences:
            ranks.append(seen[sentence])
            seen[sentence] += 1
        width = max(seen)
        places = [sentence * width + rank for sentence, rank in zip(self._sentences, ranks, strict=True)]
        slots = [0] * (len(seen) * width)
        for slot, place in enumerate(places):
            slots[place] = slot
        device = self.cross.device
        return torch.tensor(slots, device=device), torch.tensor(places, device=device), width

    def _set_mask(self) -> None:
        """Lengths where the mask says no more: what lies past them is then not even read."""
        self.source_mask: AttentionMask | None = None
        self.source_lengths: Tensor | None = None
        if self._mask is None:
            return
        lengths = self._mask.sum(dim=1, dtype=torch.int32)
        if torch.equal(self._mask, torch.arange(self._mask.shape[1], device=lengths.device) < lengths[:, None]):
            self.source_lengths = lengths
            self.source_mask = AttentionMask.lengths(lengths)
        else:
            self.source_mask = AttentionMask.keep(self._mask[:, None, None])

    @property
    def mask_is_general(self) -> bool:
        """Whether the source's mask says more than lengths."""
        return self.source_mask is not None and self.source_lengths is None

    def read_source(self, layer: int, q: Tensor, heads: int, record: bool) -> Tensor:
        """q (rows, 1, d_model) -> its attention to the source, of the same shape."""
        width = q.shape[-1]
        grid = self.grid
        queries = 1 if grid is None else grid[2]
        q = (q if grid is None else q.index_select(0, grid[0])).view(-1, queries, heads, width // heads)
        k, v = self.cross[layer].unbind(1)
        if record:
            out, weights = ops.attention(q.transpose(1, 2), k, v, self.source_mask, return_weights=True)
            weights = weights.float().mean(dim=1).flatten(0, 1)
            self.weights = weights if grid is None else weights.index_select(0, grid[1])
        else:
            out = ops.attention(q.transpose(1, 2), k, v, self.source_mask)
        out = out.transpose(1, 2).reshape(-1, 1, width)
        return out if grid is None else out.index_select(0, grid[1])


class _Own:
    """Self-attention of one layer: the newest query against all positions so far."""

    def __init__(self, cache: DecoderCache, layer: int, attention: MultiHeadAttention, rows: int) -> None:
        self._cache, self._layer = cache, layer
        self.project = joined(attention.q_linear, attention.k_linear, attention.v_linear, rows=rows)

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        rows, _, width = x.shape
        projected = self.project(x)
        states = projected.view(rows, 3, attention.h, attention.d_k)
        k, v = self._cache.append(self._layer, states[:, 1:]).unbind(1)
        return ops.attention(states[:, 0].unsqueeze(2), k, v).view(rows, 1, width)


class _Cross:
    """Attention of one layer to the source."""

    def __init__(self, cache: DecoderCache, layer: int, record: bool) -> None:
        self._cache, self._layer, self._record = cache, layer, record

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        return self._cache.read_source(self._layer, attention.q_linear(x), attention.h, self._record)


def assign_slots(parents: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """New places 0 .. len(parents) - 1: each parent keeps its own for its first child, others take what is left.

    Returns the places, and which copies that needs: (from, to). No place is both: what is copied from stays where it
    is, or lies past the last place.
    """
    count = len(parents)
    places, taken = [-1] * count, [False] * count
    for child, parent in enumerate(parents):
        if parent < count and not taken[parent]:
            places[child], taken[parent] = parent, True
    left = (place for place in range(count) if not taken[place])
    moves = []
    for child, parent in enumerate(parents):
        if places[child] < 0:
            places[child] = next(left)
            moves.append((parent, places[child]))
    return places, moves


def move_rows(cache: Tensor, moves: list[tuple[int, int]], length: int) -> None:
    """The first `length` positions of rows of a cache (layers, rows, 2, heads, capacity, d_k), to other rows."""
    if cache.device.type == "cpu" and extension.load():
        torch.ops.transformer_fast.copy_cache_rows(cache, *map(list, zip(*moves, strict=True)), length)
    else:
        _move(cache[..., :length, :].unbind(0), moves)


def _move(parts: Sequence[Tensor], moves: list[tuple[int, int]]) -> None:
    """Copy rows of each part, (rows, ...), all read before one is written."""
    if moves:
        sources, targets = (torch.tensor(side, device=parts[0].device) for side in zip(*moves, strict=True))
        # Not index_select: of a part that is not contiguous it copies the whole first.
        for part in parts:
            part[targets] = part[sources]
