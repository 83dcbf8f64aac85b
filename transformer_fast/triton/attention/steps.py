"""Which tiles a program of an attention kernel takes, in which order, and what the mask says in them.

Three kinds of call run the same kernels. A padded one bounds its keys by limits (lengths, causal, the end of the keys)
and steps through the tiles within them by arithmetic. One with a dense mask steps through lists (see
:mod:`.tile_map`). A packed one finds its sequence in `cu_seqlens`, and from there is like the first.
"""

import triton
import triton.language as tl

from .tile_map import allowed_words
from .tiles import biased_scores, within_limits


@triton.jit
def sequence(cu_seqlens, batch, length):
    """(first row, rows) of a sequence of a packed batch; without `cu_seqlens`, of a padded one: (0, length)."""
    if cu_seqlens is None:
        return tl.full((), 0, tl.int32), length
    else:
        first = tl.load(cu_seqlens + batch)
        return first, tl.load(cu_seqlens + batch + 1) - first


@triton.jit
def statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query):
    """Where the numbers of a sequence's rows begin in a (B, H, Lq) tensor of them, or (H, Tq) of a packed batch."""
    if cu_seqlens_q is None:
        return (batch * heads + head).to(tl.int64) * total_queries
    else:
        return head.to(tl.int64) * total_queries + first_query


@triton.jit
def in_order(order, slot):
    """What an order, if there is one, puts in this slot."""
    if order is None:
        return slot
    else:
        return tl.load(order + slot)


@triton.jit
def tile_at(tile_list, step, full, across):
    """The tile at one step: that of the list, whose full tiles are at the front and partial ones, backwards, at the
    end; without a list, the step itself."""
    if tile_list is None:
        return step
    else:
        return tl.load(tile_list + tl.where(step < full, step, across - 1 - (step - full)))


@triton.jit
def key_steps(tile_counts, line, limit, last_key, BLOCK_KEYS: tl.constexpr):
    """(full, all): how many steps a tile of queries takes over tiles of keys, and how many need no mask. These are the
    first ones."""
    if tile_counts is None:
        return tl.maximum(tl.min(limit, 0), 0) // BLOCK_KEYS, tl.cdiv(last_key, BLOCK_KEYS)
    else:
        full = tl.load(tile_counts + line * 2)
        return full, full + tl.load(tile_counts + line * 2 + 1)


@triton.jit
def query_steps(
    tile_counts, line, start_key, batch, lengths, lengths_batch, lengths_query, causal_offset, queries, keys,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """(first, full, all): how a tile of keys steps through tiles of queries.

    From a list, `full` steps need no mask, and these are the first ones. By arithmetic, the steps start from tile
    `first`, and `full` is the first that needs none: under a causal mask the edge comes first.
    """
    if tile_counts is None:
        end_key = start_key + BLOCK_KEYS
        length = keys
        uniform_length = True
        if lengths is not None:
            uniform_length = lengths_query == 0
            length = tl.where(uniform_length, tl.load(lengths + batch.to(tl.int64) * lengths_batch), keys)
        tiles = tl.cdiv(queries, BLOCK_QUERIES)
        first_row = tl.maximum(start_key - causal_offset, 0)
        first = first_row // BLOCK_QUERIES
        full = tl.cdiv(tl.maximum(end_key - 1 - causal_offset, 0), BLOCK_QUERIES) - first
        full = tl.where(uniform_length & (end_key <= length), full, tiles)
        return first, full, tl.where((start_key < length) & (first_row < queries), tiles - first, 0)
    else:
        full = tl.load(tile_counts + line * 2)
        return tl.full((), 0, tl.int32), full, full + tl.load(tile_counts + line * 2 + 1)


@triton.jit
def allowed_tile(
    start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Which (query, key) of a tile are allowed: bool (QUERIES, KEYS), by the limits and, where given, by the bits."""
    if keep is None and key_keep is None:
        return within_limits(start_key, limit, KEYS)
    else:
        bits = allowed_words(
            start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep, QUERIES, KEYS // 32
        )
        spread = (tl.expand_dims(bits, 2) >> tl.arange(0, 32)[None, None, :]) & 1
        return tl.reshape(spread, (QUERIES, KEYS)) != 0


@triton.jit
def masked_scores(
    scores, scale, start_query, queries, start_key, keys, limit, keep, keep_query, keep_word, key_keep,
    bias, bias_query, bias_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Apply every part of the mask: (scores, allowed). With a bias, the scores come back scaled and biased."""
    allowed = allowed_tile(start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep, QUERIES, KEYS)
    if bias is not None:
        scores, unblocked = biased_scores(
            scores, scale, start_query, queries, start_key, keys, bias, bias_query, bias_key, QUERIES, KEYS, MASK_UNIT
        )
        allowed = allowed & unblocked
    return scores, allowed
