"""Tile map of a mask: the tiles of (queries x keys) that hold work, computed once on the device for all layers.

A dense mask is packed to bits, 32 keys of one query per word. The attention kernels read the bits, an eighth of the
mask's size. From the bits, the bounds (lengths, causal, window) and the smallest and largest ids of documents on either
side, each tile is classified: empty, partial or full. A program of an attention kernel then walks the list of its tiles
that hold work, full ones first, and reads bits and ids only in the others.

The bits serve every kernel. Classes and lists are made for a kernel's own tile, because the best tile differs between
the three kernels; kernels with equal tiles share them. Bits, classes and lists are cached on the mask's tensor as an
attribute and freed with it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ...tensor_cache import get_or_compute
from ..launcher import Launch, blocks_of, run
from .mask import allowed_words, key_limits, open_mask, parts_of, query_rows
from .steps import open_sequence, program_of
from .tiles import bounded_offset, bounded_window, bounds_arguments, jit

_PARTIAL, _FULL = tl.constexpr(1), tl.constexpr(2)  # classes of a tile with work; 0 is an empty one

# Rows of words are padded to chunks of this many keys, so that no tile of keys reaches past a row.
CHUNK_KEYS = 256
_CHUNK_KEYS = tl.constexpr(CHUNK_KEYS)
PACK_ROWS = 16
LIST_CHUNK = 256


@jit
def _pack_kernel(
    mask, bits, mask_batch: tl.int64, mask_head: tl.int64, mask_query: tl.int64, mask_key,
    heads, queries, keys, words, ROWS: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Pack PACK_ROWS rows by CHUNK_KEYS keys of a bool mask to bits."""
    chunks = tl.cdiv(keys, _CHUNK_KEYS)
    row_tiles = tl.cdiv(queries, ROWS)
    chunk = tl.program_id(0) % chunks
    row = tl.program_id(0) // chunks % row_tiles * ROWS + tl.arange(0, ROWS)
    batch_head = (tl.program_id(0) // chunks // row_tiles).to(tl.int64)
    key = chunk * _CHUNK_KEYS + tl.arange(0, _CHUNK_KEYS)
    mask += (batch_head // heads * mask_batch + batch_head % heads * mask_head) * MASK_UNIT
    offsets = row.to(tl.int64)[:, None] * (mask_query * MASK_UNIT) + key[None, :] * mask_key
    # MASK_UNIT divides the number of keys; the guard states this, so that groups of keys are loaded in one access.
    inside = (row < queries)[:, None] & (key // MASK_UNIT * MASK_UNIT < keys)[None, :]
    kept = (tl.load(mask + offsets, mask=inside, other=0) != 0).to(tl.int32)
    kept = tl.reshape(kept, (ROWS, _CHUNK_KEYS // 32, 32))
    packed = tl.sum(kept << tl.arange(0, 32)[None, None, :], 2)
    word = chunk * (_CHUNK_KEYS // 32) + tl.arange(0, _CHUNK_KEYS // 32)
    bits += batch_head * queries * words
    tl.store(bits + row.to(tl.int64)[:, None] * words + word[None, :], packed, mask=(row < queries)[:, None])


@jit
def _classes_kernel(
    classes, keep, key_keep, lengths, query_ids, key_ids,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    heads, queries, keys, causal_offset, window,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Classify each tile in one row of tiles."""
    TILES: tl.constexpr = _CHUNK_KEYS // BLOCK_KEYS
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    batch, head, query_tile = program_of(heads, queries, None, BLOCK_QUERIES)
    start_query = query_tile * BLOCK_QUERIES
    PARTS: tl.constexpr = parts_of(
        True, lengths is not None, window is not None, query_ids is not None, keep is not None, key_keep is not None
    )
    sequence = open_sequence(
        batch,
        queries,
        keys,
        None,
        None,
        None,
        causal_offset,
        window,
        0,
        None,
        0,
        None,
        None,
        None,
        None,
        classes,
        False,
    )
    mask = open_mask(
        sequence, head, lengths, lengths_batch, lengths_query, query_ids, query_ids_batch,
        key_ids, key_ids_batch, keep, keep_batch, keep_head, keep_query, keep_word,
        key_keep, key_keep_batch, key_keep_head, None, 0, 0, 0, None, 0, 0, None, classes, 1,
    )  # fmt: skip
    bounds = mask.bounds
    rows = query_rows(start_query, bounds, BLOCK_QUERIES)
    limit = key_limits(rows, bounds, PARTS)
    if query_ids is not None:
        query_id = tl.load(bounds.query_ids + rows)
        first_id = tl.min(query_id, 0)
        last_id = tl.max(query_id, 0)
    classes += tl.program_id(0).to(tl.int64) * key_tiles
    for start in tl.range(0, keys, _CHUNK_KEYS):
        bits = allowed_words(start_query, start, limit, mask, BLOCK_QUERIES, _CHUNK_KEYS // 32, PARTS)
        bits = tl.reshape(bits, (BLOCK_QUERIES, TILES, BLOCK_KEYS // 32))
        some = tl.max(tl.max((bits != 0).to(tl.int32), 2), 0)
        every = tl.min(tl.min((bits == -1).to(tl.int32), 2), 0)
        if query_ids is not None:
            # Positions past the end repeat the last id. A tile that shares no id then is masked, so results stay right.
            key = tl.minimum(start + tl.arange(0, _CHUNK_KEYS), keys - 1)
            key_id = tl.reshape(tl.load(bounds.key_ids + key), (TILES, BLOCK_KEYS))
            low = tl.min(key_id, 1)
            high = tl.max(key_id, 1)
            some = tl.where((low <= last_id) & (high >= first_id), some, 0)
            every = tl.where((low == high) & (first_id == last_id), every, 0) * some
        tile = start // BLOCK_KEYS + tl.arange(0, TILES)
        tl.store(classes + tile, (some + every).to(tl.int8), mask=tile < key_tiles)


@jit
def _lists_kernel(
    classes, lists, counts, tile_rows, across, head_stride: tl.int64, row_stride, tile_stride, CHUNK: tl.constexpr
):
    """Make the list of one row of tiles: full tiles from the front, partial tiles from the back, and the counts of
    both."""
    tile_row = tl.program_id(0) % tile_rows
    classes += tl.program_id(0) // tile_rows * head_stride + tile_row * row_stride
    lists += tl.program_id(0).to(tl.int64) * across
    full = 0
    partial = 0
    for start in tl.range(0, across, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        kind = tl.load(classes + tile * tile_stride, mask=tile < across, other=0)
        is_full = (kind == _FULL).to(tl.int32)
        is_partial = (kind == _PARTIAL).to(tl.int32)
        tl.store(lists + full + tl.cumsum(is_full) - 1, tile, mask=is_full != 0)
        tl.store(lists + across - partial - tl.cumsum(is_partial), tile, mask=is_partial != 0)
        full += tl.sum(is_full)
        partial += tl.sum(is_partial)
    tl.store(counts + tl.program_id(0) * 2, full)
    tl.store(counts + tl.program_id(0) * 2 + 1, partial)


NO_MAP = {
    "keep": None, "keep_batch": 0, "keep_head": 0, "keep_query": 0, "keep_word": 0, "key_keep": None,
    "key_keep_batch": 0, "key_keep_head": 0, "tile_list": None, "tile_counts": None, "tile_order": None,
    "batch_order": None, "map_batch": 0, "map_head": 0,
}  # fmt: skip
"""Arguments of the attention kernels without a map. With a map:

tile_list: int32 (B|1, H|1, tile rows, across), full tiles from the front, partial tiles from the end.
tile_counts: int32 (B|1, H|1, tile rows, 2): full tiles, partial tiles.
tile_order: int32 (B|1, H|1, tile rows), per (batch, head), rows with the most work first; or None.
batch_order: int32 (B,), the batches with the most work first; or None.
"""


def mask_bits(mask: Tensor) -> Tensor:
    """Pack a bool mask (b, h, rows, keys) with any strides to bits: int32 (b|1, h|1, rows|1, words), words a multiple
    of 8.

    Broadcast dimensions of the mask (size 1, or stride 0) have size 1. A broadcast row of keys is 8 equal words. The
    bits are cached on the mask until the mask is written to.
    """
    return get_or_compute(mask, ("bits",), (), lambda: _pack(mask))


def tile_lists(
    params: AttentionParams, B: int, queries: int, keys: int, tile: tuple[int, int], *, columns: bool, ordered: bool
) -> dict[str, object]:
    """Kernel arguments of the tiles that hold work under a mask, for kernels with this tile; cached on the mask.

    Args:
        params: params of the call, with keep, key_keep or ids.
        B, queries, keys: the sizes of the call.
        tile: queries and keys per tile, powers of two; at most CHUNK_KEYS keys.
        columns: True for lists of query tiles per key tile, False for lists of key tiles per query tile.
        ordered: also order tile rows and batches by work.
    """
    keep, key_keep = params.keep, params.key_keep
    parts = keep, key_keep, params.query_ids, params.key_ids, params.lengths
    given = [t for t in parts if t is not None]
    holder, others = given[0], tuple(given[1:])
    diagonals = bounded_offset(params.causal, queries, keys), bounded_window(params.window, queries, keys)
    call = (*[t is not None for t in parts], B, queries, keys, *diagonals, tile)

    def lists() -> dict[str, object]:
        found = get_or_compute(holder, ("classes", *call), others, lambda: _classes(params, B, queries, keys, tile))
        return _lists(found, bits_arguments(keep, key_keep), columns, ordered)

    return get_or_compute(holder, ("lists", *call, columns, ordered), others, lists)


def length_order(lengths: Tensor) -> Tensor:
    """Batch indices by length, longest first: int32 (B,). Cached on the lengths."""
    return get_or_compute(lengths, ("order",), (), lambda: _by_descending_work(lengths))


def packed_order(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Sequence indices of a packed batch, most (query, key) pairs first: int32 (B,). Cached on cu_seqlens_k."""

    def order() -> Tensor:
        return _by_descending_work(cu_seqlens_q.diff().long() * cu_seqlens_k.diff())

    return get_or_compute(cu_seqlens_k, ("order",), (cu_seqlens_q,), order)


def _by_descending_work(work: Tensor) -> Tensor:
    return torch.sort(work, descending=True, stable=True).indices.to(torch.int32)


def _without_broadcast(mask: Tensor) -> Tensor:
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _strides(t: Tensor, unit: int) -> list[int]:
    """Strides in units, 0 for dimensions of size 1."""
    return [stride // unit if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)]


def pack_launch(mask: Tensor, bits: Tensor) -> Launch:
    """Launch that packs `mask` (b, h, rows, keys) into `bits`."""
    b, h, rows, keys = mask.shape
    strides = _strides(mask, 1)
    unit = 16 if all(n % 16 == 0 for n in (keys, *strides[:3])) else 1
    keys = keys if keys > 1 else CHUNK_KEYS
    return Launch(
        name=f"attention pack {'unaligned' if unit == 1 else 'aligned'}",
        kernel=_pack_kernel,
        grid=b * h * blocks_of(rows, PACK_ROWS) * blocks_of(keys, CHUNK_KEYS),
        arguments={
            "mask": mask, "bits": bits, "mask_batch": strides[0] // unit, "mask_head": strides[1] // unit,
            "mask_query": strides[2] // unit, "mask_key": strides[3], "heads": h, "queries": rows, "keys": keys,
            "words": bits.shape[3], "ROWS": PACK_ROWS, "MASK_UNIT": unit,
        },
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def _pack(mask: Tensor) -> Tensor:
    mask = _without_broadcast(mask)
    words = blocks_of(mask.shape[3], CHUNK_KEYS) * (CHUNK_KEYS // 32)
    bits = torch.empty((*mask.shape[:3], words), dtype=torch.int32, device=mask.device)
    _run(pack_launch(mask, bits), mask)
    return bits


def bits_arguments(keep: Tensor | None, key_keep: Tensor | None) -> dict[str, object]:
    """Kernel arguments of a mask's bits: pointer, and strides in chunks of 8 words."""
    keep_bits, key_bits = (None if t is None else mask_bits(t) for t in (keep, key_keep))
    keep_strides, key_strides = ([0] * 4 if t is None else _strides(t, 8) for t in (keep_bits, key_bits))
    return {
        "keep": keep_bits, "keep_batch": keep_strides[0], "keep_head": keep_strides[1], "keep_query": keep_strides[2],
        "keep_word": 0 if keep is None or _without_broadcast(keep).shape[3] == 1 else 1,
        "key_keep": key_bits, "key_keep_batch": key_strides[0], "key_keep_head": key_strides[1],
    }  # fmt: skip


def classes_launch(classes: Tensor, params: AttentionParams, queries: int, keys: int, tile: tuple[int, int]) -> Launch:
    """Launch that fills `classes`."""
    return Launch(
        name=f"attention classes {tile[0]}x{tile[1]}{' window' if params.window is not None else ''}"
        f"{' documents' if params.query_ids is not None else ''}",
        kernel=_classes_kernel,
        grid=classes.shape[0] * classes.shape[1] * classes.shape[2],
        arguments=bits_arguments(params.keep, params.key_keep) | bounds_arguments(params, queries, keys)
        | {"classes": classes, "heads": classes.shape[1], "BLOCK_QUERIES": tile[0], "BLOCK_KEYS": tile[1]},
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def _classes(params: AttentionParams, B: int, queries: int, keys: int, tile: tuple[int, int]) -> Tensor:
    """Class of each tile: int8 (B|1, H|1, query tiles, key tiles) of EMPTY, PARTIAL and FULL."""
    masks = [_without_broadcast(t) for t in (params.keep, params.key_keep) if t is not None]
    parts = [*masks, *[t for t in (params.query_ids, params.key_ids) if t is not None]]
    batches = B if params.lengths is not None else max(t.shape[0] for t in parts)
    heads = max([t.shape[1] for t in masks], default=1)
    shape = (batches, heads, blocks_of(queries, tile[0]), blocks_of(keys, tile[1]))
    classes = torch.empty(shape, dtype=torch.int8, device=parts[0].device)
    _run(classes_launch(classes, params, queries, keys, tile), classes)
    return classes


def lists_launch(classes: Tensor, lists: Tensor, counts: Tensor, columns: bool) -> Launch:
    """Launch that fills `lists` and `counts` from `classes`."""
    b, h, tile_rows, across = lists.shape
    key_tiles = classes.shape[3]
    return Launch(
        name=f"attention lists of {'columns' if columns else 'rows'}",
        kernel=_lists_kernel,
        grid=b * h * tile_rows,
        arguments={
            "classes": classes, "lists": lists, "counts": counts, "tile_rows": tile_rows, "across": across,
            "head_stride": tile_rows * across, "row_stride": 1 if columns else key_tiles,
            "tile_stride": key_tiles if columns else 1, "CHUNK": LIST_CHUNK,
        },
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def _lists(classes: Tensor, bits: dict[str, object], columns: bool, ordered: bool) -> dict[str, object]:
    shape = classes.mT.shape if columns else classes.shape
    lists = torch.empty(shape, dtype=torch.int32, device=classes.device)
    counts = torch.empty((*shape[:3], 2), dtype=torch.int32, device=classes.device)
    _run(lists_launch(classes, lists, counts, columns), classes)
    batches, heads, tile_rows, _ = shape
    row_order = batch_order = None
    if ordered:
        work = counts.sum(3)
        row_order = _by_descending_work(work)
        batch_order = _by_descending_work(work.sum((1, 2))) if batches > 1 else None
    return bits | {
        "tile_list": lists, "tile_counts": counts, "tile_order": row_order, "batch_order": batch_order,
        "map_batch": heads * tile_rows if batches > 1 else 0, "map_head": tile_rows if heads > 1 else 0,
    }  # fmt: skip


def _run(launch: Launch, on: Tensor) -> None:
    if not on.is_meta:
        run([launch], on)
