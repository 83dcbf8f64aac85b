"""Masked attention, backward: weights are computed again from the logsumexp, tile by tile.

Method: T. Dao, "FlashAttention-2", 2023, section 3.1.2, as three kernels: delta (one number a row), the gradient of q
(a program a tile of queries, looping over keys) and the gradients of k and v (:mod:`.attention_backward_kv`).
Every sum has one owner and one order: two runs agree bit for bit.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from .attention_backward_kv import DELTA_ROWS, grad_kv_kernel
from .attention_launches import (
    Packed,
    Plan,
    example_tile_calls,
    packed_mask,
    packed_view,
    planned,
    run_call,
    tile_launch,
)
from .attention_steps import (
    allowed_tile,
    in_order,
    key_steps,
    masked_scores,
    sequence,
    statistics_row,
    tile_at,
)
from .attention_tiles import (
    LOG2E,
    any_true,
    at_head,
    exponential,
    jit,
    key_limits,
    load_rows,
    padded_head_dim,
    positive_scale,
    store_rows,
    tensor_arguments,
    within_reach,
)
from .launching import Launch, architecture_of, blocks_of, empties_like, widen_bf16_if_interpreted
from .philox import attention_keep_tile, load_seed


@jit
def _delta_kernel(
    grad_out, out, delta, empty_tiles, logsumexp, grad_logsumexp,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    heads, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """delta = sum over d of grad_out * out, less the gradient of the logsumexp: what each row's softmax gradient is
    centred by. And which tiles of ROWS rows hold a row without keys."""
    tiles = tl.cdiv(queries, ROWS)
    start = tl.program_id(0) % tiles * ROWS
    pair = tl.program_id(0) // tiles
    grad_out = at_head(grad_out, pair // heads, pair % heads, grad_out_batch, grad_out_head, UNIT)
    out = at_head(out, pair // heads, pair % heads, out_batch, out_head, UNIT)
    grad_tile = load_rows(grad_out, start, queries, grad_out_row, ROWS, HEAD_DIM, BLOCK_D, UNIT)
    out_tile = load_rows(out, start, queries, out_row, ROWS, HEAD_DIM, BLOCK_D, UNIT)
    row = start + tl.arange(0, ROWS)
    sums = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    first_row = pair.to(tl.int64) * queries
    empty = tl.load(logsumexp + first_row + row, mask=row < queries, other=0.0) == float("-inf")
    if grad_logsumexp is not None:
        # The logsumexp of an empty row is a constant, whatever gradient comes back to it (NaN, through an exp).
        sums -= tl.load(grad_logsumexp + first_row + row, mask=(row < queries) & (empty == 0), other=0.0)
    tl.store(empty_tiles + tl.program_id(0), tl.max(empty.to(tl.int32)))
    tl.store(delta + first_row + row, sums, mask=row < queries)


@jit
def _grad_q_kernel(
    grad_out, q, k, v, logsumexp, grad_logsumexp, delta, sums, grad_q, keep, key_keep, lengths, bias, seed,
    cu_seqlens_q, cu_seqlens_k, batch_order, tile_list, tile_counts, tile_order, map_batch, map_head,
    grad_out_batch: tl.int64, grad_out_head: tl.int64, grad_out_row: tl.int64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    grad_q_batch: tl.int64, grad_q_head: tl.int64, grad_q_row: tl.int64,
    keep_batch: tl.int64, keep_head: tl.int64, keep_query: tl.int64, keep_word,
    key_keep_batch: tl.int64, key_keep_head: tl.int64,
    lengths_batch: tl.int64, lengths_query: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_query: tl.int64, bias_key,
    heads, group, queries, keys, total_queries: tl.int64, causal_offset, threshold, rescale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    BIASED: tl.constexpr = bias is not None
    NATURAL: tl.constexpr = sums is not None
    slots = tl.cdiv(queries, BLOCK_QUERIES)
    batch = in_order(batch_order, tl.program_id(0) // slots // heads)
    head = tl.program_id(0) // slots % heads
    first_query, queries = sequence(cu_seqlens_q, batch, queries)
    first_key, keys = sequence(cu_seqlens_k, batch, keys)
    line = batch * map_batch + head * map_head
    tile = tl.cdiv(queries, BLOCK_QUERIES) - 1 - tl.program_id(0) % slots
    if tile_order is not None:
        tile = tl.load(tile_order + line + tl.program_id(0) % slots)
    if cu_seqlens_q is not None:  # noqa: SIM102 - decided when compiling, the other when running
        if tile < 0:
            return
    start_query = tile * BLOCK_QUERIES

    grad_out = at_head(grad_out, batch, head, grad_out_batch, grad_out_head, UNIT) + first_query * grad_out_row * UNIT
    q = at_head(q, batch, head, q_batch, q_head, UNIT) + first_query * q_row * UNIT
    k = at_head(k, batch, head // group, k_batch, k_head, UNIT) + first_key * k_row * UNIT
    v = at_head(v, batch, head // group, v_batch, v_head, UNIT) + first_key * v_row * UNIT
    grad_q = at_head(grad_q, batch, head, grad_q_batch, grad_q_head, UNIT) + first_query * grad_q_row * UNIT
    if keep is not None:
        keep = at_head(keep, batch, head, keep_batch, keep_head, 8)
    if key_keep is not None:
        key_keep = at_head(key_keep, batch, head, key_keep_batch, key_keep_head, 8)
    if bias is not None:
        bias = at_head(bias, batch, head, bias_batch, bias_head, MASK_UNIT)
    if seed is not None:
        key_low, key_high = load_seed(seed)

    rows = tl.minimum(start_query + tl.arange(0, BLOCK_QUERIES), queries - 1)
    limit = key_limits(rows, batch, lengths, lengths_batch, lengths_query, causal_offset, keys)
    last_key = tl.maximum(tl.max(limit, 0), 0)
    full, steps = key_steps(tile_counts, line + tile, limit, last_key, BLOCK_KEYS)
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    if tile_list is not None:
        tile_list += (line + tile).to(tl.int64) * key_tiles

    first_row = statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query)
    shift = tl.load(logsumexp + first_row + rows)
    shift = tl.where(shift == float("-inf"), 0.0, shift) * (1.0 if NATURAL else LOG2E)
    centre = tl.load(delta + first_row + rows)
    q_tile = load_rows(q, start_query, queries, q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    grad_tile = load_rows(grad_out, start_query, queries, grad_out_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)

    # A large logsumexp has lost digits (beside a bias of -1e9 on a whole row, even the number of keys): weights from
    # it do not sum to 1, nor gradients of scores to 0. Where that would show, both sums are taken here first.
    if NATURAL:
        too_large = tl.abs(shift) > (16.0 if q.dtype.element_ty == tl.float32 else 1024.0)
        summing = tl.where(any_true(too_large), steps, 0)
        row_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
        gradient_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
        for step in tl.range(0, summing, num_stages=1, disable_licm=True):
            start = tile_at(tile_list, step, full, key_tiles) * BLOCK_KEYS
            k_tile = load_rows(k, start, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            v_tile = load_rows(v, start, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            scores, allowed = masked_scores(
                scores, scale, start_query, queries, start, keys, limit, keep, keep_query, keep_word, key_keep,
                bias, bias_query, bias_key, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT,
            )  # fmt: skip
            weights = tl.where(allowed, exponential(scores, shift[:, None], scale, NATURAL), 0.0)
            row_sum += tl.sum(weights, 1)
            if seed is not None:
                kept = attention_keep_tile(
                    key_low, key_high, threshold, batch, head, start_query, start, BLOCK_QUERIES, BLOCK_KEYS
                )
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            gradient_sum += tl.sum(tl.where(allowed, weights * grad_weights, 0.0), 1)
        summed = row_sum > 0.0
        row_sum = tl.where(summed, row_sum, 1.0)
        gradient_sum /= row_sum
        if grad_logsumexp is not None:
            gradient_sum -= tl.load(grad_logsumexp + first_row + rows)
        centre = tl.where(summed, gradient_sum, centre)
        row = start_query + tl.arange(0, BLOCK_QUERIES)
        tl.store(sums + first_row + row, row_sum, mask=row < queries)
        tl.store(delta + first_row + row, centre, mask=row < queries)

    # Twice only where a NaN or Inf came out: then with such keys read as zeros. Where they are allowed, the scores
    # bring the NaN anyway.
    end = steps
    for CAREFUL in tl.static_range(0, 2):
        if CAREFUL:
            broken = any_true((acc - acc) != 0.0)
            end = tl.where(broken, steps, 0)
            if broken:
                acc = tl.zeros((BLOCK_QUERIES, BLOCK_D), tl.float32)
        for step in tl.range(0, end, num_stages=1 if CAREFUL else None, disable_licm=True):
            start = tile_at(tile_list, step, full, key_tiles) * BLOCK_KEYS
            k_tile = load_rows(k, start, last_key, k_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            v_tile = load_rows(v, start, last_key, v_row, BLOCK_KEYS, HEAD_DIM, BLOCK_D, UNIT)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if NATURAL and not BIASED:
                scores *= scale
            grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            if BIASED:
                scores, allowed = masked_scores(
                    scores, scale, start_query, queries, start, keys, limit, keep, keep_query, keep_word, key_keep,
                    bias, bias_query, bias_key, BLOCK_QUERIES, BLOCK_KEYS, MASK_UNIT,
                )  # fmt: skip
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            elif step >= full:
                allowed = allowed_tile(
                    start_query, queries, start, limit, keep, keep_query, keep_word, key_keep, BLOCK_QUERIES, BLOCK_KEYS
                )
                scores = tl.where(allowed, scores, float("-inf"))
                grad_weights = tl.where(allowed, grad_weights, 0.0)
            weights = exponential(scores, shift[:, None], scale, NATURAL)
            if NATURAL:
                weights = weights / row_sum[:, None]
            if seed is not None:
                kept = attention_keep_tile(
                    key_low, key_high, threshold, batch, head, start_query, start, BLOCK_QUERIES, BLOCK_KEYS
                )
                grad_weights = tl.where(kept, grad_weights * rescale, 0.0)
            grad_scores = weights * (grad_weights - centre[:, None])
            if CAREFUL:
                k_tile = tl.where((k_tile - k_tile) == 0.0, k_tile, 0.0)
            acc = tl.dot(grad_scores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")

    store_rows(grad_q, acc * scale, start_query, queries, grad_q_row, BLOCK_QUERIES, HEAD_DIM, BLOCK_D, UNIT)


def delta_arguments(grad_out: Tensor, out: Tensor) -> dict[str, object]:
    """The arguments of the delta kernel that are no tensors."""
    _, H, Lq, D = out.shape
    arguments = {"heads": H, "queries": Lq, "HEAD_DIM": D, "BLOCK_D": padded_head_dim(out), "ROWS": DELTA_ROWS}
    strides = tensor_arguments(grad_out=grad_out, out=out)
    return arguments | {name: value for name, value in strides.items() if not isinstance(value, Tensor)}


def row_buffers(grad_rows: Tensor, logsumexp: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the kernels of one call leave for each other: delta, which tiles of rows have empty ones, sums of weights.

    `grad_rows` is grad_out as (B, H, Lq, D), or (1, H, Tq, D) of a packed batch.
    """
    B, H, Lq, _ = grad_rows.shape
    empty_tiles = torch.empty(blocks_of(Lq, DELTA_ROWS) * B * H, dtype=torch.int32, device=grad_rows.device)
    # What 16-bit types cannot show is not corrected.
    if grad_rows.dtype == torch.float32 or bias is not None:
        delta, sums = empties_like(logsumexp, logsumexp)
        return delta, empty_tiles, sums
    return torch.empty_like(logsumexp), empty_tiles, None


def backward_launches(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, logsumexp: Tensor, rows: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor], buffers: tuple[Tensor, Tensor, Tensor | None], arch: str,
    mask: dict[str, object], grad_logsumexp: Tensor | None = None, packed: Packed | None = None,
) -> list[Launch]:  # fmt: skip
    """The three launches that fill `gradients` by way of :func:`row_buffers`. `mask` is what
    :func:`attention_backward` is given; `rows` are all rows of grad_out and out as (B, H, Lq, D), or (1, H, Tq, D) of
    a packed batch."""
    grad_q, grad_k, grad_v = gradients
    whole, out = rows
    delta, empty_tiles, sums = buffers
    grid = empty_tiles.shape[0]
    inputs = {"grad_out": grad_out, "q": q, "k": k, "v": v}
    statistics = {"logsumexp": logsumexp, "delta": delta}
    plan = planned(
        ("delta", q.dtype, whole.shape, whole.stride(), out.stride()),
        lambda: Plan(f"attention delta {str(q.dtype)[6:]} d{padded_head_dim(q)}", grid, delta_arguments(whole, out)),
    )
    return [
        Launch(
            plan.name,
            _delta_kernel,
            plan.grid,
            {
                **plan.arguments, **statistics, "grad_out": whole, "out": out, "grad_logsumexp": grad_logsumexp,
                "empty_tiles": empty_tiles,
            },
            num_warps=4,
            num_stages=1,
        ),
        tile_launch(
            "grad_q", _grad_q_kernel, q, k, arch, inputs | {"grad_q": grad_q},
            statistics | {"sums": sums, "grad_logsumexp": grad_logsumexp}, mask, packed,
        ),
        tile_launch(
            "grad_kv", grad_kv_kernel, q, k, arch, inputs | {"grad_k": grad_k, "grad_v": grad_v},
            statistics | {"sums": sums, "empty_tiles": empty_tiles}, mask, packed,
        ),
    ]  # fmt: skip


@widen_bf16_if_interpreted(results=3)
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | int | None,
    zero_empty_rows: bool,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`~.attention.attention_forward` by Triton.

    Args:
        grad_out: (B, H, Lq, D), the gradient of out; any strides.
        q, k, v and the rest: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: (B, H, Lq) fp32, the gradient of logsumexp, or None. A row without keys takes none.

    Returns:
        Gradients of q (B, H, Lq, D), k and v (B, Hkv, Lk, D), in their dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in gradients)
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    mask = {
        "keep": keep, "key_keep": key_keep, "lengths": lengths, "bias": bias, "causal": causal, "scale": scale,
        "dropout_p": dropout_p, "seed": seed, "zero_empty_rows": zero_empty_rows,
    }  # fmt: skip
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*gradients, *row_buffers(grad_out, logsumexp, bias))
    run_call(("attention backward",), inputs, outputs, k.shape[2], mask, None, _backward_call)
    return _signed(gradients, scale)


def _backward_call(inputs, outputs, mask: dict[str, object], packed: Packed | None) -> list[Launch]:
    grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
    grad_out, q, k, v = map(within_reach, (grad_out, q, k, v))
    q, scale, _ = positive_scale(q, mask["scale"])
    tensors = grad_out, q, k, v, logsumexp, (grad_out, out), outputs[:3], outputs[3:]
    return backward_launches(*tensors, architecture_of(q), mask | {"scale": scale}, grad_logsumexp)


def _signed(gradients: tuple[Tensor, Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, where the kernels had q times the sign of the scale."""
    grad_q, grad_k, grad_v = gradients
    return (grad_q if scale > 0 else grad_q * (-1.0 if scale < 0 else 0.0)), grad_k, grad_v


@widen_bf16_if_interpreted(results=3)
def attention_packed_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | int | None,
    zero_empty_rows: bool,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`~.attention.attention_packed_forward` by the kernels of :func:`attention_backward`.

    Args:
        grad_out: (Tq, H, D), the gradient of out; any strides.
        q, k, v and the rest: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: (H, Tq) fp32, the gradient of logsumexp, or None.

    Returns:
        Gradients of q (Tq, H, D), k and v (Tk, Hkv, D), in their dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in gradients)
    B, total = cu_seqlens_q.shape[0] - 1, q.shape[0]
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    mask = packed_mask(causal, scale, dropout_p, seed, zero_empty_rows)

    def launches(inputs, outputs, mask: dict[str, object], packed: Packed | None) -> list[Launch]:
        grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
        q, scale, _ = positive_scale(q, mask["scale"])
        mask = mask | {"scale": scale}
        rows = packed_view(grad_out, 1, total), packed_view(out, 1, total)
        grad_out, q, grad_q = (packed_view(t, B, max_q) for t in (grad_out, q, outputs[0]))
        k, v, grad_k, grad_v = (packed_view(t, B, max_k) for t in (k, v, *outputs[1:3]))
        tensors = grad_out, q, k, v, logsumexp, rows, (grad_q, grad_k, grad_v), outputs[3:]
        return backward_launches(*tensors, architecture_of(q), mask, grad_logsumexp, packed)

    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*gradients, *row_buffers(grad_out.transpose(0, 1).unsqueeze(0), logsumexp, None))
    packed = Packed(cu_seqlens_q, cu_seqlens_k, total)
    name = "attention packed backward", max_q, max_k
    run_call(name, inputs, outputs, max_k, mask, packed, launches)
    return _signed(gradients, scale)


def compile_cases(arch: str) -> Iterator[Launch]:
    """The launches of every backward config of an architecture class."""
    for (q, logsumexp), mask, packed in example_tile_calls():
        buffers = row_buffers(q, logsumexp, mask["bias"])
        yield from backward_launches(q, q, q, q, logsumexp, (q, q), (q, q, q), buffers, arch, mask, None, packed)
