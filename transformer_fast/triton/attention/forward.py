"""Masked attention, forward: one pass over the keys with an online softmax.

Method: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018; tiled as in T. Dao,
"FlashAttention-2", 2023, section 3.1. A program computes one tile of queries of one head. The program runs tiles of
keys visible to all its queries without mask code, then partially visible tiles, and skips the rest.

The loops do not handle two rare cases: rows with no key (their weight is 1/Lk on *every* key), and NaN or Inf in V at a
key that some rows of a tile block (0 * NaN is NaN inside a matrix product). Both are visible in the result. Then the
program repeats its tile once, and reads such values as zeros.
"""

from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launch_cache import run_kept
from ..launcher import Launch, architecture_of, widen_bf16_if_interpreted, without_keys
from ..philox import RandomBits, attention_keep_tile, kept_or_zero, load_seed
from .dropout_bits import bits_at_head, draw_keep_tile, empty_dropout_bits
from .launches import MAP_TENSORS, is_empty, kernel_views, tile_launch
from .mask import allowed_tile, key_limits, masked_scores, open_mask, parts_of, query_rows
from .steps import at_edge, fill_gap, key_steps, open_sequence, program_of, statistics_row, tile_at
from .tiles import LN2, LOG2E, any_true, at_row, exponential, jit, load_rows, positive_scale, store_rows

REPEAT_KEYS = tl.constexpr(32)


@jit
def _forward_kernel(
    q, k, v, out, logsumexp, dropout_bits, keep, key_keep, lengths, bias, distance_bias, query_ids, key_ids, sinks,
    seed, cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, batch_order, tile_list, tile_counts, tile_order,
    map_batch, map_head,
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
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = parts_of(
        causal_offset is not None, lengths is not None, window is not None, query_ids is not None,
        keep is not None, key_keep is not None, bias is not None, distance_bias is not None, softcap is not None,
    )  # fmt: skip
    BIASED: tl.constexpr = (bias is not None) or (distance_bias is not None) or (softcap is not None)
    batch, head, slot = program_of(heads, queries, batch_order, BLOCK_QUERIES)
    batches = tl.num_programs(0) // (tl.cdiv(queries, BLOCK_QUERIES) * heads)
    most_keys = keys
    sequence = open_sequence(
        batch, queries, keys, total_queries, total_keys, pairs, causal_offset, window, distance_zero, bias, bias_query,
        cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, logsumexp, BOTTOM_RIGHT,
    )  # fmt: skip
    first_query, first_key, queries, keys = sequence.first_query, sequence.first_key, sequence.queries, sequence.keys
    first_tile_row = batch * map_batch + head * map_head
    # Last query tile first: under a causal mask it has the most keys, and long programs should start early.
    tile = tl.cdiv(queries, BLOCK_QUERIES) - 1 - slot
    if tile_order is not None:
        tile = tl.load(tile_order + first_tile_row + slot)
    if cu_seqlens_q is not None:
        if slot == 0:
            fill_gap(
                at_row(out, batch, head, 0, out_batch, out_head, out_row, UNIT), out_row,
                logsumexp + head.to(tl.int64) * total_queries, cu_seqlens_q, batch, batches, first_query, queries,
                total_queries, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT,
            )  # fmt: skip
        if tile < 0:
            return
    start_query = tile * BLOCK_QUERIES

    q = at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT)
    k = at_row(k, batch, head // group, first_key, k_batch, k_head, k_row, UNIT)
    v = at_row(v, batch, head // group, first_key, v_batch, v_head, v_row, UNIT)
    out = at_row(out, batch, head, first_query, out_batch, out_head, out_row, UNIT)
    logsumexp += statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
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

    limit = key_limits(query_rows(start_query, bounds, BLOCK_QUERIES), bounds, PARTS)
    last_key = tl.maximum(tl.max(limit, 0), 0)
    steps = key_steps(
        tile_counts, first_tile_row + tile, start_query, limit, last_key, bounds, BLOCK_QUERIES, BLOCK_KEYS, PARTS
    )
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    if tile_list is not None:
        tile_list += (first_tile_row + tile).to(tl.int64) * key_tiles

    q_tile = load_rows(q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    row_max = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if sinks is not None:
        row_max = tl.zeros((BLOCK_QUERIES,), tl.float32) + tl.load(sinks + head) * (1.0 if BIASED else LOG2E)
        row_sum += 1.0
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)

    # Without LICM the compiler recomputes addresses and Philox keys, which is cheaper than holding them in registers.
    for step in tl.range(0, steps.end, disable_licm=True):
        start = tile_at(tile_list, step, steps, key_tiles) * BLOCK_KEYS
        k_tile = load_rows(k, start, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if BIASED:
            scores, allowed, _ = masked_scores(
                scores, scale, start_query, start, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT, PARTS
            )
            scores = tl.where(allowed, scores, float("-inf"))
        else:
            # If scores come only from a branch, Triton does not see that the next product uses them. On sm_80 it would
            # then spread the keys of a row over several warps, which must exchange sums and draws along the row. The
            # exchange is worse in products with fewer rows than columns. The extra select shows Triton the use; it
            # costs nothing, because compilers remove it.
            edge = at_edge(step, steps, window is not None and tile_list is None, True)
            masked = scores
            if edge:
                allowed = allowed_tile(start_query, start, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, PARTS)
                masked = tl.where(allowed, scores, float("-inf"))
            scores = tl.where(edge, masked, scores) if BLOCK_QUERIES >= BLOCK_D else masked
        new_max = tl.maximum(row_max, tl.max(scores, 1) if BIASED else tl.max(scores, 1) * (scale * LOG2E))
        # Before its first key a row has the maximum -inf; -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = exponential(scores, shift[:, None], scale, BIASED)
        decay = tl.math.exp2((row_max - shift) * (LOG2E if BIASED else 1.0))
        row_sum = row_sum * decay + tl.sum(weights, 1)
        if seed is not None:
            kept = draw_keep_tile(dropout_bits, random, start_query, start, most_keys, BLOCK_QUERIES, BLOCK_KEYS)
            weights = kept_or_zero(kept, weights)
        v_tile = load_rows(v, start, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
        row_max = new_max

    # The two loops below usually take no step; they stand in for branches.
    empty = row_sum == 0.0
    nonfinite_end = tl.where(any_true((acc - acc) != 0.0), last_key, 0)
    repeat_end = nonfinite_end
    if not ZERO_EMPTY_ROWS:
        repeat_end = tl.where(any_true(empty), keys, repeat_end)
    if repeat_end > 0:
        acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)
    shift = tl.where(empty, 0.0, row_max)
    for start in tl.range(0, repeat_end, REPEAT_KEYS, num_stages=1, disable_licm=True):
        k_tile = load_rows(k, start, last_key, k_row, REPEAT_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        scores, allowed, _ = masked_scores(
            scores, scale, start_query, start, limit, mask, BLOCK_QUERIES, REPEAT_KEYS, MASK_UNIT, PARTS
        )
        weights = tl.where(allowed, exponential(scores, shift[:, None], scale, BIASED), 0.0)
        if not ZERO_EMPTY_ROWS:
            weights = tl.where(empty[:, None], 1.0, weights)
        if seed is not None:
            kept = attention_keep_tile(random, start_query, start, BLOCK_QUERIES, REPEAT_KEYS)
            weights = kept_or_zero(kept, weights)
        v_tile = load_rows(v, start, keys, v_row, REPEAT_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        v_tile = tl.where((v_tile - v_tile) == 0.0, v_tile, 0.0)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    # A separate loop finds the queries that a NaN or Inf reaches; one loop for both would need too many registers.
    for start in tl.range(0, nonfinite_end, REPEAT_KEYS, num_stages=1, disable_licm=True):
        v_tile = load_rows(v, start, last_key, v_row, REPEAT_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        scores = tl.zeros((BLOCK_QUERIES, REPEAT_KEYS), tl.float32)
        _, allowed, _ = masked_scores(
            scores, scale, start_query, start, limit, mask, BLOCK_QUERIES, REPEAT_KEYS, MASK_UNIT, PARTS
        )
        seen = tl.where(allowed, 1.0, 0.0).to(v_tile.dtype)
        nonfinite = tl.where((v_tile - v_tile) == 0.0, 0.0, 1.0).to(v_tile.dtype)
        reached = tl.dot(seen, nonfinite, input_precision="ieee") > 0.0
        acc += tl.where(reached, float("nan"), 0.0)

    divisor = tl.where(empty, tl.maximum(keys, 1).to(tl.float32), row_sum)
    logsum = (row_max if BIASED else row_max * LN2) + tl.log(divisor)
    logsum = tl.where(empty, float("-inf"), logsum)
    acc *= (rescale / divisor)[:, None]
    store_rows(out, acc, start_query, queries, out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    row = start_query + tl.arange(0, BLOCK_QUERIES)
    tl.store(logsumexp + row, logsum, mask=row < queries)


def forward_launches(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], params: AttentionParams, arch: str | None = None
) -> list[Launch]:
    """Kernel launch of :func:`attention_forward`, for an architecture class."""
    (q, k, v), (out, logsumexp, dropout_bits) = inputs, outputs
    q, scale = positive_scale(q, params.scale)
    params = replace(params, scale=scale)
    stored = k
    q, k, v = kernel_views(params, (q,), (k, v))
    (out,) = kernel_views(params, (out,), (), written=True)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    arch = architecture_of(q) if arch is None else arch
    rows = {"logsumexp": logsumexp}
    return [tile_launch("forward", _forward_kernel, q, k, arch, tensors, rows, params, stored, dropout_bits)]


@widen_bf16_if_interpreted(results=1)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, dropout_words: int | None = 0, call: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Masked attention by Triton.

    Args:
        q: (B, H, Lq, D), fp32, fp16 or bf16; D from 1 to 256; last stride 1; (Tq, H, D) for a packed batch.
        k, v: (B, Hkv, Lk, D) of q's dtype; ``Hkv`` divides ``H``; last stride 1; (Tk, Hkv, D) for a packed
            batch.
        params: mask, scale and dropout. :mod:`..philox` draws dropout; query i and key j of sequence b draw the same in
            a packed and in a padded batch.
        dropout_words: how many int32 keep bits of dropout for a backward; None: see
            :func:`.dropout_bits.words_of`.
        call: see :func:`..launch_cache.run_kept`.

    Returns:
        out like q and logsumexp (B, H, Lq) fp32, or (H, Tq) of a packed batch; -inf for a row without keys. Third, the
        bits of kept weights for the backward (:mod:`.dropout_bits`), or None.
    """
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    out, logsumexp = torch.empty_like(q), torch.empty(rows, dtype=torch.float32, device=q.device)
    dropout_bits = empty_dropout_bits(q, k, params, architecture_of(q), dropout_words)
    if is_empty(q, k, params):
        return out.zero_(), without_keys(logsumexp, params.sinks), dropout_bits
    outputs = out, logsumexp, dropout_bits
    run_kept(call, outputs, lambda: forward_launches((q, k, v), outputs, params), MAP_TENSORS)
    return outputs
