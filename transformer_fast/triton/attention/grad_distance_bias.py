"""Masked attention, backward: the gradient of a bias by distance, in memory linear in the lengths.

Entry ``zero + d`` of such a bias is added to the score of every query i and key ``i + d``: the gradient of the entry is
the sum of the score gradients along a diagonal. Tiles of scores form diagonals too. A program of the kernel
(:mod:`.grad_bias`) adds up the tiles of one such diagonal, and in the end sums the diagonals of the resulting tile.
Neighbouring diagonals of tiles share distances; these sums are added here, and so are batches and heads that share the
bias. Without atomics, two runs agree bit for bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention_params import AttentionParams, PackedBatch
from ..launcher import Launch, blocks_of
from .grad_bias import STEPPING, grad_bias_kernel
from .grad_bias import TILES as _TILES
from .launches import score_kinds
from .tiles import padded_head_dim

# (query rows, keys, warps) of a tile, by bits of the type and padded head size: those of grad_bias.py if none spills.
TILES = _TILES | {(16, 32): (64, 32, 8), (16, 64): (64, 32, 8)}
# Target number of programs. One program sums all batches that share a bias, or several programs up to this number.
PROGRAMS = 512


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
        kernel=grad_bias_kernel,
        grid=sums.numel() // sums.shape[4],
        arguments=arguments | dict(zip(STEPPING, (B // own, 1, 1, 1, parts, blocks_of(B // own, parts)), strict=True))
        | {"gradient": sums, "ONE_QUERY": False, "ONE_KEY": False, "DIAGONAL": True}
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
