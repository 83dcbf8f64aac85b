"""Masked attention, backward: gradients of scores, for the gradients of bias and distance bias.

The gradient of a score is ``weight * (gradient of the weight - delta)`` (T. Dao, "FlashAttention-2", 2023, section
3.1.2). One kernel computes delta and the sum of the weights per row. From both, any tile of gradients can be computed
directly.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launcher import Launch, blocks_of
from ..philox import RandomBits, attention_keep_tile, load_seed
from .launches import contiguous, kernel_views, score_kinds
from .mask import Bounds, Mask, ids_at, key_limits, masked_scores, query_rows, sink_of
from .steps import aligned, program_of, sequence, sequence_bias, sequence_bias_row, statistics_row, used_keys
from .tile_map import bits_arguments
from .tiles import at_head, at_row, exponential, jit, load_rows, mask_arguments, sequence_arguments, tensor_arguments
from .weights import TILES, summed_rows

# (query rows, keys, warps) of a tile of the row sums, where the tiles of weights.py would need too many registers.
ROW_TILES = TILES | {(16, 128): (64, 32, 4)}


@jit
def _rows_kernel(
    grad_out, q, k, v, out, logsumexp, grad_logsumexp, delta, sums, keep, key_keep, lengths, bias, distance_bias,
    query_ids, key_ids, sinks, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, group, queries, keys, total_queries: tl.int64, total_keys: tl.int64, pairs: tl.int64, causal_offset, window,
    threshold, rescale, scale, distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """Compute per row: delta, which the score gradients subtract, and the sum of the weights."""
    batch, head, tile = program_of(heads, queries, None, BLOCK_QUERIES)
    first_query, queries = sequence(cu_seqlens_q, batch, queries, total_queries)
    first_key, stored_keys = sequence(cu_seqlens_k, batch, keys, total_keys)
    keys = used_keys(seqused_k, bias_starts, batch, queries, stored_keys, pairs)
    causal_offset = aligned(causal_offset, keys - queries, BOTTOM_RIGHT)
    window = aligned(window, keys - queries, BOTTOM_RIGHT)
    distance_zero = aligned(distance_zero, queries - keys, BOTTOM_RIGHT)
    bias = sequence_bias(bias, bias_starts, batch)
    bias_query = sequence_bias_row(bias_query, bias_starts, stored_keys)
    start_query = tile * BLOCK_QUERIES
    if cu_seqlens_q is not None:  # noqa: SIM102 - decided when compiling, the other when running
        if start_query >= queries:
            return
    grad_out = at_row(grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT)
    q = at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT)
    k = at_row(k, batch, head // group, first_key, k_batch, k_head, k_row, UNIT)
    v = at_row(v, batch, head // group, first_key, v_batch, v_head, v_row, UNIT)
    out = at_row(out, batch, head, first_query, out_batch, out_head, out_row, UNIT)
    bounds = Bounds(
        at_head(lengths, batch, head, lengths_batch, 0, 1), lengths_query, causal_offset, window, queries, keys,
        ids_at(query_ids, batch, query_ids_batch, first_query), ids_at(key_ids, batch, key_ids_batch, first_key),
    )  # fmt: skip
    mask = Mask(
        bounds,
        at_head(keep, batch, head, keep_batch, keep_head, 8), keep_query, keep_word,
        at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 8),
        at_head(bias, batch, head, bias_batch, bias_head, MASK_UNIT), bias_query, bias_key,
        at_head(distance_bias, batch, head, distance_batch, distance_head, 1), distance_zero, softcap,
        sink_of(sinks, head),
    )  # fmt: skip
    random = RandomBits(load_seed(seed), threshold, batch, head)

    rows = query_rows(start_query, bounds, BLOCK_QUERIES)
    limit = key_limits(rows, bounds)
    last_key = tl.maximum(tl.max(limit, 0), 0)
    all_queries = queries if cu_seqlens_q is None else total_queries
    first_row = statistics_row(cu_seqlens_q, batch, head, heads, all_queries, first_query)
    shift = tl.load(logsumexp + first_row + rows)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    q_tile = load_rows(q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    grad_tile = load_rows(grad_out, start_query, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    out_tile = load_rows(out, start_query, queries, out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    weight_sum, gradient_sum = summed_rows(
        q_tile, grad_tile, k, v, k_row, v_row, shift, start_query, limit, last_key, scale, rescale, mask, random,
        HEAD_DIM, BLOCK_D, BLOCK_QUERIES, BLOCK_KEYS, UNIT, MASK_UNIT, True,
    )  # fmt: skip
    summed = weight_sum > 0.0
    weight_sum = tl.where(summed, weight_sum, 1.0)
    row_delta = tl.where(summed, gradient_sum / weight_sum, row_delta)
    if grad_logsumexp is not None:
        row_delta -= tl.load(grad_logsumexp + first_row + rows)
    row = start_query + tl.arange(0, BLOCK_QUERIES)
    tl.store(delta + first_row + row, row_delta, mask=row < queries)
    tl.store(sums + first_row + row, weight_sum, mask=row < queries)


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


def rows_launch(
    inputs: tuple[Tensor | None, ...], delta: Tensor, sums: Tensor, params: AttentionParams
) -> tuple[Launch, Tensor, Tensor, dict[str, object]]:
    """Launch that fills delta and sums, both like logsumexp; q and k as (B, H, L, D); and the arguments that a kernel
    over :func:`grad_score_tile` shares with it.

    Inputs are grad_out, q, k, v, out, logsumexp and grad_logsumexp, as given to the launcher with the params.
    """
    grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
    sequences = sequence_arguments(params, logsumexp, k)
    grad_out, q, out, k, v = kernel_views(params, (grad_out, q, out), (k, v))
    shared = mask_arguments(q, k, params) | bits_arguments(params.keep, params.key_keep) | sequences
    shared |= {"delta": delta, "sums": sums, "logsumexp": logsumexp, "grad_logsumexp": contiguous(grad_logsumexp)}
    rows, keys, warps = ROW_TILES[q.element_size() * 8, shared["BLOCK_D"]]
    launch = Launch(
        name=f"attention grad_bias_rows {str(q.dtype)[6:]} d{shared['BLOCK_D']} {rows}x{keys} {warps} warps"
        f"{'' if shared['seed'] is None else ' dropout'}{'' if params.packed is None else ' packed'}"
        f"{score_kinds(params)}",
        kernel=_rows_kernel,
        grid=blocks_of(q.shape[2], rows) * q.shape[0] * q.shape[1],
        arguments=tensor_arguments(grad_out=grad_out, q=q, k=k, v=v, out=out) | shared
        | {"BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
        num_warps=warps,
        num_stages=1,
    )  # fmt: skip
    return launch, q, k, tensor_arguments(grad_out=grad_out, q=q, k=k, v=v) | shared
