"""Keys and values of the positions decoded so far, so that a step computes one position and not the whole prefix.

`DecoderCache` is the cache of a `models.Decoder`. The rows of the cache are the open hypotheses, which all hold the
same number of positions. Self-attention has one tensor for all layers, which is doubled when it is full. Attention to
the source has another one, computed once, with one entry per sentence, which all hypotheses of the sentence share. A
hypothesis keeps its slot in the cache if possible, and only rows that move are copied. `enter` and `leave` convert
between the order of the caller's rows and that of the slots.

The fused step on a CPU copies no rows: a table of cells holds the place of each position, in the slot of the hypothesis
that wrote it. All slots hold the same number of positions, so a slot never overwrites what others read of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import extension, ops
from ..layers.attention import MultiHeadAttention
from ..layers.decoder import LayerCache
from ..masks import AttentionMask
from .weights import concat_linears

BLOCK = 64


class DecoderCache:
    """The cache of one batch, for a decoder of `transformer_fast`.

    Args:
        decoder: the decoder that is called with this cache.
        memory: (B, S, d_model), the encoder's outputs; row i is at first the only hypothesis of sentence i.
        mask: keep mask (B, 1, S) of the source, or None.
        rows: largest number of hypotheses.
        record: keep the last layer's attention to the source, as `weights`.

    Attributes:
        length: number of positions held.
        layers: pair of caches per layer.
        weights: with `record`, (rows, S) attention of the newest position to the source, the mean of the heads.
        cross: (layers, sentences, 2, heads, S, d_k), keys and values of the source.
    """

    weights: Tensor

    def __init__(
        self, decoder: nn.Module, memory: Tensor, mask: Tensor | None, *, rows: int, record: bool = False
    ) -> None:
        layers, batch = list(decoder.layers), memory.shape[0]
        self.length = 0
        self.record = record
        self._max_rows = max(rows, batch)
        self._states: Tensor | None = None  # (layers, max rows, 2, heads, capacity, d_k)
        self._in_cells = False  # True if the last step read the table of cells
        self._cells: Tensor | None = None  # (slots, capacity); None: each position lies in its own slot
        self._heads, self._width = layers[0].attn_1.h, layers[0].attn_1.d_k
        self._source_heads = layers[0].attn_2.h
        self._source = [concat_linears(layer.attn_2.k_linear, layer.attn_2.v_linear) for layer in layers]
        self.cross = self._source_states(memory)
        self._set_mask(None if mask is None else mask.squeeze(1))
        self._slots = list(range(batch))  # slot per caller's row
        self._sentences = list(range(batch))  # entry in `cross` per slot
        self._order: tuple[Tensor, Tensor] | None = None
        self.grid: tuple[Tensor, Tensor, int] | None = None
        me = weakref.proxy(self)  # A reference cycle would keep the cache until garbage is next collected.
        self.layers = [
            LayerCache(_SelfAttention(me, i, layer.attn_1, self._max_rows), _SourceAttention(me, i))
            for i, layer in enumerate(layers)
        ]

    def enter(self, tokens: Tensor) -> Tensor:
        """Reorder (rows, ...) from the caller's order to the order of the slots."""
        return tokens if self._order is None else tokens.index_select(0, self._order[0][: tokens.shape[0]])

    def leave(self, rows: Tensor) -> Tensor:
        """Reorder (rows, ...) from the order of the slots to the caller's order."""
        return rows if self._order is None else rows.index_select(0, self._order[1][: rows.shape[0]])

    def places(self) -> Tensor:
        """Slot of each of the caller's rows, (rows,)."""
        return torch.arange(len(self._slots)) if self._order is None else self._order[1]

    def select(self, rows: list[int]) -> None:
        """Reorder the caller's rows; a row that repeats forks its hypothesis."""
        parents = [self._slots[row] for row in rows]
        self._slots, moves = assign_slots(parents)
        sentences = [0] * len(parents)
        origins = [0] * len(parents)
        for slot, parent in zip(self._slots, parents, strict=True):
            sentences[slot], origins[slot] = self._sentences[parent], parent
        self._sentences = sentences
        if moves and self._states is not None:
            if self._in_cells:
                self._cells = self._own_cells() if self._cells is None else self._cells
                self._cells = self._cells[torch.tensor(origins)]
            else:
                self._move_into_slots()
                move_rows(self._states, moves, self.length)
        self._slots_changed()

    def stepped(self, steps: int = 1) -> None:
        """Count `steps` more positions in every row."""
        self.length += steps

    def own(self, rows: int) -> Tensor:
        """Keys and values of self-attention, (layers, max rows, 2, heads, capacity, d_k), with room for the newest
        positions.

        rows: how many are in use."""
        self._in_cells = False
        self._move_into_slots()
        return self._states_with_room(rows)

    def own_in_cells(self, rows: int, *, always: bool = False) -> tuple[Tensor, Tensor | None]:
        """Keys and values of self-attention and their table of cells, int32 (rows, capacity).

        An entry of the table is the place of a position, in units of d_k from the start of slot 0 in each layer and
        head. The table is None if every position lies in its own slot; with `always`, only if a table is impossible.
        """
        states = self._states_with_room(rows)
        self._in_cells = states[0].numel() < 2**31 * self._width  # an int32 can index all cells
        if always and self._cells is None and self._in_cells:
            self._cells = self._own_cells()
        return states, self._cells

    def attend_own(self, layer: int, q: Tensor, states: Tensor) -> Tensor:
        """Attend from q (rows, heads, 1, d_k) to all positions so far -> (rows, heads, 1, d_k).

        states: keys and values of the newest positions, (rows, 2, heads, d_k), which are stored first.
        """
        own = self.own(q.shape[0])[layer, : q.shape[0]]
        own[:, :, :, self.length] = states
        return ops.attention(q, *own[:, :, :, : self.length + 1].unbind(1))

    def attend_source(self, layer: int, q: Tensor) -> Tensor:
        """Attend from q (rows, 1, heads, d_k) to the source -> (rows, 1, heads, d_k)."""
        heads, width = q.shape[2:]
        if self.grid is None:
            q = q.view(-1, 1, heads, width)
        else:
            slots, entries, queries = self.grid
            q = q.index_select(0, slots).view(-1, queries, heads, width)
        k, v = self.cross[layer].unbind(1)
        if self.record and layer == len(self.layers) - 1:
            out, weights = ops.attention(q.transpose(1, 2), k, v, self.source_mask, return_weights=True)
            weights = weights.float().mean(dim=1).flatten(0, 1)
            self.weights = weights if self.grid is None else weights.index_select(0, entries)
        else:
            out = ops.attention(q.transpose(1, 2), k, v, self.source_mask)
        out = out.transpose(1, 2).reshape(-1, 1, heads, width)
        return out if self.grid is None else out.index_select(0, entries)

    def _source_states(self, memory: Tensor) -> Tensor:
        """Project memory (B, S, d_model) to keys and values (layers, B, 2, heads, S, d_k)."""
        heads = self._source_heads
        source = [project(memory).unflatten(-1, (2, heads, -1)) for project in self._source]
        return torch.stack([states.permute(0, 2, 3, 1, 4) for states in source])

    def _states_with_room(self, rows: int) -> Tensor:
        """States of self-attention, with room for one more position."""
        capacity = 0 if self._states is None else self._states.shape[4]
        if capacity <= self.length:
            self._grow(rows, max(2 * capacity, BLOCK))
        return self._states

    def _own_cells(self) -> Tensor:
        """Table of cells in which every position lies in its own slot."""
        slots, parts, heads, capacity = self._states.shape[1:5]
        first = torch.arange(slots, dtype=torch.int32) * (parts * heads * capacity)
        return first[:, None] + torch.arange(capacity, dtype=torch.int32)

    def _move_into_slots(self) -> None:
        """Copy every position into its own slot and drop the table of cells."""
        if self._cells is None:
            return
        layers, _, parts, heads, capacity, width = self._states.shape
        rows = len(self._cells)
        head = torch.arange(parts * heads) * capacity
        cells = self._cells[:, None, : self.length] + head[:, None]
        positions = self._states.view(layers, -1, width).index_select(1, cells.flatten())
        settled = positions.view(layers, rows, parts, heads, self.length, width)
        self._states[:, :rows, :, :, : self.length] = settled
        self._cells = None

    def _grow(self, rows: int, capacity: int) -> None:
        """Reallocate self-attention for `_max_rows` rows and `capacity` positions, with the contents of the first
        `rows` slots."""
        self._move_into_slots()
        shape = len(self.layers), self._max_rows, 2, self._heads, capacity, self._width
        known = None if self._states is None else self._states[:, :rows, :, :, : self.length]
        self._states = self.cross.new_empty(shape)
        if known is not None:
            self._states[:, :rows, :, :, : self.length] = known

    def _slots_changed(self) -> None:
        """Update everything that is derived from `_slots` and `_sentences`."""
        rows, device = len(self._slots), self.cross.device
        self._order = None
        if self._slots != list(range(rows)):
            slots = torch.tensor(self._slots)
            self._order = slots.argsort().to(device), slots.to(device)
        self._drop_sentences()
        self.grid = None if self._sentences == list(range(self.cross.shape[1])) else self._source_grid()

    def _drop_sentences(self) -> None:
        """Drop the sources that no row reads."""
        kept = sorted(set(self._sentences))
        if len(kept) == self.cross.shape[1]:
            return
        entries, moves = assign_slots(kept)
        _copy_rows(self.cross.unbind(0), moves)
        self.cross = self.cross[:, : len(kept)]
        if self._mask is not None:
            self._set_mask(self._mask[[sentence for _, sentence in sorted(zip(entries, kept, strict=True))]])
        moved = dict(zip(kept, entries, strict=True))
        self._sentences = [moved[sentence] for sentence in self._sentences]

    def _source_grid(self) -> tuple[Tensor, Tensor, int]:
        """Grid in which the rows of a sentence are the queries of one batch entry: slots (sentences * width,) to
        read, entry of each slot (rows,), and the width.

        An entry without a row repeats slot 0, and its result is not read.
        """
        sentences, device = self.cross.shape[1], self.cross.device
        counters = [itertools.count() for _ in range(sentences)]
        ranks = [next(counters[sentence]) for sentence in self._sentences]
        width = max(ranks) + 1
        entries = [sentence * width + rank for sentence, rank in zip(self._sentences, ranks, strict=True)]
        slots = [0] * (sentences * width)
        for slot, entry in enumerate(entries):
            slots[entry] = slot
        return torch.tensor(slots, device=device), torch.tensor(entries, device=device), width

    def _set_mask(self, mask: Tensor | None) -> None:
        """Store the mask (sentences, S). If the mask is equivalent to lengths, positions past the lengths are not
        read."""
        self._mask = mask
        self.source_lengths = lengths = None if mask is None else as_lengths(mask)
        self.source_mask: AttentionMask | None = None
        if mask is not None:
            keep = mask[:, None, None]
            self.source_mask = AttentionMask.keep(keep) if lengths is None else AttentionMask.lengths(lengths)


class _SelfAttention:
    """Self-attention of one layer: the newest query against all positions so far."""

    def __init__(self, cache: DecoderCache, layer: int, attention: MultiHeadAttention, rows: int) -> None:
        self._cache, self._layer = cache, layer
        self.project = concat_linears(attention.q_linear, attention.k_linear, attention.v_linear, rows=rows)

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        states = self.project(x).view(x.shape[0], 3, attention.h, attention.d_k)
        return self._cache.attend_own(self._layer, states[:, 0].unsqueeze(2), states[:, 1:]).reshape(x.shape)


class _SourceAttention:
    """Attention of one layer to the source."""

    def __init__(self, cache: DecoderCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        q = attention.q_linear(x).view(x.shape[0], 1, attention.h, attention.d_k)
        return self._cache.attend_source(self._layer, q).reshape(x.shape)


def as_lengths(mask: Tensor) -> Tensor | None:
    """Convert a keep mask (B, S) to lengths, int32 (B,), if it is only padding on the right; else None."""
    lengths = mask.sum(dim=1, dtype=torch.int32)
    padding = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    return lengths if torch.equal(mask, padding) else None


def assign_slots(parents: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Assign slots 0 .. len(parents) - 1 to children: each parent's first child keeps its slot, others get free
    slots.

    Returns the slots, and the required copies (from, to). No slot is both source and target: a source keeps its
    content, or is past the last slot.
    """
    count = len(parents)
    slots, taken = [-1] * count, [False] * count
    for child, parent in enumerate(parents):
        if parent < count and not taken[parent]:
            slots[child], taken[parent] = parent, True
    free = (slot for slot in range(count) if not taken[slot])
    moves = []
    for child, parent in enumerate(parents):
        if slots[child] < 0:
            slots[child] = next(free)
            moves.append((parent, slots[child]))
    return slots, moves


def move_rows(cache: Tensor, moves: list[tuple[int, int]], length: int) -> None:
    """Copy the first `length` positions of rows of a cache (layers, rows, 2, heads, capacity, d_k) to other rows."""
    if cache.device.type == "cpu" and extension.load():
        torch.ops.transformer_fast.copy_cache_rows(cache, *map(list, zip(*moves, strict=True)), length)
    else:
        _copy_rows(cache[..., :length, :].unbind(0), moves)


def _copy_rows(parts: Sequence[Tensor], moves: list[tuple[int, int]]) -> None:
    """Copy rows of each part, (rows, ...); all rows are read before one is written."""
    if moves:
        sources, targets = (torch.tensor(side, device=parts[0].device) for side in zip(*moves, strict=True))
        # Not index_select, which first copies the whole of a part that is not contiguous.
        for part in parts:
            part[targets] = part[sources]
