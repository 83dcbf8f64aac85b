"""Attention of a few new queries to a long cache: the kernel of one part of the keys; :mod:`.decode` describes the
method."""

import triton
import triton.language as tl

from .mask import CAUSAL, first_visible, key_limits, open_bounds, parts_of, same_document, tanh, within_bounds
from .tiles import LN2, LOG2E, any_true, at_head, load_rows

# A new cache length, batch size or head count does not recompile (see RUNTIME_INTEGERS in tiles.py).
RUNTIME_INTEGERS = [f"{name}_{dim}" for name in ("q", "k", "v", "out") for dim in ("batch", "head", "row")] + [
    "table_batch", "pages", "kv_heads", "group", "queries", "capacity", "causal_offset", "window", "parts", "rows",
    "distance_batch", "distance_head", "distance_zero", "query_ids_batch", "key_ids_batch",
]  # fmt: skip


@triton.jit
def shares(bounds, parts, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Return (first key, end, keys per part) of one sequence, in whole tiles of keys."""
    first = first_visible(0, bounds, PARTS) // KEYS * KEYS
    end = bounds.keys
    if CAUSAL & PARTS:
        end = tl.minimum(tl.maximum(bounds.queries + bounds.causal_offset, 0), end)
    return first, end, tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), parts), KEYS) * KEYS


@triton.jit
def _load_cache(
    base, page_table, pages, start, end, page_stride, row_stride, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Load rows [start, start + KEYS) of a cache, zeros from `end` on; PAGE_SIZE 0 means no pages. The nearest page
    stands for one that does not exist, so that nothing is read outside of the cache."""
    if PAGE_SIZE == 0:
        return load_rows(base, start, end, row_stride, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    elif PAGE_SIZE % KEYS == 0:
        page = tl.minimum(tl.maximum(tl.load(page_table + start // PAGE_SIZE), 0), pages - 1).to(tl.int64)
        first = start % PAGE_SIZE
        base += page * page_stride * UNIT
        return load_rows(base, first, end - start + first, row_stride, KEYS, HEAD_DIM, BLOCK_D, UNIT)
    else:
        key = start + tl.arange(0, KEYS)
        dim = tl.arange(0, BLOCK_D)
        page = tl.load(page_table + key // PAGE_SIZE, mask=key < end, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
        pointers = base + (page * page_stride + (key % PAGE_SIZE) * row_stride)[:, None] * UNIT + dim[None, :]
        return tl.load(pointers, mask=(key < end)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def part_kernel(
    q, k, v, out, logsumexp, part_outs, part_maxes, part_sums, lengths, page_table, distance_bias, query_ids, key_ids,
    sinks, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    distance_batch: tl.int64, distance_head: tl.int64, query_ids_batch: tl.int64, key_ids_batch: tl.int64,
    table_batch: tl.int64, pages, kv_heads, group, queries, capacity, causal_offset, window, parts, rows: tl.int64,
    scale, distance_zero, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute one part of the keys of one (sequence, key head), for a tile of the query rows that share the key
    head."""
    tiles = tl.cdiv(group * queries, BLOCK_ROWS)
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts % tiles
    kv_head = tl.program_id(0) // (parts * tiles) % kv_heads
    batch = (tl.program_id(0) // (parts * tiles) // kv_heads).to(tl.int64)

    # The diagonals of a sequence end at its last key.
    length = tl.minimum(tl.load(lengths + batch), capacity)
    if causal_offset is not None:
        causal_offset += length - queries
    if window is not None:
        window += length - queries
    PARTS: tl.constexpr = parts_of(causal_offset is not None, False, window is not None, query_ids is not None)
    bounds = open_bounds(
        None, 0, causal_offset, window, queries, length, at_head(query_ids, batch, batch, query_ids_batch, 0, 1),
        at_head(key_ids, batch, batch, key_ids_batch, 0, 1), lengths,
    )  # fmt: skip
    first_key, last_key, share = shares(bounds, parts, BLOCK_KEYS, PARTS)
    begin = first_key + part * share
    end = tl.minimum(begin + share, last_key)
    # With a single part, also for an empty cache, the result is written here.
    if part_outs is not None and begin >= last_key:
        return

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < group * queries
    head = kv_head * group + row // queries
    query = row % queries
    limit = key_limits(query, bounds, PARTS)
    full_end = bounds.keys if causal_offset is None else tl.minimum(causal_offset + 1, bounds.keys)

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
    if sinks is not None and part_outs is None:  # else the join adds the sinks
        row_max = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
        row_sum += 1.0
    acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for start in tl.range(begin, end, BLOCK_KEYS, disable_licm=True):
        stop = end
        if key_ids is not None:
            same = same_document(query, start, bounds, BLOCK_KEYS)
            # A tile that shares no document with these rows is skipped.
            stop = tl.where(any_true(same), end, start)
        k_tile = _load_cache(
            k, page_table, pages, start, stop, k_batch, k_row, PAGE_SIZE, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT
        )  # fmt: skip
        v_tile = _load_cache(
            v, page_table, pages, start, stop, v_batch, v_row, PAGE_SIZE, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT
        )  # fmt: skip
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
            masked = masked | (start < first_visible(queries - 1, bounds, PARTS))
        if masked:
            visible = within_bounds(query, limit, start, bounds, BLOCK_KEYS, PARTS)
            if distance_bias is not None:
                visible = visible & (nearness != float("-inf"))
            scores = tl.where(visible, scores, float("-inf"))
            if causal_offset is not None or window is not None or key_ids is not None or distance_bias is not None:
                # Only some rows may see these values; in the product below, 0 * NaN would be NaN for the others.
                finite = (v_tile - v_tile) == 0.0
                seen = tl.where(visible, 1.0, 0.0).to(v_tile.dtype)
                reached = tl.dot(seen, tl.where(finite, 0.0, 1.0).to(v_tile.dtype), input_precision="ieee") > 0.0
                acc += tl.where(reached, float("nan"), 0.0)
                v_tile = tl.where(finite, v_tile, 0.0)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # Before its first key a row has row_max -inf; -inf - -inf would be NaN.
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
