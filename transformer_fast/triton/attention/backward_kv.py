"""Masked attention, backward: the gradients of k and v, one program per tile of keys and key head.

The program loops over the query heads of its group, and over the tiles of queries that see any of its keys. Rows
without keys have weight 1/Lk on every key. Such rows may lie outside the tiles of a program, so they are summed first.
"""

import triton.language as tl

from ..philox import RandomBits, attention_keep_tile, kept_or_zero, load_seed
from .dropout_bits import bits_at_head, recall_keep_tile
from .mask import allowed_tile, key_limits, masked_scores, open_mask, parts_of, query_rows
from .steps import (
    FLAG_ROWS,
    at_edge,
    fill_gap,
    flag_row,
    open_sequence,
    program_of,
    query_steps,
    statistics_row,
    tile_at,
)
from .tiles import LOG2E, any_true, at_row, exponential, jit, load_rows, store_rows

# Number of flags per load.
_SCAN = tl.constexpr(256)


@jit
def grad_kv_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, empty_flags, grad_k, grad_v, dropout_bits, keep, key_keep, lengths, bias,
    distance_bias, query_ids, key_ids, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, batch_order,
    tile_list, tile_counts, tile_order, map_batch, map_head,
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
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, group, queries, keys, total_queries: tl.int64, total_keys: tl.int64, pairs: tl.int64, causal_offset, window,
    threshold, rescale, scale, distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = parts_of(
        causal_offset is not None, lengths is not None, window is not None, query_ids is not None,
        keep is not None, key_keep is not None, bias is not None, distance_bias is not None, softcap is not None,
    )  # fmt: skip
    BIASED: tl.constexpr = (bias is not None) or (distance_bias is not None) or (softcap is not None)
    BASE_E: tl.constexpr = sums is not None
    # Each step recomputes addresses and Philox keys, which is cheaper than holding them in registers. Exception: a wide
    # tile of a packed batch, which would then exceed the registers.
    RECOMPUTE: tl.constexpr = cu_seqlens_k is None or BLOCK_D < 64
    batch, kv_head, tile = program_of(heads // group, keys, batch_order, BLOCK_KEYS)
    batches = tl.num_programs(0) // (tl.cdiv(keys, BLOCK_KEYS) * (heads // group))
    most_keys = keys
    sequence = open_sequence(
        batch, queries, keys, total_queries, total_keys, pairs, causal_offset, window, distance_zero, bias, bias_query,
        cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, logsumexp, BOTTOM_RIGHT,
    )  # fmt: skip
    first_query, first_key, queries, keys = sequence.first_query, sequence.first_key, sequence.queries, sequence.keys
    # First key tile first: under a causal mask it has the most queries. The tile order of the group's first head is
    # used, because heads of a group mostly share a mask.
    if tile_order is not None:
        tile = tl.load(tile_order + batch * map_batch + kv_head * group * map_head + tile)
    start_key = tile * BLOCK_KEYS
    philox_key = load_seed(seed)
    if cu_seqlens_k is not None:
        if tile == 0:
            fill_gap(
                at_row(grad_k, batch, kv_head, 0, grad_k_batch, grad_k_head, grad_k_row, UNIT), grad_k_row, None,
                cu_seqlens_k, batch, batches, first_key, keys, total_keys, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT,
            )  # fmt: skip
            fill_gap(
                at_row(grad_v, batch, kv_head, 0, grad_v_batch, grad_v_head, grad_v_row, UNIT), grad_v_row, None,
                cu_seqlens_k, batch, batches, first_key, keys, total_keys, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT,
            )  # fmt: skip
        if start_key >= keys:
            return

    k = at_row(k, batch, kv_head, first_key, k_batch, k_head, k_row, UNIT)
    v = at_row(v, batch, kv_head, first_key, v_batch, v_head, v_row, UNIT)
    grad_k = at_row(grad_k, batch, kv_head, first_key, grad_k_batch, grad_k_head, grad_k_row, UNIT)
    grad_v = at_row(grad_v, batch, kv_head, first_key, grad_v_batch, grad_v_head, grad_v_row, UNIT)
    k_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)

    # Rows without keys add the same share to every value and nothing to the keys. In the loop below their weight is 0.
    if not ZERO_EMPTY_ROWS:
        masked = (tile_list is not None) or (lengths is not None) or (window is not None) or (key_ids is not None)
        masked = masked or BIASED
        for member in tl.range(0, tl.where(masked | (causal_offset < 0), group, 0), disable_licm=True):
            head = kv_head * group + member
            random = RandomBits(philox_key, threshold, batch, head)
            head_grad_out = at_row(
                grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT
            )
            first_row = statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
            flags = empty_flags + flag_row(cu_seqlens_q, batch, head, heads, first_query, queries)
            flagged = tl.cdiv(queries, FLAG_ROWS)
            for begin in tl.range(0, flagged, _SCAN):
                near = begin + tl.arange(0, _SCAN)
                found = any_true(tl.load(flags + near, mask=near < flagged, other=0))
                for near_tile in tl.range(begin, tl.where(found, tl.minimum(begin + _SCAN, flagged), begin)):
                    start = near_tile * FLAG_ROWS
                    row = start + tl.arange(0, FLAG_ROWS)
                    empty = tl.load(logsumexp + first_row + row, mask=row < queries, other=0.0) == float("-inf")
                    grad_tile = load_rows(
                        head_grad_out, start, queries, grad_out_row, FLAG_ROWS, HEAD_DIM, BLOCK_D, UNIT
                    )
                    grad_tile = tl.where(empty[:, None], grad_tile, 0.0)
                    weights = tl.where(empty, 1.0, 0.0)[:, None] + tl.zeros((FLAG_ROWS, BLOCK_KEYS), tl.float32)
                    if seed is not None:
                        kept = attention_keep_tile(random, start, start_key, FLAG_ROWS, BLOCK_KEYS)
                        weights = kept_or_zero(kept, weights)
                    v_acc = tl.dot(tl.trans(weights.to(grad_tile.dtype)), grad_tile, v_acc, input_precision="ieee")
        v_acc *= 1.0 / keys.to(tl.float32)

    k_tile = load_rows(k, start_key, keys, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    v_tile = load_rows(v, start_key, keys, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    query_tiles = tl.cdiv(queries, BLOCK_QUERIES)
    for member in tl.range(0, group, disable_licm=True):
        head = kv_head * group + member
        head_q = at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT)
        head_grad_out = at_row(grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT)
        mask = open_mask(
            sequence, head, lengths, lengths_batch, lengths_query, query_ids, query_ids_batch,
            key_ids, key_ids_batch, keep, keep_batch, keep_head, keep_query, keep_word,
            key_keep, key_keep_batch, key_keep_head, bias, bias_batch, bias_head, bias_key,
            distance_bias, distance_batch, distance_head, softcap, logsumexp, MASK_UNIT,
        )  # fmt: skip
        bounds = mask.bounds
        random = RandomBits(philox_key, threshold, batch, head)
        head_dropout_bits = bits_at_head(
            dropout_bits, cu_seqlens_q, batch, batches, head, heads, first_query, queries, total_queries, most_keys
        )
        first_row = statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
        tile_row = batch * map_batch + head * map_head + tile
        head_tile_list = tile_list
        if tile_list is not None:
            head_tile_list = tile_list + tile_row.to(tl.int64) * query_tiles
        steps = query_steps(tile_counts, tile_row, start_key, bounds, BLOCK_QUERIES, BLOCK_KEYS, PARTS)

        for step in tl.range(0, steps.end, disable_licm=RECOMPUTE):
            start = tile_at(head_tile_list, step, steps, query_tiles) * BLOCK_QUERIES
            row = start + tl.arange(0, BLOCK_QUERIES)
            # Rows past the last query have weight exp(0 - inf) = 0. Rows without keys have scores of -inf, so weight 0.
            shift = tl.load(logsumexp + first_row + row, mask=row < queries, other=float("inf"))
            row_delta = tl.load(delta + first_row + row, mask=row < queries, other=0.0)
            empty = shift == float("-inf")
            shift = tl.where(empty, 0.0, shift * (1.0 if BASE_E else LOG2E))
            row_delta = tl.where(empty, 0.0, row_delta)
            q_tile = load_rows(head_q, start, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            grad_tile = load_rows(head_grad_out, start, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if BASE_E and not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            if BIASED:
                limit = key_limits(query_rows(start, bounds, BLOCK_QUERIES), bounds, PARTS)
                scores, allowed, slope = masked_scores(
                    scores, scale, start, start_key, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT, PARTS
                )
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            elif at_edge(step, steps, tile_list is None, window is not None or tile_list is not None):
                limit = key_limits(query_rows(start, bounds, BLOCK_QUERIES), bounds, PARTS)
                allowed = allowed_tile(start, start_key, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, PARTS)
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            weights = exponential(scores, shift[:, None], scale, BASE_E)
            if BASE_E:
                weights = weights / tl.load(sums + first_row + row, mask=row < queries, other=1.0)[:, None]
            dropped = weights
            if seed is not None:
                kept = recall_keep_tile(
                    head_dropout_bits, random, start, start_key, most_keys, BLOCK_QUERIES, BLOCK_KEYS
                )
                dropped = kept_or_zero(kept, weights)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            v_acc = tl.dot(tl.trans(dropped.to(q_tile.dtype)), grad_tile, v_acc, input_precision="ieee")
            grad_scores = weights * (grad_weights - row_delta[:, None])
            if softcap is not None:
                grad_scores *= slope
            k_acc = tl.dot(tl.trans(grad_scores.to(q_tile.dtype)), q_tile, k_acc, input_precision="ieee")

    store_rows(grad_k, k_acc * scale, start_key, keys, grad_k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    store_rows(grad_v, v_acc * rescale, start_key, keys, grad_v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
