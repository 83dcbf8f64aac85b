"""Mask arithmetic of the attention kernels: the keys that a query may see.

Every part of a mask that is a bound on the key number - lengths, causal, the end of the keys - is combined into one
number per query, its limit: key j is visible iff ``j < limit``. So comparing two integers tells if a tile is full,
partial or empty. Only parts with a value per (query, key) - keep masks, additive bias - are read.

A window bounds the keys from below, too: key j is visible to query i only if ``j >= i + window``. Documents compare an
id of the query with one of the key. Scores may be capped, and a bias that depends on the distance alone is read along
its diagonals. A missing part of a kernel's arguments is None. :func:`open_mask` and :func:`open_bounds` put another
pointer in its place, because no function can return a tuple with a None (Triton 3.6). PARTS, flags from
:func:`parts_of`, says what is read.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import LOG2E, any_true, at_head

# Flags of PARTS, in the order of the arguments of parts_of.
CAUSAL, LENGTHS, WINDOW, DOCUMENTS = (tl.constexpr(1 << n) for n in range(4))
KEEP, KEY_KEEP, BIAS, DISTANCE_BIAS, SOFTCAP = (tl.constexpr(1 << n) for n in range(4, 9))


@triton.constexpr_function
def parts_of(*present):
    """Flags of the parts of a call: a mask is compiled for these."""
    return sum(1 << n for n, part in enumerate(present) if part)


class Bounds(NamedTuple):
    """Bounds on the keys of one batch entry, or of one sequence of a packed batch.

    Args:
        lengths: pointer to the batch's first length.
        lengths_query: stride from query to query; 0 for one length for all queries.
        causal_offset: query i sees keys j <= i + causal_offset.
        window: query i sees keys j >= i + window.
        queries, keys: number of queries and of keys.
        query_ids, key_ids: pointers to the first query's and the first key's id: query i sees the keys with its own id.

    A part without its flag in PARTS is arbitrary and not read.
    """

    lengths: tl.tensor
    lengths_query: tl.tensor
    causal_offset: tl.tensor
    window: tl.tensor
    queries: tl.tensor
    keys: tl.tensor
    query_ids: tl.tensor
    key_ids: tl.tensor


class Mask(NamedTuple):
    """Mask of one (batch, head).

    Args:
        bounds: bounds of the batch entry.
        keep, keep_query, keep_word: bits of a dense mask (:mod:`.tile_map`), stride of queries in chunks of 8 words,
            and of words.
        key_keep: bits of a mask over keys only.
        bias, bias_query, bias_key: additive bias, and its strides, that of queries in MASK_UNITs.
        distance_bias, distance_zero: bias by distance, whose entry ``distance_zero + j - i`` is added.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before biases are added.
    """

    bounds: Bounds
    keep: tl.tensor
    keep_query: tl.tensor
    keep_word: tl.tensor
    key_keep: tl.tensor
    bias: tl.tensor
    bias_query: tl.tensor
    bias_key: tl.tensor
    distance_bias: tl.tensor
    distance_zero: tl.tensor
    softcap: tl.tensor


@triton.jit
def open_bounds(lengths, lengths_query, causal_offset, window, queries, keys, query_ids, key_ids, anything):
    """Bounds of a batch entry, from pointers of its own; None for a missing part. `anything`: any pointer, the place of
    missing ones."""
    return Bounds(
        anything if lengths is None else lengths, lengths_query,
        0 if causal_offset is None else causal_offset, 0 if window is None else window, queries, keys,
        anything if query_ids is None else query_ids, anything if key_ids is None else key_ids,
    )  # fmt: skip


@triton.jit
def _ids_at(ids, batch, batch_stride, first):
    """Pointer to the id of the first query or key of a batch, or of a sequence of a packed batch; None for None."""
    if ids is None:
        return
    else:
        return ids + batch.to(tl.int64) * batch_stride + first


@triton.jit
def open_mask(
    sequence, head, lengths, lengths_batch, lengths_query, query_ids, query_ids_batch, key_ids, key_ids_batch,
    keep, keep_batch, keep_head, keep_query, keep_word, key_keep, key_keep_batch, key_keep_head,
    bias, bias_batch, bias_head, bias_key, distance_bias, distance_batch, distance_head, softcap, anything,
    MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Mask of a head of a :class:`~.steps.Sequence`, from the kernel's arguments; None for a missing part. `anything`:
    see :func:`open_bounds`."""
    batch = sequence.batch
    bounds = open_bounds(
        at_head(lengths, batch, head, lengths_batch, 0, 1), lengths_query, sequence.causal_offset, sequence.window,
        sequence.queries, sequence.keys, _ids_at(query_ids, batch, query_ids_batch, sequence.first_query),
        _ids_at(key_ids, batch, key_ids_batch, sequence.first_key), anything,
    )  # fmt: skip
    return Mask(
        bounds,
        anything if keep is None else at_head(keep, batch, head, keep_batch, keep_head, 8), keep_query, keep_word,
        anything if key_keep is None else at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 8),
        anything if bias is None else at_head(sequence.bias, batch, head, bias_batch, bias_head, MASK_UNIT),
        sequence.bias_query, bias_key,
        anything if distance_bias is None else at_head(distance_bias, batch, head, distance_batch, distance_head, 1),
        sequence.distance_zero, 1.0 if softcap is None else softcap,
    )  # fmt: skip


@triton.jit
def query_rows(start_query, bounds, QUERIES: tl.constexpr):
    """Queries of a tile. Indices past the last query repeat the last query; their results are not stored."""
    return tl.minimum(start_query + tl.arange(0, QUERIES), bounds.queries - 1)


@triton.jit
def key_limits(rows, bounds, PARTS: tl.constexpr):
    """Limit per query: the first key past length, causal diagonal or end of the keys."""
    limit = bounds.keys + 0 * rows
    if CAUSAL & PARTS:
        limit = tl.minimum(rows + bounds.causal_offset + 1, bounds.keys)
    if LENGTHS & PARTS:
        limit = tl.minimum(limit, tl.load(bounds.lengths + rows.to(tl.int64) * bounds.lengths_query))
    return limit


@triton.jit
def first_visible(start_query, bounds, PARTS: tl.constexpr):
    """First key visible to any query from this query on."""
    if WINDOW & PARTS:
        return tl.maximum(start_query + bounds.window, 0)
    else:
        return 0


@triton.jit
def any_visible(rows, start_query, start_key, last_key, bounds, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Return True if the bounds leave any key of a tile visible to the queries from `start_query` on, whose last limit
    is `last_key`."""
    visible = start_key < last_key
    if WINDOW & PARTS:
        visible = visible & (start_key + KEYS > first_visible(start_query, bounds, PARTS))
    if DOCUMENTS & PARTS:
        visible = visible & any_true(same_document(rows, start_key, bounds, KEYS))
    return visible


@triton.jit
def within_bounds(rows, limit, start_key, bounds, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Keys of a tile within the bounds of these queries: bool (queries, KEYS)."""
    key = (start_key + tl.arange(0, KEYS))[None, :]
    inside = key < limit[:, None]
    if WINDOW & PARTS:
        inside = inside & (key >= (rows + bounds.window)[:, None])
    if DOCUMENTS & PARTS:
        inside = inside & same_document(rows, start_key, bounds, KEYS)
    return inside


@triton.jit
def same_document(rows, start_key, bounds, KEYS: tl.constexpr):
    """Keys of a tile with the same id as these queries: bool (queries, KEYS)."""
    key = start_key + tl.arange(0, KEYS)
    key_ids = tl.load(bounds.key_ids + key, mask=key < bounds.keys, other=0)
    return tl.load(bounds.query_ids + rows)[:, None] == key_ids[None, :]


@triton.jit
def allowed_words(start_query, start_key, limit, mask, QUERIES: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """Load the bits of one tile: int32 (QUERIES, WORDS), bit n of word w = key ``start_key + 32 w + n`` is allowed."""
    word = start_key // 32 + tl.arange(0, WORDS)
    inside = limit[:, None] - word[None, :] * 32
    bits = tl.where(inside >= 32, -1, (1 << tl.minimum(tl.maximum(inside, 0), 31)) - 1)
    row = tl.minimum(tl.arange(0, QUERIES), mask.bounds.queries - 1 - start_query)[:, None]
    if WINDOW & PARTS:
        before = row + (start_query + mask.bounds.window - start_key) - tl.arange(0, WORDS)[None, :] * 32
        before = tl.minimum(tl.maximum(before, 0), 32)
        # Two shifts, because a shift by 32 bits is undefined.
        bits &= (-1 << (before // 2)) << (before - before // 2)
    if KEEP & PARTS:
        base = mask.keep + tl.cast(start_query, tl.int64) * mask.keep_query * 8
        bits &= tl.load(base + row * (mask.keep_query.to(tl.int32) * 8) + word[None, :] * mask.keep_word)
    if KEY_KEEP & PARTS:
        bits &= tl.load(mask.key_keep + word)[None, :]
    return bits


@triton.jit
def allowed_tile(start_query, start_key, limit, mask, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Allowed pairs (query, key) of a tile: bool (QUERIES, KEYS), by the bounds and by the bits, if given."""
    rows = query_rows(start_query, mask.bounds, QUERIES)
    if not (KEEP | KEY_KEEP) & PARTS:
        return within_bounds(rows, limit, start_key, mask.bounds, KEYS, PARTS)
    else:
        bits = allowed_words(start_query, start_key, limit, mask, QUERIES, KEYS // 32, PARTS)
        spread = (tl.expand_dims(bits, 2) >> tl.arange(0, 32)[None, None, :]) & 1
        allowed = tl.reshape(spread, (QUERIES, KEYS)) != 0
        if DOCUMENTS & PARTS:
            allowed = allowed & same_document(rows, start_key, mask.bounds, KEYS)
        return allowed


@triton.jit
def masked_scores(
    scores, scale, start_query, start_key, limit, mask,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK_UNIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Apply all parts of the mask and return (scores, allowed, slope). With a bias of either kind or a cap, the
    returned scores are scaled, capped and biased. The slope is the derivative of the cap, a factor of the score
    gradients."""
    allowed = allowed_tile(start_query, start_key, limit, mask, QUERIES, KEYS, PARTS)
    slope = 1.0
    if BIAS & PARTS:
        added = bias_tile(start_query, start_key, mask, QUERIES, KEYS, MASK_UNIT)
    if (BIAS | DISTANCE_BIAS | SOFTCAP) & PARTS:
        scores = scores * scale
    if SOFTCAP & PARTS:
        capped = tanh(scores / mask.softcap)
        scores = capped * mask.softcap
        # The score of a blocked key may be NaN.
        slope = tl.where(allowed, 1.0 - capped * capped, 0.0)
    if BIAS & PARTS:
        scores = scores + added
        allowed = allowed & (added != float("-inf"))
    if DISTANCE_BIAS & PARTS:
        nearness = distance_tile(query_rows(start_query, mask.bounds, QUERIES), start_key, mask, KEYS)
        scores = scores + nearness
        allowed = allowed & (nearness != float("-inf"))
    return scores, allowed, slope


@triton.jit
def bias_tile(start_query, start_key, mask, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK_UNIT: tl.constexpr):
    """Load the additive bias of a tile: fp32 (QUERIES, KEYS), -inf past the last key."""
    # Rows past the last query read the last query again. MASK_UNIT divides the number of keys; the guard states this,
    # so that groups of keys are loaded in one access.
    row = tl.minimum(tl.arange(0, QUERIES), mask.bounds.queries - 1 - start_query)[:, None]
    column = start_key + tl.arange(0, KEYS)
    inside = column // MASK_UNIT * MASK_UNIT < mask.bounds.keys
    # Offsets start at the tile's first row but at key 0. If the offsets were equal for every tile, the compiler would
    # hold one register per element of the tile through the whole loop.
    offsets = row * (mask.bias_query.to(tl.int32) * MASK_UNIT) + column[None, :] * mask.bias_key
    base = mask.bias + tl.cast(start_query, tl.int64) * mask.bias_query * MASK_UNIT
    return tl.load(base + offsets, mask=inside[None, :], other=float("-inf")).to(tl.float32)


@triton.jit
def distance_tile(rows, start_key, mask, KEYS: tl.constexpr):
    """Load the bias by distance of these queries and a tile of keys: fp32 (queries, KEYS), -inf past the last key."""
    key = start_key + tl.arange(0, KEYS)
    offsets = key[None, :] + (mask.distance_zero - rows)[:, None]
    return tl.load(mask.distance_bias + offsets, mask=(key < mask.bounds.keys)[None, :], other=float("-inf"))


@triton.jit
def tanh(x):
    """Compute tanh to about three units in the last place. Near 0, where 1 - 2 / (exp(2 x) + 1) would cancel, it is an
    odd minimax polynomial (relative error 4e-9)."""
    size = tl.abs(x)
    square = x * x
    tail = -0.005704986770762321 * square + 0.02063908700448809
    tail = tail * square - 0.053739714995723234
    tail = tail * square + 0.13331442196823984
    tail = tail * square - 0.33333281941946996
    far = 1.0 - 2.0 / (tl.math.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < 0.625, x + x * (square * tail), tl.where(x < 0.0, -far, far))
