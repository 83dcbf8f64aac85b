"""Masked attention, backward: the gradients of k and v, a program a tile of keys of one key head.

The program loops over the query heads of its group, and over the tiles of queries that see any of its keys. Rows
without keys, whose weight is 1/Lk on every key, may lie outside those, and are summed first.
"""

import triton.language as tl

from ..philox import attention_keep_tile, load_seed
from .steps import (
    allowed_tile,
    in_order,
    masked_scores,
    query_steps,
    sequence,
    statistics_row,
    tile_at,
)
from .tiles import (
    LOG2E,
    any_true,
    at_head,
    exponential,
    jit,
    key_limits,
    load_rows,
    store_rows,
)

DELTA_ROWS = 32
_ROWS = tl.constexpr(DELTA_ROWS)
_SCAN = tl.constexpr(256)


@jit
def grad_kv_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, empty_tiles, grad_k, grad_v, keep, key_keep, lengths, bias, seed,
    cu_seqlens_q, cu_seqlens_k, batch_order, tile_list, tile_counts, tile_order, map_batch, map_head,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    grad_k_batch: tl.int64, grad_k_head: tl.int64, grad_k_row: tl.int64,
    grad_v_batch: tl.int64, grad_v_head: tl.int64, grad_v_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    heads, group, queries, keys, total_queries: tl.int64, causal_offset, threshold, rescale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    BIASED: tl.constexpr = bias is not None
    NATURAL: tl.constexpr = sums is not None
    slots = tl.cdiv(keys, BLOCK_KEYS)
    kv_heads = heads // group
    batch = in_order(batch_order, tl.program_id(0) // slots // kv_heads)
    kv_head = tl.program_id(0) // slots % kv_heads
    first_query, queries = sequence(cu_seqlens_q, batch, queries)
    first_key, keys = sequence(cu_seqlens_k, batch, keys)
    # First key tile first: under a causal mask it has the most queries. The order of a mask's tiles is that of the
    # group's first head: heads of one group mostly share a mask.
    tile = tl.program_id(0) % slots
    if tile_order is not None:
        tile = tl.load(tile_order + batch * map_batch + kv_head * group * map_head + tile)
    start_key = tile * BLOCK_KEYS
    if cu_seqlens_k is not None:  # noqa: SIM102 - decided when compiling, the other when running
        if start_key >= keys:
            return
    if seed is not None:
        key_low, key_high = load_seed(seed)

    k = at_head(k, batch, kv_head, k_batch, k_head, UNIT) + first_key * k_row * UNIT
    v = at_head(v, batch, kv_head, v_batch, v_head, UNIT) + first_key * v_row * UNIT
    k_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)

    # Rows without keys give every value the same share, and the key nothing. Elsewhere they weigh nothing. In a packed
    # batch there are none, but where there are no keys.
    if not ZERO_EMPTY_ROWS and cu_seqlens_q is None:
        masked = (tile_list is not None) or (lengths is not None) or BIASED
        for member in tl.range(0, tl.where(masked | (causal_offset < 0), group, 0), disable_licm=True):
            head = kv_head * group + member
            grad_base = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT)
            first_row = statistics_row(cu_seqlens_q, batch, head, heads, queries, first_query)
            flagged = tl.cdiv(queries, _ROWS)
            flags = empty_tiles + statistics_row(cu_seqlens_q, batch, head, heads, flagged, first_query)
            for begin in tl.range(0, flagged, _SCAN):
                near = begin + tl.arange(0, _SCAN)
                found = any_true(tl.load(flags + near, mask=near < flagged, other=0))
                for near_tile in tl.range(begin, tl.where(found, tl.minimum(begin + _SCAN, flagged), begin)):
                    start = near_tile * _ROWS
                    row = start + tl.arange(0, _ROWS)
                    empty = tl.load(logsumexp + first_row + row, mask=row < queries, other=0.0) == float("-inf")
                    grad_tile = load_rows(grad_base, start, queries, grad_out_row, _ROWS, HEAD_DIM, BLOCK_D, UNIT)
                    grad_tile = tl.where(empty[:, None], grad_tile, 0.0)
                    share = tl.where(empty, 1.0, 0.0)[:, None] + tl.zeros((_ROWS, BLOCK_KEYS), tl.float32)
                    if seed is not None:
                        kept = attention_keep_tile(
                            key_low, key_high, threshold, batch, head, start, start_key, _ROWS, BLOCK_KEYS
                        )
                        share = tl.where(kept, share, 0.0)
                    v_acc = tl.dot(tl.trans(share.to(grad_tile.dtype)), grad_tile, v_acc, input_precision="ieee")
        v_acc *= 1.0 / keys.to(tl.float32)

    k_tile = load_rows(k, start_key, keys, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    v_tile = load_rows(v, start_key, keys, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    query_tiles = tl.cdiv(queries, BLOCK_QUERIES)
    for member in tl.range(0, group, disable_licm=True):
        head = kv_head * group + member
        q_base = at_head(q, batch, head, q_batch, q_head, UNIT) + first_query * q_row * UNIT
        grad_base = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT)
        grad_base += first_query * grad_out_row * UNIT
        keep_base = keep
        if keep is not None:
            keep_base = at_head(keep, batch, head, keep_batch, keep_head, 8)
        key_keep_base = key_keep
        if key_keep is not None:
            key_keep_base = at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 8)
        bias_base = bias
        if bias is not None:
            bias_base = at_head(bias, batch, head, bias_batch, bias_head, MASK_UNIT)
        first_row = statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
        line = batch * map_batch + head * map_head + tile
        list_base = tile_list
        if tile_list is not None:
            list_base = tile_list + line.to(tl.int64) * query_tiles
        first, full, steps = query_steps(
            tile_counts, line, start_key, batch, lengths, lengths_batch, lengths_query, causal_offset, queries, keys,
            BLOCK_QUERIES, BLOCK_KEYS,
        )  # fmt: skip

        for step in tl.range(0, steps, disable_licm=True):
            start = (first + tile_at(list_base, step, full, query_tiles)) * BLOCK_QUERIES
            row = start + tl.arange(0, BLOCK_QUERIES)
            # Rows past the last query weigh nothing: exp(0 - inf). So do those without keys, whose scores are -inf.
            shift = tl.load(logsumexp + first_row + row, mask=row < queries, other=float("inf"))
            centre = tl.load(delta + first_row + row, mask=row < queries, other=0.0)
            empty = shift == float("-inf")
            shift = tl.where(empty, 0.0, shift * (1.0 if NATURAL else LOG2E))
            centre = tl.where(empty, 0.0, centre)
            q_tile = load_rows(q_base, start, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            grad_tile = load_rows(grad_base, start, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if NATURAL and not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            limited = tl.minimum(row, queries - 1)
            if BIASED:
                limit = key_limits(limited, batch, lengths, lengths_batch, lengths_query, causal_offset, keys)
                scores, allowed = masked_scores(
                    scores, scale, start, queries, start_key, keys, limit, keep_base, keep_query, keep_word,
                    key_keep_base, bias_base, bias_query, bias_key, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT,
                )  # fmt: skip
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            elif (step >= full) if tile_list is not None else (step < full):
                limit = key_limits(limited, batch, lengths, lengths_batch, lengths_query, causal_offset, keys)
                allowed = allowed_tile(
                    start, queries, start_key, limit, keep_base, keep_query, keep_word, key_keep_base,
                    BLOCK_QUERIES, BLOCK_KEYS,
                )  # fmt: skip
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            weights = exponential(scores, shift[:, None], scale, NATURAL)
            if NATURAL:
                weights = weights / tl.load(sums + first_row + row, mask=row < queries, other=1.0)[:, None]
            share = weights
            if seed is not None:
                kept = attention_keep_tile(
                    key_low, key_high, threshold, batch, head, start, start_key, BLOCK_QUERIES, BLOCK_KEYS
                )
                share = tl.where(kept, share, 0.0)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            v_acc = tl.dot(tl.trans(share.to(q_tile.dtype)), grad_tile, v_acc, input_precision="ieee")
            grad_scores = weights * (grad_weights - centre[:, None])
            k_acc = tl.dot(tl.trans(grad_scores.to(q_tile.dtype)), q_tile, k_acc, input_precision="ieee")

    grad_k = at_head(grad_k, batch, kv_head, grad_k_batch, grad_k_head, UNIT) + first_key * grad_k_row * UNIT
    grad_v = at_head(grad_v, batch, kv_head, grad_v_batch, grad_v_head, UNIT) + first_key * grad_v_row * UNIT
    store_rows(grad_k, k_acc * scale, start_key, keys, grad_k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    store_rows(grad_v, v_acc * rescale, start_key, keys, grad_v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
