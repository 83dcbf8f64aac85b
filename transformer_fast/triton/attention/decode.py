"""Attention of a few new queries to a long cache, split over the keys: parts first, then one reduction.

Method: T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference", 2023. All query heads
that share a key head, times the new positions of each, are the rows of one tile, so that the cache is read once for
them. The maximum number of parts depends on shapes only, so the host never waits for the device. The number of keys per
part depends on the sequence's length, which each program reads: programs past the last key exit, and the others share
the keys equally.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_cache import run_kept
from ..launcher import Launch, blocks_of, widen_bf16_if_interpreted, without_keys
from .decode_part import RUNTIME_INTEGERS, part_kernel, shares
from .mask import open_bounds, parts_of
from .tiles import (
    LN2,
    LOG2E,
    batch_stride,
    bounded_window,
    distance_arguments,
    padded_head_dim,
    tensor_arguments,
    with_32_bit_offsets,
)

# Target number of programs (a few per multiprocessor); the number of parts per row is at most MOST_PARTS.
PROGRAMS = 512
MOST_PARTS = 128
REDUCED_AT_ONCE = 32

# (maximum rows, keys, warps per 16 rows, stages) of a tile, by bits of the type and padded head size.
TILES = {
    (16, 32): (32, 64, 4, 3), (16, 64): (32, 64, 4, 3), (16, 128): (32, 64, 4, 3), (16, 256): (32, 32, 4, 3),
    (32, 32): (16, 64, 4, 2), (32, 64): (16, 64, 4, 2), (32, 128): (16, 32, 4, 2), (32, 256): (16, 32, 8, 2),
}  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _join_kernel(
    out, logsumexp, part_outs, part_maxes, part_sums, lengths, sinks,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    kv_heads, group, queries, capacity, causal_offset, window, parts, rows: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Join the parts of one output row."""
    number = tl.program_id(0)
    query = number % queries
    head = number // queries % (kv_heads * group)
    batch = (number // queries // (kv_heads * group)).to(tl.int64)
    # The diagonals of a sequence end at its last key.
    length = tl.minimum(tl.load(lengths + batch), capacity)
    if causal_offset is not None:
        causal_offset += length - queries
    if window is not None:
        window += length - queries
    PARTS: tl.constexpr = parts_of(causal_offset is not None, False, window is not None)
    bounds = open_bounds(None, 0, causal_offset, window, queries, length, None, None, lengths)
    first_key, last_key, share = shares(bounds, parts, BLOCK_KEYS, PARTS)
    # At least one part, to avoid a division by zero; its loop does not run if there is no key.
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
    """Number of keys that the cache can hold per sequence."""
    return k.shape[2] * (1 if page_table is None else page_table.shape[1])


class Division(NamedTuple):
    """Division of a call: rows per tile, programs per part of the keys, and parts."""

    block_rows: int
    programs: int
    parts: int


@functools.lru_cache(maxsize=4096)
def division(B: int, H: int, Lq: int, D: int, Hkv: int, capacity: int, itemsize: int) -> Division:
    """Divide a call."""
    most_rows, keys, _, _ = TILES[itemsize * 8, padded_head_dim(D)]
    block_rows = min(most_rows, max(16, 1 << (H // Hkv * Lq - 1).bit_length()))
    programs = B * Hkv * blocks_of(H // Hkv * Lq, block_rows)
    parts = max(1, min(blocks_of(PROGRAMS, programs), blocks_of(capacity, keys), MOST_PARTS))
    return Division(block_rows, programs, parts)


def division_of(q: Tensor, k: Tensor, page_table: Tensor | None) -> Division:
    return division(*q.shape, k.shape[1], capacity_of(k, page_table), q.element_size())


def register_limit(bits: int, block_d: int, block_rows: int, masked: bool, whole_pages: bool) -> int | None:
    """Register limit per thread with which one more program fits and nothing spills; None lets the compiler choose. The
    best number depends on masking, on the number of parts, and on pages of whole tiles."""
    if (bits, block_d, block_rows) == (16, 64, 32):
        return 128
    return 96 if (bits, block_d, block_rows) == (16, 64, 16) and whole_pages and not masked else None


def part_buffers(q: Tensor, parts: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Buffers between parts and join, fp32: weighted sums of values, and maxima and sums per row of q; None for one
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
    """Launches that fill `out` and `logsumexp`: one, or two by way of :func:`part_buffers` if the keys are split.

    k, v: (B, Hkv, S, D), or with a page table (pages, Hkv, page_size, D).
    """
    block_rows, programs, parts = division_of(q, k, page_table)
    capacity = capacity_of(k, page_table)
    page_size = 0 if page_table is None else k.shape[2]
    B, H, Lq, D = q.shape
    Hkv = k.shape[1]
    block_d = padded_head_dim(q.shape[3])
    causal_offset = None if causal is None or causal >= Lq - 1 else max(-capacity, causal)
    window = bounded_window(window, capacity, Lq)
    _, keys, warps, stages = TILES[q.element_size() * 8, block_d]
    registers = None
    if softcap is not None or distance_bias is not None:
        keys = min(keys, 32)  # score features need the registers of further warps
        registers = 255  # else ptxas may spill to fit one more program
    elif key_ids is None:
        masked = causal_offset is not None or window is not None
        whole_pages = parts > 1 and page_size > 0 and page_size % keys == 0
        registers = register_limit(q.element_size() * 8, block_d, block_rows, masked, whole_pages)
    warps *= block_rows // 16
    rows = B * H * Lq

    shared = {
        "logsumexp": logsumexp, "lengths": lengths, "kv_heads": Hkv, "group": H // Hkv, "queries": Lq,
        "capacity": capacity, "parts": parts, "sinks": sinks,
        "causal_offset": causal_offset, "window": window, "rows": rows,
        "HEAD_DIM": D, "BLOCK_D": block_d, "BLOCK_KEYS": keys, "part_outs": part_outs,
        "part_maxes": part_maxes, "part_sums": part_sums,
    }  # fmt: skip
    kind = f"{str(q.dtype)[6:]} d{block_d}"
    kinds = {
        f"pages of {page_size}": page_size, "window": window is not None, "documents": key_ids is not None,
        "by distance": distance_bias is not None, "capped": softcap is not None, "sinks": sinks is not None,
        "in parts": parts > 1,
    }  # fmt: skip
    launches = [
        Launch(
            name=f"attention decode {kind} {block_rows}x{keys} {warps} warps {stages} stages"
            f"{''.join(f' {kind}' for kind, true in kinds.items() if true)}",
            kernel=part_kernel,
            grid=programs * parts,
            arguments=tensor_arguments(q=q, k=k, v=v, out=out) | shared
            | distance_arguments(distance_bias, capacity - 1) | {
                "query_ids": query_ids, "key_ids": key_ids, "softcap": softcap,
                "query_ids_batch": batch_stride(query_ids), "key_ids_batch": batch_stride(key_ids),
                "page_table": page_table, "table_batch": 0 if page_table is None else page_table.stride(0),
                "pages": k.shape[0],
                "scale": scale, "BLOCK_ROWS": block_rows, "PAGE_SIZE": page_size,
            },
            num_warps=warps,
            num_stages=stages,
            max_registers=registers,
        )
    ]  # fmt: skip
    if parts > 1:
        launches.append(
            Launch(
                name=f"attention decode join {kind}{'' if window is None else ' window'}"
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
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None,
    distance_bias: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None,
    causal: int | None, window: int | None, softcap: float | None, scale: float, call: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the newest queries per sequence to a cache, by Triton; forward only.

    Args:
        q: (B, H, Lq, D), fp32, fp16 or bf16, the last Lq positions of each sequence; D from 1 to 256; last stride 1.
        k_cache, v_cache: (B, Hkv, S, D) of q's dtype, ``Hkv`` divides ``H``, any strides with last 1; or, with a page
            table, (pages, page_size, Hkv, D).
        lengths, page_table: fields of :class:`CachedKeys`; each page size compiles once.
        distance_bias, query_ids, key_ids, sinks, causal, window, softcap, scale: fields of :class:`AttentionParams`,
            for `cached` keys.
        call: see :func:`..launch_cache.run_kept`.

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
    k, v = (k_cache, v_cache) if page_table is None else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    q, k, v = (with_32_bit_offsets(t) for t in (q, k, v))
    outputs = (out, logsumexp, *part_buffers(q, division_of(q, k, page_table).parts))
    run_kept(
        call,
        outputs,
        lambda: decode_launches(
            q, k, v, lengths.contiguous(), page_table, distance_bias, query_ids, key_ids, sinks, *outputs,
            causal, window, softcap, scale,
        ),
    )  # fmt: skip
    return out, logsumexp
