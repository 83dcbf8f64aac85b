"""Masked attention, backward: the gradients of k and v, a program a tile of keys of one key head.

The program loops over the query heads of its group, and over the queries of each that see any of its keys. Rows
without keys, whose weight is 1/Lk on every key, may lie before those: where there are any, it starts from row 0.
"""

import triton.language as tl

from .attention_tiles import (
    LOG2E,
    any_true,
    at_head,
    exponential,
    jit,
    key_limits,
    load_rows,
    mask_scores,
    store_rows,
    within_limits,
)
from .philox import attention_keep_tile, load_seed

SCAN_ROWS = tl.constexpr(1024)


@jit
def grad_kv_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, grad_k, grad_v, keep, key_keep, lengths, bias, seed,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    grad_k_batch: tl.int64, grad_k_head: tl.int64, grad_k_row: tl.int64,
    grad_v_batch: tl.int64, grad_v_head: tl.int64, grad_v_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_key,
    key_keep_batch: tl.int64, key_keep_head: tl.int64, key_keep_key,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    heads, group, queries, keys, causal_offset, threshold, rescale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    BIASED: tl.constexpr = bias is not None
    NATURAL: tl.constexpr = sums is not None
    DENSE: tl.constexpr = (keep is not None) or (key_keep is not None) or (bias is not None)
    # First key tile first: under a causal mask it has the most queries.
    tiles = tl.cdiv(keys, BLOCK_KEYS)
    start_key = tl.program_id(0) % tiles * BLOCK_KEYS
    batch = tl.program_id(0) // tiles // (heads // group)
    kv_head = tl.program_id(0) // tiles % (heads // group)
    if seed is not None:
        key_low, key_high = load_seed(seed)

    # Which queries see none of this tile's keys, by bounds alone, and from which on they see all of them.
    end_key = start_key + BLOCK_KEYS
    length = keys
    uniform_length = True
    if lengths is not None:
        uniform_length = lengths_query == 0
        length = tl.where(uniform_length, tl.load(lengths + batch.to(tl.int64) * lengths_batch), keys)
    first = tl.minimum(tl.maximum(start_key - causal_offset, 0), queries) // BLOCK_QUERIES * BLOCK_QUERIES
    first = tl.where(start_key < length, first, queries)
    full = tl.cdiv(tl.maximum(end_key - 1 - causal_offset, 0), BLOCK_QUERIES) * BLOCK_QUERIES
    full = tl.where(uniform_length & (end_key <= length), full, queries)
    # Where a row without keys may be among those first ones: it gives every value its share.
    scan = first if DENSE or lengths is not None else tl.minimum(first, tl.maximum(-causal_offset, 0))

    k = at_head(k, batch, kv_head, k_batch, k_head, UNIT)
    v = at_head(v, batch, kv_head, v_batch, v_head, UNIT)
    k_tile = load_rows(k, start_key, keys, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    v_tile = load_rows(v, start_key, keys, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    k_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)

    for member in tl.range(0, group, disable_licm=True):
        head = kv_head * group + member
        q_base = at_head(q, batch, head, q_batch, q_head, UNIT)
        grad_base = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT)
        keep_base = keep
        if keep is not None:
            keep_base = at_head(keep, batch, head, keep_batch, keep_head, MASK_UNIT)
        key_keep_base = key_keep
        if key_keep is not None:
            key_keep_base = at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 1)
        bias_base = bias
        if bias is not None:
            bias_base = at_head(bias, batch, head, bias_batch, bias_head, MASK_UNIT)
        first_row = (batch * heads + head).to(tl.int64) * queries
        begin = first
        if not ZERO_EMPTY_ROWS:
            for start in tl.range(0, scan, SCAN_ROWS):
                row = start + tl.arange(0, SCAN_ROWS)
                logsum = tl.load(logsumexp + first_row + row, mask=row < scan, other=0.0)
                begin = tl.where(any_true(logsum == float("-inf")), 0, begin)

        for start in tl.range(begin, queries, BLOCK_QUERIES, disable_licm=True):
            row = start + tl.arange(0, BLOCK_QUERIES)
            # Rows past the last query weigh nothing: exp(0 - inf).
            shift = tl.load(logsumexp + first_row + row, mask=row < queries, other=float("inf"))
            centre = tl.load(delta + first_row + row, mask=row < queries, other=0.0)
            q_tile = load_rows(q_base, start, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            grad_tile = load_rows(grad_base, start, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if NATURAL and not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            empty = shift == float("-inf")
            if DENSE:
                limit = key_limits(
                    tl.minimum(row, queries - 1), batch, lengths, lengths_batch, lengths_query, causal_offset, keys
                )
                scores, allowed = mask_scores(
                    scores, scale, start, queries, start_key, keys, limit, keep_base, keep_query, keep_key,
                    key_keep_base, key_keep_key, bias_base, bias_query, bias_key, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT,
                )  # fmt: skip
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
                if not ZERO_EMPTY_ROWS:
                    scores = tl.where(empty[:, None], 0.0, scores)
            elif start < full:
                limit = key_limits(
                    tl.minimum(row, queries - 1), batch, lengths, lengths_batch, lengths_query, causal_offset, keys
                )
                visible = within_limits(start_key, limit, BLOCK_KEYS)
                scores = tl.where(visible, scores, float("-inf"))
                grad_weights = tl.where(visible, grad_weights, 0.0)
                if not ZERO_EMPTY_ROWS:
                    scores = tl.where(empty[:, None], 0.0, scores)
            # An empty row: exp(0 - log(keys)) on every key, or exp(-inf - 0).
            shift = tl.where(empty, 0.0 if ZERO_EMPTY_ROWS else tl.log(keys.to(tl.float32)), shift)
            centre = tl.where(empty, 0.0, centre)
            weights = exponential(scores, (shift * (1.0 if NATURAL else LOG2E))[:, None], scale, NATURAL)
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

    grad_k = at_head(grad_k, batch, kv_head, grad_k_batch, grad_k_head, UNIT)
    grad_v = at_head(grad_v, batch, kv_head, grad_v_batch, grad_v_head, UNIT)
    store_rows(grad_k, k_acc * scale, start_key, keys, grad_k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
    store_rows(grad_v, v_acc * rescale, start_key, keys, grad_v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
