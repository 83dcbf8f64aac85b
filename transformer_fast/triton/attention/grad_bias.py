"""Masked attention, backward: the gradient of the additive bias, for any shape it is broadcast from, and of a bias by
distance.

The gradient of a score is ``weight * (gradient of the weight - delta)`` (T. Dao, "FlashAttention-2", 2023, section
3.1.2). The kernel of grad_q stores delta and the sum of the weights per row. The gradient of the bias is the sum of
score gradients over all broadcast dimensions: batches (T5), queries (ALiBi), heads. A program owns one tile of the bias
and sums over these dimensions in a fixed order. If too few programs would run, several programs share a tile, and their
fp32 parts are added afterwards. Without atomics, two runs agree bit for bit.

The gradient of a bias by distance is the sum along a diagonal. A program then owns one diagonal of tiles of one head:
all tiles whose keys start the same number of tiles after their queries (:mod:`.grad_distance_bias`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..launcher import Launch, blocks_of
from ..philox import RandomBits, attention_keep_tile, load_seed
from .launches import score_kinds
from .mask import any_visible, key_limits, masked_scores, open_mask, parts_of, query_rows
from .steps import open_sequence, sequence_rows, statistics_row, used_keys
from .tiles import at_row, exponential, jit, load_rows, padded_head_dim

# (query rows, keys, warps) of a tile, by bits of the type and padded head size.
TILES = {
    (16, 32): (64, 64, 8), (16, 64): (64, 64, 8), (16, 128): (64, 32, 8), (16, 256): (64, 32, 8),
    (32, 32): (32, 32, 8), (32, 64): (32, 32, 8), (32, 128): (16, 32, 16), (32, 256): (16, 32, 16),
}  # fmt: skip
# Target number of programs, a few per multiprocessor; a bias with fewer tiles is shared among programs.
PROGRAMS = 512
FILL = tl.constexpr(1024)

STEPPING = ("batches_each", "heads_each", "query_tiles_each", "key_tiles_each", "parts", "steps")


@triton.jit
def _grad_score_tile(
    grad_out, grad_out_row, q, q_row, k, k_row, v, v_row, logsumexp, delta, sums,
    start_query, start_key, limit, last_key, scale, rescale, mask, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, PARTS: tl.constexpr,
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
    scores, allowed, _ = masked_scores(
        scores, scale, start_query, start_key, limit, mask, QUERIES, KEYS, MASK_UNIT, PARTS
    )
    weights = exponential(scores, shift[:, None], scale, True) / divisor[:, None]
    grad_tile = load_rows(grad_out, start_query, queries, grad_out_row, QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    v_tile = load_rows(v, start_key, last_key, v_row, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
    if random.key is not None:
        kept = attention_keep_tile(random, start_query, start_key, QUERIES, KEYS)
        grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
    adds = allowed & (start_query + tl.arange(0, QUERIES) < queries)[:, None]
    return tl.where(adds, weights * (grad_weights - row_delta[:, None]), 0.0)


@jit
def grad_bias_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, gradient, keep, key_keep, lengths, bias, distance_bias,
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
    ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Sum one tile of the bias, or one diagonal of tiles of one head; or a part of that sum, `steps` of its addends.

    Program numbers count parts, then the bias's key tiles, query tiles, heads and batches; `*_each` is the number of
    entries that share one entry of the bias: 1, or all entries of a broadcast dimension. With DIAGONAL they count
    diagonals instead of tiles, an addend is a batch, and `gradient` gets the sums of each program's distances.
    """
    PARTS: tl.constexpr = parts_of(
        causal_offset is not None, lengths is not None, window is not None, query_ids is not None,
        keep is not None, key_keep is not None, bias is not None, distance_bias is not None, softcap is not None,
    )  # fmt: skip
    KEY_TILES: tl.constexpr = BLOCK_QUERIES // BLOCK_KEYS
    query_tiles = tl.cdiv(queries, BLOCK_QUERIES)
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    part = tl.program_id(0) % parts
    own = tl.program_id(0) // parts
    begin = part * steps
    if DIAGONAL:
        # Index of the key tile minus that of the query tile, in tiles of keys.
        above = (query_tiles - 1) * KEY_TILES
        diagonal = own % (above + key_tiles) - above
        own = own // (above + key_tiles)
        first_tile = tl.cdiv(tl.maximum(-diagonal, 0), KEY_TILES)
        tiles = tl.minimum(tl.cdiv(tl.maximum(key_tiles - diagonal, 0), KEY_TILES), query_tiles) - first_tile
        if not BOTTOM_RIGHT:  # no work if the nearest distance is past the causal diagonal
            tiles = tl.where(diagonal * BLOCK_KEYS - (BLOCK_QUERIES - 1) > causal_offset, 0, tiles)
        end = tl.minimum(begin + steps, batches_each) * tiles
        begin *= tiles
    else:
        own_key = own % (key_tiles // key_tiles_each)
        own = own // (key_tiles // key_tiles_each)
        own_query = own % (query_tiles // query_tiles_each)
        own = own // (query_tiles // query_tiles_each)
        end = tl.minimum(begin + steps, batches_each * heads_each * query_tiles_each * key_tiles_each)
    own_head = own % (heads // heads_each)
    own_batch = own // (heads // heads_each)
    philox_key = load_seed(seed)

    acc = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    for step in tl.range(begin, end, num_stages=1, disable_licm=True):
        if DIAGONAL:
            tile = first_tile + step % tiles
            start_query = tile * BLOCK_QUERIES
            start_key = (tile * KEY_TILES + diagonal) * BLOCK_KEYS
            head = own_head
            batch = own_batch + step // tiles
        else:
            start_key = (own_key + step % key_tiles_each) * BLOCK_KEYS
            step = step // key_tiles_each
            start_query = (own_query + step % query_tiles_each) * BLOCK_QUERIES
            step = step // query_tiles_each
            head = own_head + step % heads_each
            batch = own_batch + step // heads_each

        sequence = open_sequence(
            batch, queries, keys, total_queries, total_keys, pairs, causal_offset, window, distance_zero, bias,
            bias_query, cu_seqlens_q, cu_seqlens_k, seqused_k, bias_starts, logsumexp, BOTTOM_RIGHT,
        )  # fmt: skip
        first_query, first_key = sequence.first_query, sequence.first_key
        mask = open_mask(
            sequence, head, lengths, lengths_batch, lengths_query, query_ids, query_ids_batch,
            key_ids, key_ids_batch, keep, keep_batch, keep_head, keep_query, keep_word,
            key_keep, key_keep_batch, key_keep_head, bias, bias_batch, bias_head, bias_key,
            distance_bias, distance_batch, distance_head, softcap, logsumexp, MASK_UNIT,
        )  # fmt: skip
        random = RandomBits(philox_key, threshold, batch, head)
        rows = query_rows(start_query, mask.bounds, BLOCK_QUERIES)
        limit = key_limits(rows, mask.bounds, PARTS)
        last_key = tl.maximum(tl.max(limit, 0), 0)
        visible = any_visible(rows, start_query, start_key, last_key, mask.bounds, BLOCK_KEYS, PARTS)
        if cu_seqlens_q is not None:
            visible = visible & (start_query < sequence.queries)
        if visible:
            all_queries = queries if cu_seqlens_q is None else total_queries
            first_row = statistics_row(cu_seqlens_q, batch, head, heads, all_queries, first_query)
            acc += _grad_score_tile(
                at_row(grad_out, batch, head, first_query, grad_out_batch, grad_out_head, grad_out_row, UNIT),
                grad_out_row,
                at_row(q, batch, head, first_query, q_batch, q_head, q_row, UNIT), q_row,
                at_row(k, batch, head // group, first_key, k_batch, k_head, k_row, UNIT), k_row,
                at_row(v, batch, head // group, first_key, v_batch, v_head, v_row, UNIT), v_row,
                logsumexp + first_row, delta + first_row, sums + first_row,
                start_query, start_key, limit, last_key, scale, rescale, mask, random,
                HEAD_DIM, BLOCK_D, BLOCK_QUERIES, BLOCK_KEYS, UNIT, MASK_UNIT, PARTS,
            )  # fmt: skip

    kind: tl.constexpr = gradient.dtype.element_ty
    if DIAGONAL:
        # Place 0 is the last query's first key. In row r, place n is column n + r - (BLOCK_QUERIES - 1).
        place = tl.arange(0, 2 * BLOCK_QUERIES)
        column = (place - (BLOCK_QUERIES - 1))[None, :] + tl.arange(0, BLOCK_QUERIES)[:, None]
        skewed = tl.gather(acc, tl.minimum(tl.maximum(column, 0), BLOCK_KEYS - 1), 1)
        summed = tl.sum(tl.where((column >= 0) & (column < BLOCK_KEYS), skewed, 0.0), 0)
        tl.store(gradient + tl.program_id(0).to(tl.int64) * (2 * BLOCK_QUERIES) + place, summed)
    else:
        # Parts lie (part, batch, head, query, key); a tile that stands for all queries or keys is summed to one number.
        if bias_starts is None:
            own_batch_head = own_batch.to(tl.int64) * (heads // heads_each) + own_head
            bias_queries = 1 if ONE_QUERY else queries
            bias_keys = 1 if ONE_KEY else keys
            tiles = (query_tiles // query_tiles_each) * (key_tiles // key_tiles_each)
            bias_batch_heads = tl.num_programs(0) // (parts * tiles)
            gradient += (part.to(tl.int64) * bias_batch_heads + own_batch_head) * bias_queries * bias_keys
        else:
            gradient += (part.to(tl.int64) * (heads // heads_each) + own_head) * pairs
            batches = tl.num_programs(0) // (parts * query_tiles * key_tiles * (heads // heads_each))
            if own_batch == batches - 1 and own_query + own_key == 0:  # pairs of no sequence
                for pair in tl.range(tl.maximum(tl.load(bias_starts + batches), 0), pairs, FILL, num_stages=1):
                    place = pair + tl.arange(0, FILL)
                    tl.store(gradient + place, tl.zeros((FILL,), kind), mask=place < pairs)
            gradient += tl.load(bias_starts + own_batch)
            queries = sequence_rows(cu_seqlens_q, own_batch, queries, total_queries)[1]
            keys = sequence_rows(cu_seqlens_k, own_batch, keys, total_keys)[1]
            queries = tl.where(used_keys(None, bias_starts, own_batch, queries, keys, pairs) > 0, queries, 0)
        query = own_query * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
        key = own_key * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        if ONE_QUERY and ONE_KEY:
            tl.store(gradient, tl.sum(tl.sum(acc, 1), 0).to(kind))
        elif ONE_QUERY:
            tl.store(gradient + key, tl.sum(acc, 0).to(kind), mask=key < keys)
        elif ONE_KEY:
            tl.store(gradient + query, tl.sum(acc, 1).to(kind), mask=query < queries)
        else:
            pointers = gradient + query[:, None].to(tl.int64) * keys + key[None, :]
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
    sizes["DIAGONAL"] = False
    return Launch(
        name=f"attention grad_bias {str(q.dtype)[6:]} d{arguments['BLOCK_D']} {rows}x{keys} {warps} warps"
        f"{'' if arguments['seed'] is None else ' dropout'}"
        f"{' packed' if packed else ''}{score_kinds(params)} from {tuple(bias.shape)}",
        kernel=grad_bias_kernel,
        grid=tiles * parts,
        arguments=arguments | sizes | {"gradient": sums, "BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
        num_warps=warps,
        num_stages=1,
    )
