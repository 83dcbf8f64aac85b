"""Attention of a few new queries to a long cache, split over the keys: parts first, then one reduction.

Method: T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference", 2023. All query heads
that share a key head, times the new positions of each, are the rows of one tile, so that the cache is read once for
them. How many parts there may be comes from shapes alone, so nothing waits for the device; how many keys a part has
comes from each sequence's own length, read by the program: programs past its last key exit, the others share equally.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_cache import run_cached
from ..launcher import Launch, blocks_of, widen_bf16_if_interpreted, without_keys
from .mask import Bounds, first_visible, ids_at, key_limits, same_document, tanh, within_bounds
from .tiles import (
    LN2,
    LOG2E,
    any_true,
    batch_stride,
    bounded_window,
    distance_arguments,
    load_rows,
    padded_head_dim,
    tensor_arguments,
    within_reach,
)

# Parts are made until about so many programs run (a few for each multiprocessor), but never more than MOST_PARTS a row.
PROGRAMS = 512
MOST_PARTS = 128
REDUCED_AT_ONCE = 32

# (most rows, keys, warps for each 16 rows, stages) a tile by bits of the type and padded head size.
TILES = {
    (16, 32): (32, 64, 4, 3), (16, 64): (32, 64, 4, 3), (16, 128): (32, 64, 4, 3), (16, 256): (32, 32, 4, 3),
    (32, 32): (16, 64, 4, 2), (32, 64): (16, 64, 4, 2), (32, 128): (16, 32, 4, 2), (32, 256): (16, 32, 8, 2),
}  # fmt: skip

# No cache length, batch or head count compiles anything new (compare attention_tiles.RUNTIME_INTEGERS).
RUNTIME_INTEGERS = [f"{name}_{dim}" for name in ("q", "k", "v", "out") for dim in ("batch", "head", "row")] + [
    "table_batch", "kv_heads", "group", "queries", "capacity", "causal_offset", "window", "parts", "rows",
    "distance_batch", "distance_head", "distance_zero", "query_ids_batch", "key_ids_batch",
]  # fmt: skip


@triton.jit
def _parts(bounds, parts, KEYS: tl.constexpr):
    """(first key, end, keys of a part): what the parts share of one sequence, in whole tiles of keys."""
    first = first_visible(0, bounds) // KEYS * KEYS
    end = tl.minimum(tl.maximum(bounds.queries + bounds.causal_offset, 0), bounds.keys)
    return first, end, tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), parts), KEYS) * KEYS


@triton.jit
def _load_cache(
    base, page_table, start, end, page_stride, row_stride, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + KEYS) of a cache, zeros from `end` on; PAGE_SIZE 0: a cache without pages."""
    if PAGE_SIZE == 0:
        return load_rows(base, start, end, row_stride, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    elif PAGE_SIZE % KEYS == 0:
        page = tl.load(page_table + start // PAGE_SIZE).to(tl.int64)
        first = start % PAGE_SIZE
        base += page * page_stride * UNIT
        return load_rows(base, first, end - start + first, row_stride, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    else:
        key = start + tl.arange(0, KEYS)
        dim = tl.arange(0, BLOCK_D)
        page = tl.load(page_table + key // PAGE_SIZE, mask=key < end, other=0).to(tl.int64)
        pointers = base + (page * page_stride + (key % PAGE_SIZE) * row_stride)[:, None] * UNIT + dim[None, :]
        return tl.load(pointers, mask=(key < end)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _part_kernel(
    q, k, v, out, logsumexp, part_outs, part_maxes, part_sums, lengths, page_table, distance_bias, query_ids, key_ids,
    sinks, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    table_batch: tl.int64, kv_heads, group, queries, capacity, causal_offset, window, parts, rows: tl.int64, scale,
    distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one (sequence, key head), for a tile of the query rows that share it."""
    tiles = tl.cdiv(group * queries, BLOCK_ROWS)
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts % tiles
    kv_head = tl.program_id(0) // (parts * tiles) % kv_heads
    batch = (tl.program_id(0) // (parts * tiles) // kv_heads).to(tl.int64)

    # The diagonals of a sequence end at its last key.
    length = tl.minimum(tl.load(lengths + batch), capacity)
    if window is not None:
        window += length - queries
    bounds = Bounds(
        None, 0, causal_offset + length - queries, window, queries, length,
        ids_at(query_ids, batch, query_ids_batch, 0), ids_at(key_ids, batch, key_ids_batch, 0),
    )  # fmt: skip
    first_key, last_key, share = _parts(bounds, parts, BLOCK_KEYS)
    begin = first_key + part * share
    end = tl.minimum(begin + share, last_key)
    # With one part the result is written here, and an empty cache has one too.
    if part_outs is not None and begin >= last_key:
        return

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < group * queries
    head = kv_head * group + row // queries
    query = row % queries
    limit = key_limits(query, bounds)
    full_end = tl.minimum(bounds.causal_offset + 1, bounds.keys) if CAUSAL else bounds.keys

    dim = tl.arange(0, BLOCK_D)
    q_offsets = batch * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_row
    q_inside = inside[:, None] & (dim < HEAD_DIM)[None, :]
    q_tile = tl.load(q + q_offsets[:, None] * UNIT + dim[None, :], mask=q_inside, other=0.0)
    k += kv_head.to(tl.int64) * k_head * UNIT
    v += kv_head.to(tl.int64) * v_head * UNIT
    if PAGE_SIZE == 0:
        k += batch * k_batch * UNIT
        v += batch * v_batch * UNIT
    else:
        page_table += batch * table_batch
    if distance_bias is not None:
        own_zero = distance_zero - (query + length - queries) + head.to(tl.int64) * distance_head
        distances = distance_bias + batch * distance_batch + own_zero[:, None]

    row_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    if sinks is not None and part_outs is None:  # else the join knows them
        row_max = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
        row_sum += 1.0
    acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for start in tl.range(begin, end, BLOCK_KEYS, disable_licm=True):
        stop = end
        if key_ids is not None:
            same = same_document(query, start, bounds, BLOCK_KEYS)
            # A tile without a key of these rows' documents is not read.
            stop = tl.where(any_true(same), end, start)
        k_tile = _load_cache(k, page_table, start, stop, k_batch, k_row, PAGE_SIZE, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        v_tile = _load_cache(v, page_table, start, stop, v_batch, v_row, PAGE_SIZE, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if softcap is None and distance_bias is None:
            scores *= scale * LOG2E
        else:
            scores *= scale
        if softcap is not None:
            scores = tanh(scores / softcap) * softcap
        masked = start + BLOCK_KEYS > full_end
        if distance_bias is not None:
            key = start + tl.arange(0, BLOCK_KEYS)[None, :]
            nearness = tl.load(distances + key, mask=inside[:, None] & (key < end), other=0.0)
            masked = masked | any_true(nearness == float("-inf"))
            scores += nearness
        if softcap is not None or distance_bias is not None:
            scores *= LOG2E
        if key_ids is not None:
            masked = masked | any_true(same == 0)
        if window is not None:
            masked = masked | (start < first_visible(queries - 1, bounds))
        if masked:
            visible = within_bounds(query, limit, start, bounds, BLOCK_KEYS)
            if distance_bias is not None:
                visible = visible & (nearness != float("-inf"))
            scores = tl.where(visible, scores, float("-inf"))
            if CAUSAL or window is not None or key_ids is not None or distance_bias is not None:
                # Some rows see these values and some must not: 0 * NaN inside the product below is NaN.
                finite = (v_tile - v_tile) == 0.0
                seen = tl.where(visible, 1.0, 0.0).to(v_tile.dtype)
                reached = tl.dot(seen, tl.where(finite, 0.0, 1.0).to(v_tile.dtype), input_precision="ieee") > 0.0
                acc += tl.where(reached, float("nan"), 0.0)
                v_tile = tl.where(finite, v_tile, 0.0)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has row_max -inf, which must not be subtracted from itself.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - shift[:, None])
        decay = tl.math.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
        row_max = new_max

    number = (batch * kv_heads * group + head) * queries + query
    if part_outs is None:
        empty = row_sum == 0.0
        divisor = tl.where(empty, 1.0, row_sum)
        logsum = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(divisor))
        tl.store(logsumexp + number, logsum, mask=inside)
        out_offsets = batch * out_batch + head.to(tl.int64) * out_head + query.to(tl.int64) * out_row
        result = (acc / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_offsets[:, None] * UNIT + dim[None, :], result, mask=q_inside)
    else:
        number += part * rows
        tl.store(part_maxes + number, row_max, mask=inside)
        tl.store(part_sums + number, row_sum, mask=inside)
        tl.store(part_outs + number[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_inside)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _join_kernel(
    out, logsumexp, part_outs, part_maxes, part_sums, lengths, sinks,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    kv_heads, group, queries, capacity, causal_offset, window, parts, rows: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """One row of the output from its parts."""
    number = tl.program_id(0)
    query = number % queries
    head = number // queries % (kv_heads * group)
    batch = (number // queries // (kv_heads * group)).to(tl.int64)
    # The diagonals of a sequence end at its last key.
    length = tl.minimum(tl.load(lengths + batch), capacity)
    if window is not None:
        window += length - queries
    bounds = Bounds(None, 0, causal_offset + length - queries, window, queries, length, None, None)
    first_key, last_key, share = _parts(bounds, parts, BLOCK_KEYS)
    # At least one part, so that nothing is divided by zero; its loop does not run if there is no key.
    used = tl.cdiv(tl.maximum(last_key - first_key, 0), tl.maximum(share, 1))

    dim = tl.arange(0, BLOCK_D)
    row_max = float("-inf")
    row_sum = 0.0
    if sinks is not None:
        row_max = tl.load(sinks + head) * LOG2E
        row_sum = 1.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(0, used, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        place = part.to(tl.int64) * rows + number
        inside = part < used
        max_tile = tl.load(part_maxes + place, mask=inside, other=float("-inf"))
        sum_tile = tl.load(part_sums + place, mask=inside, other=0.0)
        inside = inside[:, None] & (dim < HEAD_DIM)[None, :]
        out_tile = tl.load(part_outs + place[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        new_max = tl.maximum(row_max, tl.max(max_tile, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        factor = tl.math.exp2(max_tile - shift)
        decay = tl.math.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(sum_tile * factor, 0)
        acc = acc * decay + tl.sum(out_tile * factor[:, None], 0)
        row_max = new_max

    empty = row_sum == 0.0
    divisor = tl.where(empty, 1.0, row_sum)
    tl.store(logsumexp + number, tl.where(empty, float("-inf"), row_max * LN2 + tl.log(divisor)))
    out += (batch * out_batch + head.to(tl.int64) * out_head + query.to(tl.int64) * out_row) * UNIT
    tl.store(out + dim, (acc / divisor).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def capacity_of(k: Tensor, page_table: Tensor | None) -> int:
    """How many keys of a sequence the cache can hold."""
    return k.shape[2] * (1 if page_table is None else page_table.shape[1])


@functools.lru_cache(maxsize=4096)
def division(B: int, H: int, Lq: int, D: int, Hkv: int, capacity: int, itemsize: int) -> tuple[int, int, int]:
    """(rows a tile, programs for one part of the keys, parts) of a call."""
    most_rows, keys, _, _ = TILES[itemsize * 8, padded_head_dim(D)]
    block_rows = min(most_rows, max(16, 1 << (H // Hkv * Lq - 1).bit_length()))
    programs = B * Hkv * blocks_of(H // Hkv * Lq, block_rows)
    return block_rows, programs, max(1, min(blocks_of(PROGRAMS, programs), blocks_of(capacity, keys), MOST_PARTS))


def division_of(q: Tensor, k: Tensor, page_table: Tensor | None) -> tuple[int, int, int]:
    return division(*q.shape, k.shape[1], capacity_of(k, page_table), q.element_size())


def part_buffers(q: Tensor, parts: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What each part leaves for the join, fp32: sums of weighted values, maxima and sums of the rows of q; None for one
    part."""
    if parts == 1:
        return None, None, None
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    part_outs = torch.empty((parts, rows, q.shape[3]), dtype=torch.float32, device=q.device)
    part_maxes, part_sums = torch.empty((2, parts, rows), dtype=torch.float32, device=q.device)
    return part_outs, part_maxes, part_sums


def decode_launches(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor | None, distance_bias: Tensor | None,
    query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None, out: Tensor, logsumexp: Tensor,
    part_outs: Tensor | None, part_maxes: Tensor | None, part_sums: Tensor | None,
    causal: int | None, window: int | None, softcap: float | None, scale: float,
) -> list[Launch]:  # fmt: skip
    """One launch, or two where the keys are split, that fill `out` and `logsumexp` by way of :func:`part_buffers`.

    k, v: (B, Hkv, S, D), or with a page table (pages, Hkv, page_size, D).
    """
    block_rows, programs, parts = division_of(q, k, page_table)
    capacity = capacity_of(k, page_table)
    page_size = 0 if page_table is None else k.shape[2]
    B, H, Lq, D = q.shape
    Hkv = k.shape[1]
    block_d = padded_head_dim(q.shape[3])
    _, keys, warps, stages = TILES[q.element_size() * 8, block_d]
    warps *= block_rows // 16
    rows = B * H * Lq

    shared = {
        "logsumexp": logsumexp, "lengths": lengths, "kv_heads": Hkv, "group": H // Hkv, "queries": Lq,
        "capacity": capacity, "parts": parts, "sinks": sinks,
        "causal_offset": capacity + Lq if causal is None else max(-capacity, min(causal, capacity + Lq)),
        "window": bounded_window(window, capacity, Lq), "rows": rows,
        "HEAD_DIM": D, "BLOCK_D": block_d, "BLOCK_KEYS": keys, "part_outs": part_outs,
        "part_maxes": part_maxes, "part_sums": part_sums,
    }  # fmt: skip
    kind = f"{str(q.dtype)[6:]} d{block_d}"
    kinds = {
        f"pages of {page_size}": page_size, "window": shared["window"] is not None, "documents": key_ids is not None,
        "by distance": distance_bias is not None, "capped": softcap is not None, "sinks": sinks is not None,
        "in parts": parts > 1,
    }  # fmt: skip
    launches = [
        Launch(
            name=f"attention decode {kind} {block_rows}x{keys} {warps} warps {stages} stages"
            f"{''.join(f' {kind}' for kind, true in kinds.items() if true)}",
            kernel=_part_kernel,
            grid=programs * parts,
            arguments=tensor_arguments(q=q, k=k, v=v, out=out) | shared
            | distance_arguments(distance_bias, capacity - 1) | {
                "query_ids": query_ids, "key_ids": key_ids, "softcap": softcap,
                "query_ids_batch": batch_stride(query_ids), "key_ids_batch": batch_stride(key_ids),
                "page_table": page_table, "table_batch": 0 if page_table is None else page_table.stride(0),
                "scale": scale, "BLOCK_ROWS": block_rows, "PAGE_SIZE": page_size,
                "CAUSAL": causal is not None and causal < Lq - 1,
            },
            num_warps=warps,
            num_stages=stages,
        )
    ]  # fmt: skip
    if parts > 1:
        launches.append(
            Launch(
                name=f"attention decode join {kind}{' window' if shared['window'] is not None else ''}"
                f"{'' if sinks is None else ' sinks'}",
                kernel=_join_kernel,
                grid=rows,
                arguments=tensor_arguments(out=out) | shared | {"BLOCK_PARTS": REDUCED_AT_ONCE},
                num_warps=4,
                num_stages=1,
            )
        )
    return launches


@widen_bf16_if_interpreted(results=1)
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    distance_bias: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    sinks: Tensor | None,
    causal: int | None,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest queries of every sequence to its cache, by Triton; forward only.

    Args:
        q: (B, H, Lq, D), fp32, fp16 or bf16, the last Lq positions of each sequence; D from 1 to 256; last stride 1.
        k_cache, v_cache: (B, Hkv, S, D) of q's dtype, ``Hkv`` divides ``H``, any strides with last 1; or, with a page
            table, (pages, page_size, Hkv, D).
        lengths: int32 (B,), keys in the cache, those of the new positions included; what lies past them is not read.
        page_table: int32 (B, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries past the last key may hold anything. A page size compiles once.
        distance_bias: fp32 (B|1, H|1, Lq + S - 1), last stride 1, of which entry ``S - 1 + j - (i + lengths[b] - Lq)``
            is added to the score of query i and key j; -inf blocks.
        query_ids, key_ids: int32 (B, Lq) and (B, S): query i sees the keys of its own id. Both or neither.
        sinks: fp32 (H,), for every query of a head the score of one more key, which has no value.
        causal: bottom-right: query i sees keys ``j <= i + lengths[b] - Lq + causal``; None for no such bound.
        window: likewise, query i sees keys ``j >= i + lengths[b] - Lq + window``; None for no such bound.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before anything is added; None for no cap.
        scale: multiplies q k^T.

    Returns:
        out (B, H, Lq, D) in q's dtype and logsumexp (B, H, Lq) fp32; 0 and -inf for a query without keys. Bitwise equal
        from run to run.
    """
    out = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k_cache.numel() == 0 or (page_table is not None and page_table.numel() == 0):
        return out.zero_(), without_keys(logsumexp, sinks)
    if page_table is not None and page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    if query_ids is not None and key_ids is not None:
        query_ids, key_ids = (t if t.stride(1) == 1 else t.contiguous() for t in (query_ids, key_ids))
    q, k, v = (within_reach(t) for t in (q, *_head_major(k_cache, v_cache, page_table)))
    run_cached(
        ("attention decode", causal, window, softcap, scale),
        (q, k, v, lengths.contiguous(), page_table, distance_bias, query_ids, key_ids, sinks),
        (out, logsumexp, *part_buffers(q, division_of(q, k, page_table)[2])),
        lambda *tensors: decode_launches(*tensors, causal, window, softcap, scale),
    )
    return out, logsumexp


def _head_major(k: Tensor, v: Tensor, page_table: Tensor | None) -> tuple[Tensor, Tensor]:
    return (k, v) if page_table is None else (k.transpose(1, 2), v.transpose(1, 2))
