"""Attention weights on request, recomputed from the logsumexp: ``exp(score - logsumexp)``, tile by tile.

The forward stores one number per row rather than Lq x Lk weights (T. Dao, "FlashAttention-2", 2023, section 3.1.1). A
request for weights costs one more matrix product and the store.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launch_cache import run_kept
from ..launcher import Launch, blocks_of, widen_bf16_if_interpreted
from ..philox import RandomBits, attention_keep_tile, load_seed
from .launches import MAP_TENSORS, score_kinds
from .mask import Bounds, Mask, any_visible, first_visible, ids_at, key_limits, masked_scores, query_rows, sink_of
from .steps import program_of
from .tile_map import bits_arguments
from .tiles import (
    LOG2E,
    any_true,
    at_head,
    exponential,
    jit,
    load_rows,
    mask_arguments,
    tensor_arguments,
    with_32_bit_offsets,
)

# (query rows, keys, warps) of a tile, by bits of the type and padded head size.
TILES = {
    (16, 32): (64, 64, 8), (16, 64): (64, 64, 8), (16, 128): (64, 32, 8), (16, 256): (64, 32, 8),
    (32, 32): (32, 32, 8), (32, 64): (32, 32, 8), (32, 128): (16, 32, 16), (32, 256): (16, 32, 16),
}  # fmt: skip


@triton.jit
def summed_rows(
    q_tile, grad_tile, k, v, k_row, v_row, shift, start_query, limit, last_key, scale, rescale, mask, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, WITH_GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Recomputed sum of `exp(score - shift)` per row, and the sum of weight times gradient; (1, 0) if not needed.

    A large logsumexp has lost digits (with a bias of -1e9 on a whole row, even the number of keys). Weights from such a
    logsumexp do not sum to 1, and gradients of scores do not sum to 0. Only a tile with such a row loops over the keys.
    """
    too_large = tl.abs(shift) > (4.0 if q_tile.dtype == tl.float32 else 1024.0)
    first_key = first_visible(start_query, mask.bounds) // KEYS * KEYS
    end = tl.where(any_true(too_large), last_key, first_key)
    weight_sum = tl.zeros((QUERIES,), tl.float32)
    if mask.sink is not None:
        weight_sum = tl.where(end > first_key, tl.math.exp2((mask.sink - shift) * LOG2E), 0.0)
    gradient_sum = tl.zeros((QUERIES,), tl.float32)
    for start in tl.range(first_key, end, KEYS, num_stages=1, disable_licm=True):
        k_tile = load_rows(k, start, last_key, k_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if mask.bias is None and mask.distance_bias is None and mask.softcap is None:
            scores *= scale
        scores, allowed, _ = masked_scores(scores, scale, start_query, start, limit, mask, QUERIES, KEYS, MASK_UNIT)
        weights = tl.where(allowed, exponential(scores, shift[:, None], scale, True), 0.0)
        weight_sum += tl.sum(weights, 1)
        if WITH_GRADIENTS:
            v_tile = load_rows(v, start, last_key, v_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            if random.key is not None:
                kept = attention_keep_tile(random, start_query, start, QUERIES, KEYS)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            gradient_sum += tl.sum(tl.where(allowed, weights * grad_weights, 0.0), 1)
    return weight_sum, gradient_sum


@triton.jit
def _tile_of_weights(
    q_tile, k, k_row, shift, divisor, start_query, start, limit, last_key, scale, mask,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Weights of a tile before dropout, (QUERIES, KEYS), 0 where blocked."""
    k_tile = load_rows(k, start, last_key, k_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if BASE_E and (mask.bias is None and mask.distance_bias is None and mask.softcap is None):
        scores *= scale
    scores, allowed, _ = masked_scores(scores, scale, start_query, start, limit, mask, QUERIES, KEYS, MASK_UNIT)
    return tl.where(allowed, exponential(scores, shift[:, None], scale, BASE_E) / divisor[:, None], 0.0)


@jit
def _weights_kernel(
    q, k, logsumexp, out, keep, key_keep, lengths, bias, distance_bias, query_ids, key_ids, sinks, seed,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    out_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, group, queries, keys, causal_offset, window, threshold, rescale, scale,
    distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    # What 16-bit types cannot show is not corrected.
    BIASED: tl.constexpr = (bias is not None) or (distance_bias is not None) or (softcap is not None)
    BASE_E: tl.constexpr = BIASED or (q.dtype.element_ty == tl.float32)
    DENSE: tl.constexpr = (keep is not None) or (key_keep is not None) or BIASED
    batch, head, tile = program_of(heads, queries, None, BLOCK_QUERIES)
    batch_head = (batch * heads + head).to(tl.int64)
    start_query = tile * BLOCK_QUERIES
    q = at_head(q, batch, head, q_batch, q_head, UNIT)
    k = at_head(k, batch, head // group, k_batch, k_head, UNIT)
    bounds = Bounds(
        at_head(lengths, batch, head, lengths_batch, 0, 1), lengths_query, causal_offset, window, queries, keys,
        ids_at(query_ids, batch, query_ids_batch, 0), ids_at(key_ids, batch, key_ids_batch, 0),
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
    q_tile = load_rows(q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    shift = tl.load(logsumexp + batch_head * queries + rows)
    empty = shift == float("-inf")
    shift = tl.where(empty, 0.0, shift) * (1.0 if BASE_E else LOG2E)
    divisor = tl.full((BLOCK_QUERIES,), 1.0, tl.float32)
    if BASE_E:
        weight_sum, _ = summed_rows(
            q_tile, q_tile, k, k, k_row, k_row, shift, start_query, limit, last_key, scale, rescale, mask, random,
            HEAD_DIM, BLOCK_D, BLOCK_QUERIES, BLOCK_KEYS, UNIT, MASK_UNIT, False,
        )  # fmt: skip
        # The comparison keeps NaN.
        divisor = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    uniform = 0.0 if ZERO_EMPTY_ROWS else 1.0 / keys.to(tl.float32)

    row = tl.arange(0, BLOCK_QUERIES)
    out += (batch_head * queries + start_query) * out_row * OUT_UNIT
    for start in tl.range(0, keys, BLOCK_KEYS, disable_licm=True):
        # Tiles without a visible key need no product. Kernels with a dense mask or a bias have no register for this
        # test; they mask such tiles like the others.
        weights = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
        if DENSE or any_visible(rows, start_query, start, last_key, bounds, BLOCK_KEYS):
            weights = _tile_of_weights(
                q_tile, k, k_row, shift, divisor, start_query, start, limit, last_key, scale, mask,
                HEAD_DIM, BLOCK_D, BLOCK_QUERIES, BLOCK_KEYS, UNIT, MASK_UNIT, BASE_E,
            )  # fmt: skip
        weights = tl.where(empty[:, None], uniform, weights)
        if seed is not None:
            kept = attention_keep_tile(random, start_query, start, BLOCK_QUERIES, BLOCK_KEYS)
            weights = tl.where(kept, weights * rescale, 0.0)
        column = start + tl.arange(0, BLOCK_KEYS)
        pointers = out + row[:, None].to(tl.int64) * (out_row * OUT_UNIT) + column[None, :]
        inside = (start_query + row < queries)[:, None] & (column // OUT_UNIT * OUT_UNIT < keys)[None, :]
        tl.store(pointers, weights.to(out.dtype.element_ty), mask=inside)


def weights_launches(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], params: AttentionParams) -> list[Launch]:
    """Kernel launch of :func:`attention_weights`."""
    (q, k, logsumexp), (out,) = inputs, outputs
    q, k = with_32_bit_offsets(q), with_32_bit_offsets(k)
    masking = mask_arguments(q, k, params) | bits_arguments(params.keep, params.key_keep)
    unit = 16 if k.shape[2] % 16 == 0 else 1
    rows, keys, warps = TILES[q.element_size() * 8, masking["BLOCK_D"]]
    if params.bias is not None and (params.distance_bias is not None or params.softcap is not None):
        keys = 32  # more queries would spill
    return [
        Launch(
            name=f"attention weights {str(q.dtype)[6:]} d{masking['BLOCK_D']} {rows}x{keys} {warps} warps"
            f"{' bias' if params.bias is not None else ''}{' dropout' if masking['seed'] is not None else ''}"
            f"{score_kinds(params)}",
            kernel=_weights_kernel,
            grid=blocks_of(q.shape[2], rows) * q.shape[0] * q.shape[1],
            arguments=tensor_arguments(q=q, k=k)
            | masking
            | {"logsumexp": logsumexp, "out": out, "out_row": k.shape[2] // unit, "OUT_UNIT": unit}
            | {"BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
            num_warps=warps,
            num_stages=1,
        )
    ]


@widen_bf16_if_interpreted(results=1)
def attention_weights(q: Tensor, k: Tensor, logsumexp: Tensor, params: AttentionParams, call: Any = None) -> Tensor:
    """Compute the weights of :func:`~.forward.attention_forward` by Triton, after dropout if there is a seed.

    Args:
        q: (B, H, Lq, D), fp32, fp16 or bf16; last stride 1.
        k: (B, Hkv, Lk, D) of q's dtype; last stride 1.
        logsumexp: (B, H, Lq) fp32, as the forward returned it.
        params: params of the forward, of a padded batch.
        call: see :func:`..launch_cache.run_kept`.

    Returns:
        (B, H, Lq, Lk) in q's dtype, contiguous. A row without keys is 1/Lk everywhere, or 0 with `zero_empty_rows`.
    """
    out = torch.empty((*q.shape[:3], k.shape[2]), dtype=q.dtype, device=q.device)
    if out.numel() > 0:
        run_kept(call, (out,), lambda: weights_launches((q, k, logsumexp), (out,), params), MAP_TENSORS)
    return out
