"""Masked attention, backward: the gradient of the additive bias, for any shape it is broadcast from.

The gradient of a score is ``weight * (gradient of the weight - delta)`` (T. Dao, "FlashAttention-2", 2023, section
3.1.2); that of the bias is its sum over whatever the bias was broadcast over: batches (T5), queries (ALiBi), heads.
A program owns one tile of the bias and walks over those, in one order; where too few programs would run, several share
a tile and their fp32 parts are added afterwards. Nothing is atomic: two runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launcher import Launch, blocks_of, empties_like, widen_bf16_if_interpreted
from ..philox import RandomBits, attention_keep_tile, load_seed
from .launches import run_call
from .mask import Bounds, Mask, any_visible, ids_at, key_limits, masked_scores, query_rows
from .steps import program_of
from .tile_map import bits_arguments
from .tiles import (
    RUNTIME_INTEGERS,
    at_head,
    exponential,
    jit,
    load_rows,
    mask_arguments,
    padded_head_dim,
    tensor_arguments,
    within_reach,
)
from .weights import TILES, summed_rows

# A bias of fewer tiles than this is shared out until about so many programs run: a few for each multiprocessor.
PROGRAMS = 512
# (query rows, keys, warps) a tile of what is summed up a row, where those of the weights hold too much.
ROW_TILES = TILES | {(16, 128): (64, 32, 4)}
STEPPING = ("batches_each", "heads_each", "query_tiles_each", "key_tiles_each", "parts", "steps")


@jit
def _rows_kernel(
    grad_out, q, k, v, out, logsumexp, grad_logsumexp, delta, sums, keep, key_keep, lengths, bias, distance_bias,
    query_ids, key_ids, seed,
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
    heads, group, queries, keys, causal_offset, window, threshold, rescale, scale,
    distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """For each row: delta, which its gradients of scores subtract, and what its weights sum to."""
    batch, head, tile = program_of(heads, queries, None, BLOCK_QUERIES)
    start_query = tile * BLOCK_QUERIES
    grad_out = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT)
    q = at_head(q, batch, head, q_batch, q_head, UNIT)
    k = at_head(k, batch, head // group, k_batch, k_head, UNIT)
    v = at_head(v, batch, head // group, v_batch, v_head, UNIT)
    out = at_head(out, batch, head, out_batch, out_head, UNIT)
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
    )  # fmt: skip
    random = RandomBits(load_seed(seed), threshold, batch, head)

    rows = query_rows(start_query, bounds, BLOCK_QUERIES)
    limit = key_limits(rows, bounds)
    last_key = tl.maximum(tl.max(limit, 0), 0)
    first_row = (batch * heads + head).to(tl.int64) * queries
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


@triton.jit(do_not_specialize=[*RUNTIME_INTEGERS, *STEPPING])
def _grad_bias_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, grad_bias, keep, key_keep, lengths, bias, distance_bias,
    query_ids, key_ids, seed,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, group, queries, keys, causal_offset, window, threshold, rescale, scale,
    distance_zero, softcap,
    batches_each, heads_each, query_tiles_each, key_tiles_each, parts, steps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr,
):  # fmt: skip
    """One tile of the bias, or a part of the sum for it: `steps` of the (batch, head, query tile, key tile) behind it.

    Program numbers count parts, then the bias's key tiles, query tiles, heads and batches; `*_each` is how many of
    each the bias's one stands for: 1, or all where it is broadcast.
    """
    query_tiles = tl.cdiv(queries, BLOCK_QUERIES)
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    own = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    own_key = own % (key_tiles // key_tiles_each)
    own = own // (key_tiles // key_tiles_each)
    own_query = own % (query_tiles // query_tiles_each)
    own = own // (query_tiles // query_tiles_each)
    own_head = own % (heads // heads_each)
    own_batch = own // (heads // heads_each)
    philox_key = load_seed(seed)

    acc = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    end = tl.minimum((part + 1) * steps, batches_each * heads_each * query_tiles_each * key_tiles_each)
    for step in tl.range(part * steps, end, num_stages=1, disable_licm=True):
        start_key = (own_key + step % key_tiles_each) * BLOCK_KEYS
        step = step // key_tiles_each
        start_query = (own_query + step % query_tiles_each) * BLOCK_QUERIES
        step = step // query_tiles_each
        head = own_head + step % heads_each
        batch = own_batch + step // heads_each

        row = start_query + tl.arange(0, BLOCK_QUERIES)
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
        )  # fmt: skip
        random = RandomBits(philox_key, threshold, batch, head)
        rows = query_rows(start_query, bounds, BLOCK_QUERIES)
        limit = key_limits(rows, bounds)
        last_key = tl.maximum(tl.max(limit, 0), 0)
        if any_visible(start_query, start_key, last_key, bounds, BLOCK_KEYS):
            row_number = (batch * heads + head).to(tl.int64) * queries + rows
            shift = tl.load(logsumexp + row_number)
            shift = tl.where(shift == float("-inf"), 0.0, shift)
            row_delta = tl.load(delta + row_number)
            divisor = tl.load(sums + row_number)
            head_q = at_head(q, batch, head, q_batch, q_head, UNIT)
            head_k = at_head(k, batch, head // group, k_batch, k_head, UNIT)
            head_v = at_head(v, batch, head // group, v_batch, v_head, UNIT)
            head_grad_out = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT)
            q_tile = load_rows(head_q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
            k_tile = load_rows(head_k, start_key, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            scores, allowed, _ = masked_scores(
                scores, scale, start_query, start_key, limit, mask, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT
            )
            weights = exponential(scores, shift[:, None], scale, True) / divisor[:, None]
            grad_tile = load_rows(
                head_grad_out, start_query, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT
            )
            v_tile = load_rows(head_v, start_key, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            if seed is not None:
                kept = attention_keep_tile(random, start_query, start_key, BLOCK_QUERIES, BLOCK_KEYS)
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            # Blocked keys, rows without keys and rows past the last (which repeat it) add nothing, whatever they hold.
            adds = allowed & (row < queries)[:, None]
            acc += tl.where(adds, weights * (grad_weights - row_delta[:, None]), 0.0)

    # Parts lie (part, batch, head, query, key); a tile that stands for all queries or keys is summed to one number.
    own_batch_head = own_batch.to(tl.int64) * (heads // heads_each) + own_head
    bias_queries = 1 if ONE_QUERY else queries
    bias_keys = 1 if ONE_KEY else keys
    bias_batch_heads = tl.num_programs(0) // (parts * (query_tiles // query_tiles_each) * (key_tiles // key_tiles_each))
    grad_bias += (part.to(tl.int64) * bias_batch_heads + own_batch_head) * bias_queries * bias_keys
    query = own_query * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    key = own_key * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    kind: tl.constexpr = grad_bias.dtype.element_ty
    if ONE_QUERY and ONE_KEY:
        tl.store(grad_bias, tl.sum(tl.sum(acc, 1), 0).to(kind))
    elif ONE_QUERY:
        tl.store(grad_bias + key, tl.sum(acc, 0).to(kind), mask=key < keys)
    elif ONE_KEY:
        tl.store(grad_bias + query, tl.sum(acc, 1).to(kind), mask=query < queries)
    else:
        pointers = grad_bias + query[:, None].to(tl.int64) * keys + key[None, :]
        tl.store(pointers, acc.to(kind), mask=(query < queries)[:, None] & (key < keys)[None, :])


def sharing(q: Tensor, k: Tensor, bias: Tensor) -> tuple[int, list[int], int, int]:
    """(tiles of the bias, how many of each dimension one of them stands for, parts of its sum, steps of a part)."""
    rows, keys, _ = TILES[q.element_size() * 8, padded_head_dim(q.shape[-1])]
    counts = (*q.shape[:2], blocks_of(q.shape[2], rows), blocks_of(k.shape[2], keys))
    each = [n if size == 1 else 1 for n, size in zip(counts, bias.shape, strict=True)]
    tiles, total = 1, 1
    for n, behind in zip(counts, each, strict=True):
        tiles, total = tiles * (n // behind), total * behind
    steps = blocks_of(total, min(total, blocks_of(PROGRAMS, tiles)))
    return tiles, each, blocks_of(total, steps), steps


def part_sums(bias: Tensor, parts: int) -> Tensor:
    """(parts, *bias.shape), in bias's dtype if there is nothing left to add, else fp32."""
    return torch.empty((parts, *bias.shape), dtype=bias.dtype if parts == 1 else torch.float32, device=bias.device)


def grad_bias_launches(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], params: AttentionParams
) -> list[Launch]:
    """The two launches from :func:`attention_grad_bias`'s tensors to the gradient, or its parts.

    Args:
        inputs: grad_out, q, k, v, out, logsumexp, grad_logsumexp.
        outputs: delta and sums of weights, both like logsumexp, and :func:`part_sums`.
        params: as given to the launcher.
    """
    *tensors, logsumexp, grad_logsumexp = inputs
    grad_out, q, k, v, out = map(within_reach, tensors)
    delta, row_sums, sums = outputs
    bias = params.bias
    masking = mask_arguments(q, k, params) | bits_arguments(params.keep, params.key_keep)
    block_d = masking["BLOCK_D"]
    rows, keys, warps = TILES[q.element_size() * 8, block_d]
    row_rows, row_keys, row_warps = ROW_TILES[q.element_size() * 8, block_d]
    B, H, Lq, _ = q.shape
    tiles, each, parts, steps = sharing(q, k, bias)
    per_row = {"delta": delta, "sums": row_sums, "logsumexp": logsumexp}
    sizes: dict[str, object] = dict(zip(STEPPING, (*each, parts, steps), strict=True))
    sizes |= {"grad_bias": sums, "ONE_QUERY": bias.shape[2] == 1, "ONE_KEY": bias.shape[3] == 1}
    kind = f"{str(q.dtype)[6:]} d{block_d}"
    dropout = "" if masking["seed"] is None else " dropout"
    return [
        Launch(
            name=f"attention grad_bias_rows {kind} {row_rows}x{row_keys} {row_warps} warps{dropout}",
            kernel=_rows_kernel,
            grid=blocks_of(Lq, row_rows) * B * H,
            arguments=tensor_arguments(grad_out=grad_out, q=q, k=k, v=v, out=out) | masking | per_row
            | {"grad_logsumexp": grad_logsumexp, "BLOCK_QUERIES": row_rows, "BLOCK_KEYS": row_keys},
            num_warps=row_warps,
            num_stages=1,
        ),
        Launch(
            name=f"attention grad_bias {kind} {rows}x{keys} {warps} warps{dropout} from {tuple(bias.shape)}",
            kernel=_grad_bias_kernel,
            grid=tiles * parts,
            arguments=tensor_arguments(grad_out=grad_out, q=q, k=k, v=v) | masking | per_row | sizes
            | {"BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
            num_warps=warps,
            num_stages=1,
        ),
    ]  # fmt: skip


def attention_grad_bias(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of the bias of :func:`~.forward.attention_forward`, by Triton.

    Args:
        grad_out: (B, H, Lq, D), the gradient of out; any strides.
        q, k, v, params: as given to the forward launcher; the bias (B|1, H|1, Lq|1, Lk|1).
        out, logsumexp: as it returned them.
        grad_logsumexp: (B, H, Lq) fp32, the gradient of logsumexp, or None.

    Returns:
        The gradient in bias's shape and dtype, contiguous, summed in fp32: 0 where bias is -inf and from rows without
        keys. Bitwise equal from run to run.
    """
    gradient = _attention_grad_bias(grad_out, q, k, v, out, logsumexp, params, grad_logsumexp)[0]
    return gradient.to(params.bias.dtype)


@widen_bf16_if_interpreted(results=0)
def _attention_grad_bias(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None,
) -> tuple[Tensor]:  # fmt: skip
    bias = params.bias
    if q.numel() == 0 or k.numel() == 0 or bias.numel() == 0:
        return (torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device),)
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    sums = part_sums(bias, sharing(q, k, bias)[2])
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*empties_like(logsumexp, logsumexp), sums)
    run_call("attention grad_bias", inputs, outputs, 0, params, grad_bias_launches)
    return (sums[0] if len(sums) == 1 else sums.sum(0),)
