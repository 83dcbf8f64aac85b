"""Masked attention, backward: the gradient of a bias by distance, in memory linear in the lengths.

Entry ``zero + d`` of such a bias is added to the score of every query i and key ``i + d``: the gradient of the entry is
the sum of the score gradients along a diagonal. Tiles of scores form diagonals too: all tiles whose keys start the same
number of tiles after their queries. A program owns one diagonal of tiles of one head. The program adds up these tiles,
and in the end sums the diagonals of the resulting tile. Neighbouring diagonals of tiles share distances; these sums are
added afterwards, and so are batches and heads that share the bias. Without atomics, two runs agree bit for bit.
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams, PackedBatch
from ..launcher import Launch, blocks_of
from ..philox import RandomBits, load_seed
from .grad_scores import TILES as _TILES
from .grad_scores import grad_score_tile
from .launches import score_kinds
from .mask import Bounds, Mask, any_visible, ids_at, key_limits, query_rows
from .steps import aligned, sequence, sequence_bias, sequence_bias_row, statistics_row, used_keys
from .tiles import at_head, at_row, jit, padded_head_dim

# (query rows, keys, warps) of a tile, by bits of the type and padded head size: those of grad_scores.py if none spills.
TILES = _TILES | {(16, 32): (64, 32, 8), (16, 64): (64, 32, 8)}
# Target number of programs. One program sums all batches that share a bias, or several programs up to this number.
PROGRAMS = 512


@jit
def _grad_distance_kernel(
    grad_out, q, k, v, logsumexp, delta, sums, diagonals, keep, key_keep, lengths, bias, distance_bias,
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
    threshold, rescale, scale, distance_zero, softcap, batches, batches_each, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """Sum one diagonal of tiles, of one head, over `batches_each` of `batches` batches.

    Program numbers count parts of the batches, then diagonals, heads, and batches that have a bias of their own.
    """
    KEY_TILES: tl.constexpr = BLOCK_QUERIES // BLOCK_KEYS
    above = (tl.cdiv(queries, BLOCK_QUERIES) - 1) * KEY_TILES
    count = above + tl.cdiv(keys, BLOCK_KEYS)
    part = tl.program_id(0) % parts
    number = tl.program_id(0) // parts
    # Index of the key tile minus that of the query tile, in tiles of keys.
    diagonal = number % count - above
    head = number // count % heads
    first_batch = number // count // heads + part * batches_each
    philox_key = load_seed(seed)

    acc = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    for own_batch in tl.range(0, tl.minimum(batches_each, batches - first_batch), num_stages=1):
        batch = first_batch + own_batch
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
        all_queries = queries if cu_seqlens_q is None else total_queries
        first_row = statistics_row(cu_seqlens_q, batch, head, heads, all_queries, first_query)
        first = tl.cdiv(tl.maximum(-diagonal, 0), KEY_TILES)
        end = tl.cdiv(tl.maximum(tl.cdiv(own_keys, BLOCK_KEYS) - diagonal, 0), KEY_TILES)
        end = tl.minimum(end, tl.cdiv(own_queries, BLOCK_QUERIES))
        # No work if the nearest distance is past the causal diagonal.
        end = tl.where(diagonal * BLOCK_KEYS - (BLOCK_QUERIES - 1) > own_causal, first, end)
        for tile in tl.range(first, end, num_stages=1, disable_licm=True):
            start_query = tile * BLOCK_QUERIES
            start_key = (tile * KEY_TILES + diagonal) * BLOCK_KEYS
            rows = query_rows(start_query, bounds, BLOCK_QUERIES)
            limit = key_limits(rows, bounds)
            last_key = tl.maximum(tl.max(limit, 0), 0)
            if any_visible(rows, start_query, start_key, last_key, bounds, BLOCK_KEYS):
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

    # Place 0 is the last query's first key. In row r, place n is column n + r - (BLOCK_QUERIES - 1).
    place = tl.arange(0, 2 * BLOCK_QUERIES)
    column = (place - (BLOCK_QUERIES - 1))[None, :] + tl.arange(0, BLOCK_QUERIES)[:, None]
    skewed = tl.gather(acc, tl.minimum(tl.maximum(column, 0), BLOCK_KEYS - 1), 1)
    summed = tl.sum(tl.where((column >= 0) & (column < BLOCK_KEYS), skewed, 0.0), 0)
    tl.store(diagonals + tl.program_id(0).to(tl.int64) * (2 * BLOCK_QUERIES) + place, summed)


def diagonal_sums(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Buffer of the programs' sums: fp32 (own batches, H, diagonals of tiles, parts, 2 * query rows per tile)."""
    B, H = q.shape[:2] if params.packed is None else (len(params.packed.cu_seqlens_q) - 1, q.shape[1])
    queries, keys = lengths_of_views(q, k, params)
    rows, columns, _ = TILES[q.element_size() * 8, padded_head_dim(q.shape[-1])]
    diagonals = (blocks_of(queries, rows) - 1) * (rows // columns) + blocks_of(keys, columns)
    own = params.distance_bias.shape[0]
    shared = B // own
    each = blocks_of(shared, min(shared, blocks_of(PROGRAMS, own * H * diagonals)))
    each = 1 if params.packed is not None and params.packed.bottom_right else each  # each has distances of its own
    shape = (own, H, diagonals, blocks_of(shared, each), 2 * rows)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def lengths_of_views(q: Tensor, k: Tensor, params: AttentionParams) -> tuple[int, int]:
    """Number of queries and keys in the kernel's tensors; in a packed batch at most the number of tokens."""
    if params.packed is None:
        return q.shape[2], k.shape[2]
    return min(params.packed.max_seqlen_q, q.shape[0]), min(params.packed.max_seqlen_k, k.shape[0])


def along_distances(sums: Tensor, params: AttentionParams, queries: int, keys: int, tile: tuple[int, int]) -> Tensor:
    """Gradient, fp32 like distance_bias, from :func:`diagonal_sums`: adds neighbours, shifted by a tile of keys."""
    rows, columns = tile
    ends = params.packed is not None and params.packed.bottom_right
    sums = sums[0].movedim(2, 0) if ends else sums.sum(3)
    if params.distance_bias.shape[1] == 1:
        sums = sums.sum(1, keepdim=True)
    shifts = rows // columns + 1
    distances = (sums.shape[2] + shifts - 1) * columns
    gradient = sums.new_zeros((*sums.shape[:2], distances))
    for shift in range(shifts):
        chunk = sums[..., shift * columns : (shift + 1) * columns].flatten(2)
        gradient[..., shift * columns : shift * columns + chunk.shape[2]] += chunk
    first = blocks_of(queries, rows) * rows - queries
    gradient = gradient[..., first : first + queries + keys - 1]
    return _counted_from_the_end(gradient, params.packed, queries) if ends else gradient


def _counted_from_the_end(gradient: Tensor, packed: PackedBatch, queries: int) -> Tensor:
    """Sum over sequences, (B, H|1, distances) -> (1, H|1, max_seqlen_q + max_seqlen_k - 1), for positions aligned
    on the bottom right.

    Args:
        gradient: per sequence, entry ``queries - 1 + j - i`` belongs to query i and key j.
    """
    shift = packed.key_lengths - packed.query_lengths
    place = torch.arange(packed.max_seqlen_q + packed.max_seqlen_k - 1, device=gradient.device)
    source = place - (packed.max_seqlen_k - 1) + shift.long()[:, None] + queries - 1
    inside = (source >= 0) & (source < gradient.shape[2])
    index = source.clamp(0, gradient.shape[2] - 1)[:, None].expand(-1, gradient.shape[1], -1)
    return gradient.gather(2, index).masked_fill(~inside[:, None], 0.0).sum(0, keepdim=True)


def grad_distance_bias_launch(q: Tensor, arguments: dict[str, object], sums: Tensor, params: AttentionParams) -> Launch:
    """Launch that fills the sums of diagonals.

    Args:
        q: (B, H, Lq, D).
        arguments: of the tensors, the mask and the rows.
        sums: :func:`diagonal_sums`.
        params: as given to the launcher.
    """
    rows, keys, warps = TILES[q.element_size() * 8, arguments["BLOCK_D"]]
    B, own, parts = q.shape[0], sums.shape[0], sums.shape[3]
    return Launch(
        name=f"attention grad_distance_bias {str(q.dtype)[6:]} d{arguments['BLOCK_D']} {rows}x{keys} {warps} warps"
        f"{'' if arguments['seed'] is None else ' dropout'}"
        f"{'' if params.packed is None else ' packed'}{score_kinds(params)}",
        kernel=_grad_distance_kernel,
        grid=sums.numel() // sums.shape[4],
        arguments=arguments
        | {"diagonals": sums, "batches": B, "batches_each": blocks_of(B // own, parts), "parts": parts}
        | {"BLOCK_QUERIES": rows, "BLOCK_KEYS": keys},
        num_warps=warps,
        num_stages=1,
    )  # fmt: skip


def distance_gradient(sums: Tensor, q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Gradient in distance_bias's shape, fp32, contiguous, from :func:`diagonal_sums`; q and k as given to the
    launcher."""
    queries, keys = lengths_of_views(q, k, params)
    tile = TILES[q.element_size() * 8, padded_head_dim(q.shape[-1])][:2]
    gradient = along_distances(sums, params, queries, keys, tile)
    if params.packed is None or params.packed.bottom_right:
        return gradient.contiguous()
    # Distances that occur in no sequence.
    return F.pad(gradient, (params.packed.max_seqlen_q - queries, params.packed.max_seqlen_k - keys))
