"""Masked attention, backward: the gradient of the additive bias, for any shape it is broadcast from.

The gradient of a score is ``weight * (gradient of the weight - delta)`` (T. Dao, "FlashAttention-2", 2023, section
3.1.2); The gradient of the bias is the sum of score gradients over all broadcast dimensions: batches (T5), queries
(ALiBi), heads. A program owns one tile of the bias and sums over these dimensions in a fixed order. If too few programs
would run, several programs share a tile, and their fp32 parts are added afterwards. Without atomics, two runs agree bit
for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launcher import Launch, blocks_of
from ..philox import RandomBits, load_seed
from .grad_scores import TILES, grad_score_tile
from .launches import score_kinds
from .mask import Bounds, Mask, any_visible, ids_at, key_limits, query_rows
from .steps import aligned, sequence, sequence_bias, sequence_bias_row, statistics_row, used_keys
from .tiles import (
    RUNTIME_INTEGERS,
    at_head,
    at_row,
    padded_head_dim,
)

# Target number of programs, a few per multiprocessor; a bias with fewer tiles is shared among programs.
PROGRAMS = 512
FILL = tl.constexpr(1024)

STEPPING = ("batches_each", "heads_each", "query_tiles_each", "key_tiles_each", "parts", "steps")


@triton.jit(do_not_specialize=[*RUNTIME_INTEGERS, *STEPPING])
def _grad_bias_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, grad_bias, keep, key_keep, lengths, bias, distance_bias,
    query_ids, key_ids, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, group, queries, keys, total_queries: tl.int64, total_keys: tl.int64, pairs: tl.int64, causal_offset, window,
    threshold, rescale, scale, distance_zero, softcap,
    batches_each, heads_each, query_tiles_each, key_tiles_each, parts, steps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr,
):  # fmt: skip
    """Sum one tile of the bias, or a part of that sum: `steps` of the (batch, head, query tile, key tile) combinations.

    Program numbers count parts, then the bias's key tiles, query tiles, heads and batches; `*_each` is the number of
    entries that share one entry of the bias: 1, or all entries of a broadcast dimension.
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

        first_query, own_queries = sequence(cu_seqlens_q, batch, queries, total_queries)
        first_key, stored_keys = sequence(cu_seqlens_k, batch, keys, total_keys)
        own_keys = used_keys(seqused_k, bias_starts, batch, own_queries, stored_keys, pairs)
        own_causal = aligned(causal_offset, own_keys - own_queries, BOTTOM_RIGHT)
        own_window = aligned(window, own_keys - own_queries, BOTTOM_RIGHT)
        own_zero = aligned(distance_zero, own_queries - own_keys, BOTTOM_RIGHT)
        own_bias = sequence_bias(bias, bias_starts, batch)
        own_bias_query = sequence_bias_row(bias_query, bias_starts, stored_keys)
        bounds = Bounds(
            at_head(lengths, batch, head, lengths_batch, 0, 1), lengths_query, own_causal, own_window,
            own_queries, own_keys,
            ids_at(query_ids, batch, query_ids_batch, first_query), ids_at(key_ids, batch, key_ids_batch, first_key),
        )  # fmt: skip
        mask = Mask(
            bounds,
            at_head(keep, batch, head, keep_batch, keep_head, 8), keep_query, keep_word,
            at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 8),
            at_head(own_bias, batch, head, bias_batch, bias_head, MASK_UNIT), own_bias_query, bias_key,
            at_head(distance_bias, batch, head, distance_batch, distance_head, 1), own_zero, softcap, None,
        )  # fmt: skip
        random = RandomBits(philox_key, threshold, batch, head)
        rows = query_rows(start_query, bounds, BLOCK_QUERIES)
        limit = key_limits(rows, bounds)
        last_key = tl.maximum(tl.max(limit, 0), 0)
        visible = any_visible(rows, start_query, start_key, last_key, bounds, BLOCK_KEYS)
        if cu_seqlens_q is not None:
            visible = visible & (start_query < own_queries)
        if visible:
            all_queries = queries if cu_seqlens_q is None else total_queries
            first_row = statistics_row(cu_seqlens_q, batch, head, heads, all_queries, first_query)
            acc += grad_score_tile(
                at_row(grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT),
                grad_out_row,
                at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT), q_row,
                at_row(k, batch, head // group, first_key, k_batch, k_head, k_row, UNIT), k_row,
                at_row(v, batch, head // group, first_key, v_batch, v_head, v_row, UNIT), v_row,
                logsumexp + first_row, delta + first_row, sums + first_row,
                start_query, start_key, limit, last_key, scale, rescale, mask, random,
                HEAD_DIM, BLOCK_D, BLOCK_QUERIES, BLOCK_KEYS, UNIT, MASK_UNIT,
            )  # fmt: skip

    # Parts lie (part, batch, head, query, key); a tile that stands for all queries or keys is summed to one number.
    if bias_starts is None:
        own_batch_head = own_batch.to(tl.int64) * (heads // heads_each) + own_head
        bias_queries = 1 if ONE_QUERY else queries
        bias_keys = 1 if ONE_KEY else keys
        tiles = (query_tiles // query_tiles_each) * (key_tiles // key_tiles_each)
        bias_batch_heads = tl.num_programs(0) // (parts * tiles)
        grad_bias += (part.to(tl.int64) * bias_batch_heads + own_batch_head) * bias_queries * bias_keys
    else:
        grad_bias += (part.to(tl.int64) * (heads // heads_each) + own_head) * pairs
        batches = tl.num_programs(0) // (parts * query_tiles * key_tiles * (heads // heads_each))
        if own_batch == batches - 1 and own_query + own_key == 0:  # pairs of no sequence
            for pair in tl.range(tl.maximum(tl.load(bias_starts + batches), 0), pairs, FILL, num_stages=1):
                place = pair + tl.arange(0, FILL)
                tl.store(grad_bias + place, tl.zeros((FILL,), grad_bias.dtype.element_ty), mask=place < pairs)
        grad_bias += tl.load(bias_starts + own_batch)
        queries = sequence(cu_seqlens_q, own_batch, queries, total_queries)[1]
        keys = sequence(cu_seqlens_k, own_batch, keys, total_keys)[1]
        queries = tl.where(used_keys(None, bias_starts, own_batch, queries, keys, pairs) > 0, queries, 0)
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


class Sharing(NamedTuple):
    """Distribution of the tiles of a bias over programs.

    Attributes:
        tiles: number of tiles of the bias.
        each: number of batches, heads, query blocks and key blocks per tile.
        parts: number of parts per sum.
        steps: number of addends per part.
    """

    tiles: int
    each: list[int]
    parts: int
    steps: int


def sharing(q: Tensor, k: Tensor, params: AttentionParams) -> Sharing:
    """Distribute the tiles of a bias over programs, for q and k as the kernels take them."""
    rows, keys, _ = TILES[q.element_size() * 8, padded_head_dim(q.shape[-1])]
    counts = (*q.shape[:2], blocks_of(q.shape[2], rows), blocks_of(k.shape[2], keys))
    shape = params.bias.shape if params.packed is None else (2, params.bias.shape[0], 2, 2)  # one per sequence
    each = [n if size == 1 else 1 for n, size in zip(counts, shape, strict=True)]
    tiles, total = 1, 1
    for n, behind in zip(counts, each, strict=True):
        tiles, total = tiles * (n // behind), total * behind
    steps = blocks_of(total, min(total, blocks_of(PROGRAMS, tiles)))
    return Sharing(tiles, each, blocks_of(total, steps), steps)


def part_sums(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Buffer (parts, *bias.shape), in the bias's dtype for a single part, else fp32; for q and k as the kernels take
    them."""
    bias, parts = params.bias, sharing(q, k, params).parts
    return torch.empty((parts, *bias.shape), dtype=bias.dtype if parts == 1 else torch.float32, device=bias.device)


def grad_bias_launch(
    q: Tensor, k: Tensor, arguments: dict[str, object], sums: Tensor, params: AttentionParams
) -> Launch:
    """Launch that fills :func:`part_sums`, whose sum is the gradient of the bias.

    Args:
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        arguments: of the tensors, the mask and the rows.
        sums: :func:`part_sums`.
        params: as given to the launcher.
    """
    bias, packed = params.bias, params.packed is not None
    rows, keys, warps = TILES[q.element_size() * 8, arguments["BLOCK_D"]]
    tiles, each, parts, steps = sharing(q, k, params)
    sizes: dict[str, object] = dict(zip(STEPPING, (*each, parts, steps), strict=True))
    sizes |= {"ONE_QUERY": not packed and bias.shape[2] == 1, "ONE_KEY": not packed and bias.shape[3] == 1}
    return Launch(
        name=f"attention grad_bias {str(q.dtype)[6:]} d{arguments['BLOCK_D']} {rows}x{keys} {warps} warps"
        f"{'' if arguments['seed'] is None else ' dropout'}"
        f"{' packed' if packed else ''}{score_kinds(params)} from {tuple(bias.shape)}",
        kernel=_grad_bias_kernel,
        grid=tiles * parts,
        arguments=arguments | sizes | {"grad_bias": sums, "BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
        num_warps=warps,
        num_stages=1,
    )
