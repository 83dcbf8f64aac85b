"""Masked attention, backward: gradients of scores, for the gradients of bias and distance bias.

The gradient of a score is ``weight * (gradient of the weight - delta)`` (T. Dao, "FlashAttention-2", 2023, section
3.1.2). The kernel of grad_q stores delta and the sum of the weights per row. From both, any tile of gradients can be
computed directly.
"""

import triton
import triton.language as tl

from ..philox import attention_keep_tile
from .mask import masked_scores, query_rows
from .tiles import exponential, load_rows

# (query rows, keys, warps) of a tile, by bits of the type and padded head size.
TILES = {
    (16, 32): (64, 64, 8), (16, 64): (64, 64, 8), (16, 128): (64, 32, 8), (16, 256): (64, 32, 8),
    (32, 32): (32, 32, 8), (32, 64): (32, 32, 8), (32, 128): (16, 32, 16), (32, 256): (16, 32, 16),
}  # fmt: skip


@triton.jit
def grad_score_tile(
    grad_out, grad_out_row, q, q_row, k, k_row, v, v_row, logsumexp, delta, sums,
    start_query, start_key, limit, last_key, scale, rescale, mask, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the final scores of a tile (capped, biased): fp32 (QUERIES, KEYS). 0 for blocked keys, for rows
    without keys, and for rows past the last. Pointers are those of the head and sequence."""
    rows = query_rows(start_query, mask.bounds, QUERIES)
    shift = tl.load(logsumexp + rows)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    row_delta = tl.load(delta + rows)
    divisor = tl.load(sums + rows)
    queries = mask.bounds.queries
    q_tile = load_rows(q, start_query, queries, q_row, QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    k_tile = load_rows(k, start_key, last_key, k_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    scores, allowed, _ = masked_scores(scores, scale, start_query, start_key, limit, mask, QUERIES, KEYS, MASK_UNIT)
    weights = exponential(scores, shift[:, None], scale, True) / divisor[:, None]
    grad_tile = load_rows(grad_out, start_query, queries, grad_out_row, QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    v_tile = load_rows(v, start_key, last_key, v_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
    if random.key is not None:
        kept = attention_keep_tile(random, start_query, start_key, QUERIES, KEYS)
        grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
    adds = allowed & (start_query + tl.arange(0, QUERIES) < queries)[:, None]
    return tl.where(adds, weights * (grad_weights - row_delta[:, None]), 0.0)
