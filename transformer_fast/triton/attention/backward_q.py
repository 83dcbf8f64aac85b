"""Masked attention, backward: the gradient of q, one program per tile of queries.

The program loops over the tiles of keys that its queries see, as the forward does. Before the loop it stores two values
per row for the gradients of k and v: delta, and a flag for rows without keys.
"""

import triton.language as tl

from ..philox import RandomBits, attention_keep_tile, load_seed
from .dropout_bits import bits_at_head, recall_keep_tile
from .mask import allowed_tile, key_limits, masked_scores, open_mask, parts_of, query_rows
from .steps import FLAG_ROWS, at_edge, fill_gap, flag_row, key_steps, open_sequence, program_of, statistics_row, tile_at
from .tiles import LOG2E, any_true, at_row, exponential, factor_in_registers, jit, load_rows, row_products, store_rows


@jit
def grad_q_kernel(
    grad_out, q, k, v, out, logsumexp, grad_logsumexp, delta, sums, empty_flags, grad_q, dropout_bits, keep, key_keep,
    lengths, bias, distance_bias, query_ids, key_ids, sinks, seed, cu_seqlens_q, cu_seqlens_k, seqused_k,
    bias_starts, batch_order, tile_list, tile_counts, tile_order, map_batch, map_head,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    grad_q_batch: tl.int64, grad_q_head: tl.int64, grad_q_row: tl.int64,
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
    batch, head, slot = program_of(heads, queries, batch_order, BLOCK_QUERIES)
    batches = tl.num_programs(0) // (tl.cdiv(queries, BLOCK_QUERIES) * heads)
    most_keys = keys
    sequence = open_sequence(
        batch, queries, keys, total_queries, total_keys, pairs, causal_offset, window, distance_zero, bias, bias_query,
        cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, logsumexp, BOTTOM_RIGHT,
    )  # fmt: skip
    first_query, first_key, queries, keys = sequence.first_query, sequence.first_key, sequence.queries, sequence.keys
    first_tile_row = batch * map_batch + head * map_head
    tile = tl.cdiv(queries, BLOCK_QUERIES) - 1 - slot
    if tile_order is not None:
        tile = tl.load(tile_order + first_tile_row + slot)
    if cu_seqlens_q is not None:
        if slot == 0:
            fill_gap(
                at_row(grad_q, batch, head, 0, grad_q_batch, grad_q_head, grad_q_row, UNIT), grad_q_row,
                None, cu_seqlens_q, batch, batches, first_query, queries,
                total_queries, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT,
            )  # fmt: skip
        if tile < 0:
            return
    start_query = tile * BLOCK_QUERIES

    grad_out = at_row(grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT)
    q = at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT)
    k = at_row(k, batch, head // group, first_key, k_batch, k_head, k_row, UNIT)
    v = at_row(v, batch, head // group, first_key, v_batch, v_head, v_row, UNIT)
    out = at_row(out, batch, head, first_query, out_batch, out_head, out_row, UNIT)
    grad_q = at_row(grad_q, batch, head, first_query, grad_q_batch, grad_q_head, grad_q_row, UNIT)
    mask = open_mask(
        sequence, head, lengths, lengths_batch, lengths_query, query_ids, query_ids_batch,
        key_ids, key_ids_batch, keep, keep_batch, keep_head, keep_query, keep_word,
        key_keep, key_keep_batch, key_keep_head, bias, bias_batch, bias_head, bias_key,
        distance_bias, distance_batch, distance_head, softcap, logsumexp, MASK_UNIT,
    )  # fmt: skip
    bounds = mask.bounds
    random = RandomBits(load_seed(seed), threshold, batch, head)
    dropout_bits = bits_at_head(
        dropout_bits, cu_seqlens_q, batch, batches, head, heads, first_query, queries, total_queries, most_keys
    )

    rows = query_rows(start_query, bounds, BLOCK_QUERIES)
    limit = key_limits(rows, bounds, PARTS)
    last_key = tl.maximum(tl.max(limit, 0), 0)
    steps = key_steps(
        tile_counts, first_tile_row + tile, start_query, limit, last_key, bounds, BLOCK_QUERIES, BLOCK_KEYS, PARTS
    )
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    if tile_list is not None:
        tile_list += (first_tile_row + tile).to(tl.int64) * key_tiles

    first_row = statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
    row = start_query + tl.arange(0, BLOCK_QUERIES)
    shift = tl.load(logsumexp + first_row + rows)
    empty = shift == float("-inf")
    shift = tl.where(empty, 0.0, shift) * (1.0 if BASE_E else LOG2E)
    q_tile = load_rows(q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    grad_tile = load_rows(grad_out, start_query, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    # delta: the value that the softmax gradient subtracts per row.
    out_tile = load_rows(out, start_query, queries, out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    row_delta = row_products(grad_tile, out_tile)
    if grad_logsumexp is not None:
        # The logsumexp of an empty row is a constant, so its gradient (perhaps NaN, through an exp) is ignored.
        row_delta -= tl.load(grad_logsumexp + first_row + rows, mask=empty == 0, other=0.0)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)

    # A large logsumexp has lost digits (with a bias of -1e9 on a whole row, even the number of keys): weights from it
    # do not sum to 1, nor gradients of scores to 0. If that would be visible, both sums are computed here first. From 8
    # on, half a unit in the last place of an fp32 logsumexp is four units in the last place of a weight.
    if BASE_E:
        again = tl.abs(shift) > (8.0 if q_tile.dtype == tl.float32 else 1024.0)
        if q_tile.dtype == tl.float32:
            again = again | (limit == 1)  # one key has weight 1: delta is the gradient of the weight, to the last bit
        sum_end = tl.where(any_true(again), steps.end, 0)
        row_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
        if sinks is not None:
            row_sum = tl.where(sum_end > 0, tl.math.exp2((tl.load(sinks + head) - shift) * LOG2E), 0.0)
        gradient_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
        for step in tl.range(0, sum_end, num_stages=1, disable_licm=True):
            start = tile_at(tile_list, step, steps, key_tiles) * BLOCK_KEYS
            k_tile = load_rows(k, start, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            v_tile = load_rows(v, start, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            scores, allowed, _ = masked_scores(
                scores, scale, start_query, start, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT, PARTS
            )
            weights = tl.where(allowed, exponential(scores, shift[:, None], scale, BASE_E), 0.0)
            row_sum += tl.sum(weights, 1)
            if seed is not None:
                kept = attention_keep_tile(random, start_query, start, BLOCK_QUERIES, BLOCK_KEYS)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            gradient_sum += tl.sum(tl.where(allowed, weights * grad_weights, 0.0), 1)
        summed = row_sum > 0.0
        row_sum = tl.where(summed, row_sum, 1.0)
        gradient_sum /= row_sum
        if grad_logsumexp is not None:
            gradient_sum -= tl.load(grad_logsumexp + first_row + rows)
        row_delta = tl.where(summed, gradient_sum, row_delta)
        tl.store(sums + first_row + row, row_sum, mask=row < queries)

    tl.store(delta + first_row + row, row_delta, mask=row < queries)
    # Read back in the layout of the products. From Triton 3.9 on, a loop without LICM converts values of another layout
    # in every step, which takes registers and a barrier.
    tl.debug_barrier()
    row_delta = tl.load(delta + first_row + rows)
    if not ZERO_EMPTY_ROWS:
        FLAGS: tl.constexpr = BLOCK_QUERIES // FLAG_ROWS
        flag = tile * FLAGS + tl.arange(0, FLAGS)
        found = tl.max(tl.reshape(empty.to(tl.int32), (FLAGS, FLAG_ROWS)), 1)
        empty_flags += flag_row(cu_seqlens_q, batch, head, heads, first_query, queries)
        tl.store(empty_flags + flag, found, mask=flag * FLAG_ROWS < queries)

    # A second round only after a NaN or Inf result: it reads non-finite keys as zeros. For queries that may see such a
    # key, the scores are NaN anyway.
    end = steps.end
    for NONFINITE_PASS in tl.static_range(0, 2):
        if NONFINITE_PASS:
            nonfinite = any_true((acc - acc) != 0.0)
            end = tl.where(nonfinite, steps.end, 0)
            if nonfinite:
                acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)
        for step in tl.range(0, end, num_stages=1 if NONFINITE_PASS else None, disable_licm=True):
            start = tile_at(tile_list, step, steps, key_tiles) * BLOCK_KEYS
            k_tile = load_rows(k, start, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            v_tile = load_rows(v, start, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if BASE_E and not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            if BIASED:
                scores, allowed, slope = masked_scores(
                    scores, scale, start_query, start, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT, PARTS
                )
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            else:
                # Selected again after the branch, for the layout of the products: see the forward kernel.
                edge = at_edge(step, steps, window is not None and tile_list is None, True)
                masked, masked_grad = scores, grad_weights
                if edge:
                    allowed = allowed_tile(start_query, start, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, PARTS)
                    masked = tl.where(allowed, scores, float("-inf"))
                    masked_grad = tl.where(allowed, grad_weights, 0.0)
                scores = tl.where(edge, masked, scores) if BLOCK_QUERIES >= BLOCK_D else masked
                grad_weights = tl.where(edge, masked_grad, grad_weights) if BLOCK_QUERIES >= BLOCK_D else masked_grad
            weights = exponential(scores, shift[:, None], scale, BASE_E)
            if BASE_E:
                weights = weights / row_sum[:, None]
            if seed is not None:
                kept = recall_keep_tile(dropout_bits, random, start_query, start, most_keys, BLOCK_QUERIES, BLOCK_KEYS)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            grad_scores = weights * (grad_weights - row_delta[:, None])
            if softcap is not None:
                grad_scores *= slope
            if NONFINITE_PASS:
                k_tile = tl.where((k_tile - k_tile) == 0.0, k_tile, 0.0)
            acc = tl.dot(factor_in_registers(grad_scores.to(k_tile.dtype)), k_tile, acc, input_precision="ieee")

    store_rows(grad_q, acc * scale, start_query, queries, grad_q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
