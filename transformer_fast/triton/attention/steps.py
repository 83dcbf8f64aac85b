"""Tile of a program of an attention kernel, rows of the tile, and the tiles that the program visits.

Three kinds of call run the same kernels. A padded call bounds its keys by limits (lengths, causal, the end of the keys)
and steps through the tiles within them by arithmetic. A call with a dense mask or with documents steps through lists
(see :mod:`.tile_map`). A packed call finds its sequence in `cu_seqlens` and then works like a padded call; with
documents it steps from the first to the last tile that shares a document.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .mask import DOCUMENTS, LENGTHS, WINDOW, first_visible, query_rows
from .tiles import store_rows

FLAG_ROWS = tl.constexpr(16)
"""Rows per flag: the smallest tile of queries."""

# Number of ids per load when a program searches for the ids of its tile.
_SCAN = tl.constexpr(1024)


class Sequence(NamedTuple):
    """A batch entry, or a sequence of a packed batch.

    Args:
        batch: its number.
        first_query, first_key: its first rows of q, and of k; 0 for a padded batch.
        queries, keys: its numbers of queries, and of keys in use.
        causal_offset, window, distance_zero: offsets for its own positions; window is 0 for None.
        bias, bias_query: pointer to its bias, arbitrary for None, and stride of its queries there.
    """

    batch: tl.tensor
    first_query: tl.tensor
    first_key: tl.tensor
    queries: tl.tensor
    keys: tl.tensor
    causal_offset: tl.tensor
    window: tl.tensor
    distance_zero: tl.tensor
    bias: tl.tensor
    bias_query: tl.tensor


class Steps(NamedTuple):
    """Steps of a program over tiles: `end` steps. Steps from `full` up to `full_end` (exclusive) need no mask. Without
    a list, the first step is at tile `first`, and each next step at the next tile."""

    first: tl.tensor
    full: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


@triton.jit
def program_of(heads, rows, batch_order, BLOCK: tl.constexpr):
    """Return (batch, head, block) of this program, with one program per batch, head and block of rows.

    An order of batches maps the program's number to a batch.
    """
    blocks = tl.cdiv(rows, BLOCK)
    batch = tl.program_id(0) // blocks // heads
    if batch_order is not None:
        batch = tl.load(batch_order + batch)
    return batch, tl.program_id(0) // blocks % heads, tl.program_id(0) % blocks


@triton.jit
def sequence_rows(cu_seqlens, batch, length, total):
    """Return (first row, number of rows) of a sequence of a packed batch; without `cu_seqlens` (padded): (0, length).

    Both stay within the `total` rows, whatever `cu_seqlens` holds: on a GPU nobody has read it before.
    """
    if cu_seqlens is None:
        return tl.full((), 0, tl.int32), length
    else:
        first = _row_at(cu_seqlens + batch, 0, total)
        return first, tl.minimum(_row_at(cu_seqlens + batch + 1, first, total) - first, length)


@triton.jit
def _row_at(place, least, total):
    return tl.minimum(tl.maximum(tl.load(place), least), total.to(tl.int32))


@triton.jit
def fill_gap(
    base, row_stride, logsumexp, cu_seqlens, batch, batches, first, count, total,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store zeros, and -inf in logsumexp unless it is None, in rows of a head that no sequence of a packed batch
    covers: from the end of this sequence to the begin of the next one, and in front of the first sequence."""
    end = tl.where(batch == batches - 1, total.to(tl.int32), _row_at(cu_seqlens + batch + 1, first, total))
    _fill_rows(base, row_stride, logsumexp, first + count, end, ROWS, HEAD_DIM, BLOCK_D, UNIT)
    _fill_rows(base, row_stride, logsumexp, 0, tl.where(batch == 0, first, 0), ROWS, HEAD_DIM, BLOCK_D, UNIT)


@triton.jit
def _fill_rows(
    base, row_stride, logsumexp, start, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, end, ROWS, num_stages=1):
        store_rows(
            base, tl.zeros((ROWS, BLOCK_D), tl.float32), first, end, row_stride, ROWS, HEAD_DIM, BLOCK_D, UNIT
        )  # fmt: skip
        if logsumexp is not None:
            row = first + tl.arange(0, ROWS)
            tl.store(logsumexp + row, tl.full((ROWS,), float("-inf"), tl.float32), mask=row < end)


@triton.jit
def used_keys(seqused_k, bias_starts, batch, queries, stored_keys, pairs):
    """Number of a sequence's keys in use; without `seqused_k`, all stored keys. None if the sequence's part of the bias
    is not within its `pairs`."""
    used = stored_keys
    if seqused_k is not None:
        used = tl.minimum(tl.maximum(tl.load(seqused_k + batch), 0), stored_keys)
    if bias_starts is not None:
        start = tl.load(bias_starts + batch)
        used = tl.where((start >= 0) & (start + queries.to(tl.int64) * stored_keys <= pairs), used, 0)
    return used


@triton.jit
def open_sequence(
    batch, queries, keys, total_queries, total_keys, pairs, causal_offset, window, distance_zero, bias, bias_query,
    cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, anything, BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """:class:`Sequence` of a batch, from the kernel's arguments. `anything`: see :func:`~.mask.open_bounds`."""
    first_query, queries = sequence_rows(cu_seqlens_q, batch, queries, total_queries)
    first_key, stored_keys = sequence_rows(cu_seqlens_k, batch, keys, total_keys)
    keys = used_keys(seqused_k, bias_starts, batch, queries, stored_keys, pairs)
    if window is None:
        window = 0
    if BOTTOM_RIGHT:  # the last query is aligned with the last key
        causal_offset += keys - queries
        window += keys - queries
        distance_zero += queries - keys
    if bias is None:
        bias = anything
    elif bias_starts is not None:
        bias += tl.load(bias_starts + batch)
    if bias_starts is not None:
        bias_query = stored_keys.to(tl.int64)
    return Sequence(
        batch, first_query, first_key, queries, keys, causal_offset, window, distance_zero, bias, bias_query
    )


@triton.jit
def statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query):
    """Offset of a sequence's rows in a tensor (B, H, Lq) with one number per row, or (H, Tq) for a packed batch."""
    if cu_seqlens_q is None:
        return (batch * heads + head).to(tl.int64) * total_queries
    else:
        return head.to(tl.int64) * total_queries + first_query


@triton.jit
def flag_row(cu_seqlens_q, batch, head, heads, first_query, queries):
    """Offset of a sequence's flags, one per FLAG_ROWS rows, in (B, H, cdiv(Lq, FLAG_ROWS)).

    A packed batch has H * (Tq // FLAG_ROWS + B) flags, because the last flag of a sequence may cover fewer rows.
    """
    flags = tl.cdiv(queries, FLAG_ROWS)
    if cu_seqlens_q is None:
        return (batch * heads + head).to(tl.int64) * flags
    else:
        return (first_query // FLAG_ROWS + batch).to(tl.int64) * heads + head * flags


@triton.jit
def _shared_range(ids, count, own):
    """Return (first, end) of the range whose ids lie between the smallest and the largest id of a tile."""
    low = tl.min(own, 0)
    high = tl.max(own, 0)
    first = tl.full((_SCAN,), 0, tl.int32) + count
    end = tl.zeros((_SCAN,), tl.int32)
    for start in tl.range(0, count, _SCAN):
        place = start + tl.arange(0, _SCAN)
        other = tl.load(ids + place, mask=place < count, other=0)
        shared = (place < count) & (other >= low) & (other <= high)
        first = tl.minimum(first, tl.where(shared, place, count))
        end = tl.maximum(end, tl.where(shared, place + 1, 0))
    return tl.min(first, 0), tl.max(end, 0)


@triton.jit
def key_steps(
    tile_counts, tile_row, start_query, limit, last_key, bounds, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Steps of a tile of queries over tiles of keys. With a window, both edges need the mask; with documents and no
    map, all tiles need the mask."""
    if tile_counts is not None:
        return _listed_steps(tile_counts, tile_row)
    elif DOCUMENTS & PARTS:
        own = tl.load(bounds.query_ids + query_rows(start_query, bounds, BLOCK_QUERIES))
        first_key, end_key = _shared_range(bounds.key_ids, bounds.keys, own)
        first = tl.maximum(first_key, first_visible(start_query, bounds, PARTS)) // BLOCK_KEYS
        end = tl.cdiv(tl.minimum(end_key, last_key), BLOCK_KEYS)
        return Steps(first, 0, 0, tl.maximum(end - first, 0))
    else:
        full_end = tl.maximum(tl.min(limit, 0), 0) // BLOCK_KEYS
        end = tl.cdiv(last_key, BLOCK_KEYS)
        if not WINDOW & PARTS:
            return Steps(0, 0, full_end, end)
        else:
            first_key = first_visible(start_query, bounds, PARTS)
            first = first_key // BLOCK_KEYS
            last_row = tl.minimum(start_query + BLOCK_QUERIES, bounds.queries) - 1
            full = tl.cdiv(first_visible(last_row, bounds, PARTS), BLOCK_KEYS)
            return Steps(first, full - first, full_end - first, tl.where(first_key < last_key, end - first, 0))


@triton.jit
def query_steps(
    tile_counts, tile_row, start_key, bounds, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Steps of a tile of keys over tiles of queries. Under a causal mask the edge comes first."""
    if tile_counts is not None:
        return _listed_steps(tile_counts, tile_row)
    else:
        end_key = start_key + BLOCK_KEYS
        length = bounds.keys
        uniform_length = True
        if LENGTHS & PARTS:
            uniform_length = bounds.lengths_query == 0
            length = tl.where(uniform_length, tl.load(bounds.lengths), bounds.keys)
        tiles = tl.cdiv(bounds.queries, BLOCK_QUERIES)
        first_row = tl.maximum(start_key - bounds.causal_offset, 0)
        first = first_row // BLOCK_QUERIES
        full = tl.cdiv(tl.maximum(end_key - 1 - bounds.causal_offset, 0), BLOCK_QUERIES) - first
        full = tl.where(uniform_length & (end_key <= length), full, tiles)
        visible = (start_key < length) & (first_row < bounds.queries)
        full_end = tiles - first
        end = full_end
        if WINDOW & PARTS:
            # Because of the window, queries from here on see only later keys.
            past = tl.maximum(tl.minimum(end_key, length) - bounds.window, 0)
            full_end = tl.maximum(start_key + 1 - bounds.window, 0) // BLOCK_QUERIES - first
            end = tl.minimum(end, tl.cdiv(past, BLOCK_QUERIES) - first)
        end = tl.where(visible, end, 0)
        if DOCUMENTS & PARTS:
            key = tl.minimum(start_key + tl.arange(0, BLOCK_KEYS), bounds.keys - 1)
            shared, past = _shared_range(bounds.query_ids, bounds.queries, tl.load(bounds.key_ids + key))
            shared = tl.maximum(shared // BLOCK_QUERIES, first)
            end = tl.minimum(first + end, tl.cdiv(past, BLOCK_QUERIES)) - shared
            return Steps(shared, end, end, end)
        else:
            return Steps(first, full, full_end, end)


@triton.jit
def _listed_steps(tile_counts, tile_row):
    full = tl.load(tile_counts + tile_row * 2)
    return Steps(0, 0, full, full + tl.load(tile_counts + tile_row * 2 + 1))


@triton.jit
def at_edge(step, steps, FRONT: tl.constexpr, BACK: tl.constexpr):
    """Return True if the tile of a step needs the mask; flags say if steps in front or at the back may need it."""
    if FRONT and BACK:
        return (step < steps.full) | (step >= steps.full_end)
    elif FRONT:
        return step < steps.full
    else:
        return step >= steps.full_end


@triton.jit
def tile_at(tile_list, step, steps, across):
    """Tile at a step: from the list (full tiles from the front, partial tiles backwards from the end), or the next tile
    without a list."""
    if tile_list is None:
        return steps.first + step
    else:
        return tl.load(tile_list + tl.where(step < steps.full_end, step, across - 1 - (step - steps.full_end)))
