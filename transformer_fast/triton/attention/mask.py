"""What a query may see: the mask arithmetic of every attention kernel.

Every part of a mask that is a bound on the key number - lengths, causal, the end of the keys - is folded
into one number a query, its limit: key j is visible iff ``j < limit``. So a tile is full, partial or empty by
comparing two integers, and only what has a value per (query, key) - keep masks, additive bias - is read.

A window bounds the keys from below, too: key j is visible to query i only if ``j >= i + window``. A call without a
window (None) compiles to what it would be without any of this.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Bounds(NamedTuple):
    """The bounds on the keys of one batch, or one sequence of a packed batch.

    Args:
        lengths: pointer to the batch's first length, or None.
        lengths_query: stride from query to query; 0 for one length for all.
        causal_offset: query i sees keys j <= i + causal_offset.
        window: query i sees keys j >= i + window; None for no such bound.
        queries, keys: how many there are.
    """

    lengths: tl.tensor
    lengths_query: tl.tensor
    causal_offset: tl.tensor
    window: tl.tensor
    queries: tl.tensor
    keys: tl.tensor


class Mask(NamedTuple):
    """The mask of one (batch, head); its pointers are None where there is none.

    Args:
        bounds: those of the batch.
        keep, keep_query, keep_word: bits of a dense mask (:mod:`.tile_map`), stride of queries in chunks of 8 words,
            and of words.
        key_keep: bits of a mask on keys alone.
        bias, bias_query, bias_key: additive bias, and its strides, that of queries in MASK_UNITs.
    """

    bounds: Bounds
    keep: tl.tensor
    keep_query: tl.tensor
    keep_word: tl.tensor
    key_keep: tl.tensor
    bias: tl.tensor
    bias_query: tl.tensor
    bias_key: tl.tensor


class Steps(NamedTuple):
    """The steps of a program, from tile to tile: `end` of them. Those from `full` to before `full_end` need no mask.
    Without a list, the first step is at tile `first`, the next at the tile after it."""

    first: tl.tensor
    full: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


@triton.jit
def query_rows(start_query, bounds, QUERIES: tl.constexpr):
    """The queries of a tile. Those past the last repeat it: they need no mask of their own, and are not stored."""
    return tl.minimum(start_query + tl.arange(0, QUERIES), bounds.queries - 1)


@triton.jit
def key_limits(rows, bounds):
    """How many keys each of these queries may see at most: the first key past length, diagonal or end."""
    limit = tl.minimum(rows + bounds.causal_offset + 1, bounds.keys)
    if bounds.lengths is not None:
        limit = tl.minimum(limit, tl.load(bounds.lengths + rows.to(tl.int64) * bounds.lengths_query))
    return limit


@triton.jit
def first_visible(start_query, bounds):
    """The first key that any query from this one on may see."""
    if bounds.window is None:
        return 0
    else:
        return tl.maximum(start_query + bounds.window, 0)


@triton.jit
def any_visible(start_query, start_key, last_key, bounds, KEYS: tl.constexpr):
    """Whether the bounds leave a tile of keys any for the queries from this one on, whose last limit is `last_key`."""
    if bounds.window is None:
        return start_key < last_key
    else:
        return (start_key < last_key) & (start_key + KEYS > first_visible(start_query, bounds))


@triton.jit
def within_bounds(rows, limit, start_key, bounds, KEYS: tl.constexpr):
    """Which keys of a tile are within the bounds of these queries: bool (queries, KEYS)."""
    key = (start_key + tl.arange(0, KEYS))[None, :]
    inside = key < limit[:, None]
    if bounds.window is not None:
        inside = inside & (key >= (rows + bounds.window)[:, None])
    return inside


@triton.jit
def key_steps(
    tile_counts, tile_row, start_query, limit, last_key, bounds, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """The steps of a tile of queries over tiles of keys. Within a window, both edges need the mask."""
    if tile_counts is None:
        full_end = tl.maximum(tl.min(limit, 0), 0) // BLOCK_KEYS
        end = tl.cdiv(last_key, BLOCK_KEYS)
        if bounds.window is None:
            return Steps(0, 0, full_end, end)
        else:
            first_key = first_visible(start_query, bounds)
            first = first_key // BLOCK_KEYS
            last_row = tl.minimum(start_query + BLOCK_QUERIES, bounds.queries) - 1
            full = tl.cdiv(first_visible(last_row, bounds), BLOCK_KEYS)
            return Steps(first, full - first, full_end - first, tl.where(first_key < last_key, end - first, 0))
    else:
        return _listed_steps(tile_counts, tile_row)


@triton.jit
def query_steps(
    tile_counts, tile_row, start_key, bounds, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """The steps of a tile of keys over tiles of queries. Under a causal mask the edge comes first."""
    if tile_counts is None:
        end_key = start_key + BLOCK_KEYS
        length = bounds.keys
        uniform_length = True
        if bounds.lengths is not None:
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
        if bounds.window is not None:
            # Queries from here on see only later keys.
            past = tl.maximum(tl.minimum(end_key, length) - bounds.window, 0)
            full_end = tl.maximum(start_key + 1 - bounds.window, 0) // BLOCK_QUERIES - first
            end = tl.minimum(end, tl.cdiv(past, BLOCK_QUERIES) - first)
        return Steps(first, full, full_end, tl.where(visible, end, 0))
    else:
        return _listed_steps(tile_counts, tile_row)


@triton.jit
def _listed_steps(tile_counts, tile_row):
    full = tl.load(tile_counts + tile_row * 2)
    return Steps(0, 0, full, full + tl.load(tile_counts + tile_row * 2 + 1))


@triton.jit
def at_edge(step, steps, FRONT: tl.constexpr, BACK: tl.constexpr):
    """Whether the tile of a step needs the mask, where only steps in front, or at the back, or both may."""
    if FRONT and BACK:
        return (step < steps.full) | (step >= steps.full_end)
    elif FRONT:
        return step < steps.full
    else:
        return step >= steps.full_end


@triton.jit
def tile_at(tile_list, step, steps, across):
    """The tile at one step: that of the list, whose full tiles are at the front and partial ones, backwards, at the
    end; without a list, the next one."""
    if tile_list is None:
        return steps.first + step
    else:
        return tl.load(tile_list + tl.where(step < steps.full_end, step, across - 1 - (step - steps.full_end)))


@triton.jit
def allowed_words(start_query, start_key, limit, mask, QUERIES: tl.constexpr, WORDS: tl.constexpr):
    """The bits of one tile: int32 (QUERIES, WORDS), bit n of word w = key ``start_key + 32 w + n`` is allowed."""
    word = start_key // 32 + tl.arange(0, WORDS)
    inside = limit[:, None] - word[None, :] * 32
    bits = tl.where(inside >= 32, -1, (1 << tl.minimum(tl.maximum(inside, 0), 31)) - 1)
    row = tl.minimum(tl.arange(0, QUERIES), mask.bounds.queries - 1 - start_query)[:, None]
    if mask.bounds.window is not None:
        before = row + (start_query + mask.bounds.window - start_key) - tl.arange(0, WORDS)[None, :] * 32
        before = tl.minimum(tl.maximum(before, 0), 32)
        # In two shifts: one by all 32 bits is undefined.
        bits &= (-1 << (before // 2)) << (before - before // 2)
    if mask.keep is not None:
        base = mask.keep + tl.cast(start_query, tl.int64) * mask.keep_query * 8
        bits &= tl.load(base + row * (mask.keep_query.to(tl.int32) * 8) + word[None, :] * mask.keep_word)
    if mask.key_keep is not None:
        bits &= tl.load(mask.key_keep + word)[None, :]
    return bits


@triton.jit
def allowed_tile(start_query, start_key, limit, mask, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Which (query, key) of a tile are allowed: bool (QUERIES, KEYS), by the bounds and, where given, by the bits."""
    if mask.keep is None and mask.key_keep is None:
        rows = query_rows(start_query, mask.bounds, QUERIES)
        return within_bounds(rows, limit, start_key, mask.bounds, KEYS)
    else:
        bits = allowed_words(start_query, start_key, limit, mask, QUERIES, KEYS // 32)
        spread = (tl.expand_dims(bits, 2) >> tl.arange(0, 32)[None, None, :]) & 1
        return tl.reshape(spread, (QUERIES, KEYS)) != 0


@triton.jit
def masked_scores(
    scores, scale, start_query, start_key, limit, mask,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Apply every part of the mask: (scores, allowed). With a bias, the scores come back scaled and biased."""
    allowed = allowed_tile(start_query, start_key, limit, mask, QUERIES, KEYS)
    if mask.bias is not None:
        # Past the last query the last one is read again. MASK_UNIT divides the number of keys: saying so in the guard
        # keeps whole groups of keys together in one access.
        row = tl.minimum(tl.arange(0, QUERIES), mask.bounds.queries - 1 - start_query)[:, None]
        column = start_key + tl.arange(0, KEYS)
        inside = column // MASK_UNIT * MASK_UNIT < mask.bounds.keys
        # Offsets start from the tile's row but from the first key: were they the same for every tile, the compiler
        # would keep one register for each element of the tile all through the loop.
        offsets = row * (mask.bias_query.to(tl.int32) * MASK_UNIT) + column[None, :] * mask.bias_key
        base = mask.bias + tl.cast(start_query, tl.int64) * mask.bias_query * MASK_UNIT
        added = tl.load(base + offsets, mask=inside[None, :], other=float("-inf")).to(tl.float32)
        scores = scores * scale + added
        allowed = allowed & (added != float("-inf"))
    return scores, allowed
