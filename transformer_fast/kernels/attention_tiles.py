"""What the attention kernels share: reading tiles, masking scores, and packing a call's arguments.

Every part of a mask that is a bound on the key number - lengths, causal, the end of the keys - is folded
into one number a query, its limit: key j is visible iff ``j < limit``. So a tile is full, partial or empty by
comparing two integers, and only what has a value per (query, key) - keep masks, additive bias - is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Integers that change from call to call. Not specialising on their values (1, multiples of 16) is what keeps a new
# length from compiling anything; alignment is told by the constants UNIT and MASK_UNIT instead.
RUNTIME_INTEGERS = (
    [f"{name}_{dim}" for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v") for dim in
     ("batch", "head", "row")]
    + [f"{name}_{dim}" for name in ("keep", "bias") for dim in ("batch", "head", "query")]
    + ["key_keep_batch", "key_keep_head", "lengths_batch", "lengths_query"]
    + ["heads", "group", "queries", "keys", "causal_offset", "threshold"]
)


def jit(function):
    """`triton.jit` that specialises on none of the RUNTIME_INTEGERS."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in RUNTIME_INTEGERS if name in names])


@triton.jit
def at_head(base, batch, head, batch_stride, head_stride, UNIT: tl.constexpr):
    """Pointer to what belongs to one (batch, head), or None for a tensor that is not there."""
    if base is None:
        return base
    else:
        return base + (batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride) * UNIT


@triton.jit
def load_rows(
    base, start, end, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + ROWS) of a (rows, HEAD_DIM) matrix; zeros at or past `end` (if GUARDED) and HEAD_DIM."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    # The tile's own offsets do not change from tile to tile; only this scalar does.
    base += tl.cast(start, tl.int64) * stride * UNIT
    pointers = base + row.to(tl.int64)[:, None] * stride * UNIT + dim[None, :]
    if GUARDED:
        inside = (start + row < end)[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (dim < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base, tile, start, end, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The inverse of :func:`load_rows`, always guarded."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    base += tl.cast(start, tl.int64) * stride * UNIT
    pointers = base + row.to(tl.int64)[:, None] * stride * UNIT + dim[None, :]
    inside = (start + row < end)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_limits(rows, batch, lengths, lengths_batch, lengths_query, causal_offset, keys):
    """How many keys each of these queries may see at most: the first key past length, diagonal or end."""
    limit = tl.minimum(rows + causal_offset + 1, keys)
    if lengths is not None:
        row = batch.to(tl.int64) * lengths_batch + rows.to(tl.int64) * lengths_query
        limit = tl.minimum(limit, tl.load(lengths + row))
    return limit


@triton.jit
def mask_scores(
    scores, scale, rows, start, limit,
    keep, keep_query, keep_key, key_keep, key_keep_key, bias, bias_query, bias_key,
    KEYS: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Apply every part of the mask to one tile of raw scores.

    Returns (scores, allowed): with a bias, the scores are scaled and the bias is added (see :func:`exponent`).
    """
    column = start + tl.arange(0, KEYS)
    allowed = column[None, :] < limit[:, None]
    wide_rows = rows.to(tl.int64)[:, None] * MASK_UNIT
    wide_columns = column.to(tl.int64)[None, :]
    if key_keep is not None:
        visible = column < tl.max(limit, 0)
        allowed = allowed & (tl.load(key_keep + column.to(tl.int64) * key_keep_key, mask=visible, other=0) != 0)[None, :]
    if keep is not None:
        pointers = keep + wide_rows * keep_query + wide_columns * keep_key
        allowed = allowed & (tl.load(pointers, mask=column[None, :] < limit[:, None], other=0) != 0)
    if bias is not None:
        pointers = bias + wide_rows * bias_query + wide_columns * bias_key
        added = tl.load(pointers, mask=column[None, :] < limit[:, None], other=float("-inf")).to(tl.float32)
        allowed = allowed & (added != float("-inf"))
        scores = scores * scale + added
    return scores, allowed


@triton.jit
def exponential(scores, shift, scale, BIASED: tl.constexpr):
    """``exp(score - shift)`` in base 2: shift is in base 2 and scores are raw, or, with a bias, both are natural.

    (A bias of the type's lowest number is common, and times log2(e) it would overflow.)
    """
    if BIASED:
        return tl.math.exp2((scores - shift) * LOG2E)
    else:
        return tl.math.exp2(scores * (scale * LOG2E) - shift)


@triton.jit
def any_true(flags):
    """Whether any element of a 1-D or 2-D tile is True, as a scalar."""
    return tl.max(flags.to(tl.int32)) > 0


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """(q * sign, |scale| or 1, sign): the row maximum of raw scores is that of scaled ones only if scale > 0."""
    if scale > 0:
        return q, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return (q * sign).contiguous(), abs(scale) or 1.0, sign


def empty_like_heads(q: Tensor, rows: int | None = None, heads: int | None = None) -> Tensor:
    """Uninitialised (B, heads, rows, D) with q's memory order where that is a layer's: (B, rows, heads, D)."""
    B, H, L, D = q.shape
    heads, rows = heads or H, L if rows is None else rows
    if not q.is_contiguous() and q.transpose(1, 2).is_contiguous():
        return torch.empty((B, rows, heads, D), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((B, heads, rows, D), dtype=q.dtype, device=q.device)


def tensor_arguments(**tensors: Tensor) -> dict[str, object]:
    """Kernel arguments of (B, H, L, D) tensors with last stride 1: each tensor and three strides in units of UNIT."""
    unit = 8 if all(stride % 8 == 0 for t in tensors.values() for stride in t.stride()[:3]) else 1
    arguments: dict[str, object] = {"UNIT": unit}
    for name, t in tensors.items():
        arguments[name] = t
        for dim, stride in zip(("batch", "head", "row"), t.stride()[:3], strict=True):
            arguments[f"{name}_{dim}"] = stride // unit
    return arguments


def mask_arguments(
    q: Tensor,
    k: Tensor,
    *,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    zero_empty_rows: bool,
) -> dict[str, object]:
    """Kernel arguments that say what is masked, scaled and dropped. Size-1 dimensions of a mask get stride 0."""
    B, H, Lq, D = q.shape
    Hkv, Lk = k.shape[1:3]

    def strides(t: Tensor | None) -> list[int]:
        return [0, 0, 0, 0] if t is None else [s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True)]

    keep_strides, key_keep_strides, bias_strides = strides(keep), strides(key_keep), strides(bias)
    unit = 16 if all(s % 16 == 0 for s in keep_strides[:3] + bias_strides[:3]) else 1
    arguments: dict[str, object] = {"MASK_UNIT": unit, "keep": keep, "key_keep": key_keep, "bias": bias}
    for name, values in (("keep", keep_strides), ("bias", bias_strides)):
        for dim, stride in zip(("batch", "head", "query"), values[:3], strict=True):
            arguments[f"{name}_{dim}"] = stride // unit
        arguments[f"{name}_key"] = values[3]
    arguments |= {
        "key_keep_batch": key_keep_strides[0],
        "key_keep_head": key_keep_strides[1],
        "key_keep_key": key_keep_strides[3],
        "lengths": lengths,
        "lengths_batch": 0 if lengths is None else lengths.stride(0),
        "lengths_query": 0 if lengths is None or lengths.dim() == 1 else lengths.stride(1),
        "seed": seed if dropout_p > 0.0 else None,
        "threshold": round(dropout_p * 65536),
        "rescale": 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
        "scale": scale,
        "heads": H,
        "group": H // Hkv,
        "queries": Lq,
        "keys": Lk,
        # An offset past the last key lets every query see every key: no mask is the same program as causal.
        "causal_offset": Lk if causal is None else max(-Lq, min(causal, Lk)),
        "HEAD_DIM": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "ZERO_EMPTY_ROWS": zero_empty_rows,
    }
    return arguments
