"""Loads and stores of tiles in the attention kernels, and the kernel arguments of a call."""

import triton
import triton.language as tl
from torch import Tensor

from ...attention_params import AttentionParams
from ..philox import PTX

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Maximum row stride, in elements. Tensors with larger strides are copied before a launch, so that offsets within a tile
# of at most 256 rows fit 32 bits.
WIDEST_STRIDE = 2**22

# Integers that change from call to call. Kernels are not specialised on the values of these integers (1, multiples of
# 16), so that a new length does not recompile. The constants UNIT and MASK_UNIT give the alignment instead.
RUNTIME_INTEGERS = (
    [
        f"{name}_{dim}"
        for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
        for dim in ("batch", "head", "row")
    ]
    + [f"{name}_{dim}" for name in ("keep", "bias") for dim in ("batch", "head", "query")]
    + ["key_keep_batch", "key_keep_head", "lengths_batch", "lengths_query"]
    + ["distance_batch", "distance_head", "distance_zero", "query_ids_batch", "key_ids_batch"]
    + ["heads", "group", "queries", "keys", "causal_offset", "window", "threshold"]
    + ["total_queries", "total_keys", "pairs", "map_batch", "map_head", "mask_batch", "mask_head", "mask_query"]
    + ["words", "tile_rows", "across", "head_stride", "row_stride", "tile_stride", "seed"]
    + ["batches_each", "heads_each", "query_tiles_each", "key_tiles_each", "parts", "steps"]
)


def jit(function):
    """`triton.jit` that specialises on none of the RUNTIME_INTEGERS."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in RUNTIME_INTEGERS if name in names])


@triton.jit
def at_head(base, batch, head, batch_stride, head_stride, UNIT: tl.constexpr):
    """Pointer to the data of one (batch, head); None for None."""
    if base is None:
        return
    else:
        return base + (batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride) * UNIT


@triton.jit
def at_row(base, batch, head, row, batch_stride, head_stride, row_stride, UNIT: tl.constexpr):
    """Pointer to one row of a (batch, head)."""
    return at_head(base, batch, head, batch_stride, head_stride, UNIT) + row * row_stride * UNIT


@triton.jit
def load_rows(
    base, start, end, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr
):
    """Load rows [start, start + ROWS) of a (rows, HEAD_DIM) matrix as (ROWS, BLOCK_D); zeros at or past `end`,
    HEAD_DIM."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    # One 64-bit scalar per tile; offsets within the tile fit 32 bits (see WIDEST_STRIDE), which need half the
    # registers.
    base += tl.cast(start, tl.int64) * stride * UNIT
    pointers = base + (row[:, None] * (stride.to(tl.int32) * UNIT) + dim[None, :])
    inside = (start + row < end)[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (dim < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_rows(
    base, tile, start, end, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store a tile, the inverse of :func:`load_rows`; memory outside the matrix is not written."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    base += tl.cast(start, tl.int64) * stride * UNIT
    pointers = base + (row[:, None] * (stride.to(tl.int32) * UNIT) + dim[None, :])
    inside = (start + row < end)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def row_products(a, b):
    """Dot products of the rows of two tiles (rows, BLOCK_D): fp32 (rows,).

    Each product is rounded before the sum. If the compiler fused products across lanes, lanes with the sum of one row
    would differ.
    """
    a = a.to(tl.float32)
    return tl.sum(tl.fma(a, b.to(tl.float32), tl.zeros_like(a)), 1)


@triton.jit
def factor_in_registers(x):
    """Force x to be computed at this point: for the first factor of a product in a kernel's loop.

    PTX requires a wgmma.fence between the instructions that write that factor and the product. LLVM does not know this
    dependency and may move arithmetic below the fence (triton-lang/triton#9433); ptxas then serialises the products. In
    Triton 3.7, LLVM does not move the inline assembly. Marking the assembly as impure would forbid the
    move, but then Triton does not pipeline some of the loops.
    """
    if PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def exponential(scores, shift, scale, BASE_E: tl.constexpr):
    """``exp(score - shift)``: scores and shift in base e, or raw scores (before `scale`) and a shift in base 2.

    Base 2 saves one operation. Base e is for biases: the lowest number of the dtype is a common bias, and would
    overflow when multiplied by log2(e).
    """
    if BASE_E:
        return tl.math.exp2((scores - shift) * LOG2E)
    else:
        return tl.math.exp2(scores * (scale * LOG2E) - shift)


@triton.jit
def any_true(flags):
    """Return True, as a scalar, if any element of a 1-D or 2-D tile is True."""
    return tl.max(flags.to(tl.int32)) > 0


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return (q times the sign of the scale, |scale| or 1): raw and scaled scores have the same row maximum only for a
    scale above 0."""
    if scale > 0:
        return q, scale
    sign = -1.0 if scale < 0 else 0.0
    return (q * sign).contiguous(), abs(scale) or 1.0


def with_32_bit_offsets(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if offsets within a tile could exceed 32 bits (see WIDEST_STRIDE)."""
    reach = 256 * t.stride(-2) + t.shape[-1] * t.stride(-1)
    return t.contiguous() if reach > 256 * WIDEST_STRIDE else t


def padded_head_dim(head_dim: int) -> int:
    """Head size in a kernel: head_dim rounded up to a power of two."""
    return max(32, 1 << (head_dim - 1).bit_length())


def bounded_offset(causal: int | None, Lq: int, Lk: int, reach: int = 0) -> int:
    """Causal offset for a kernel. Without a causal mask the offset is past the last key, so that the same program
    serves both cases. A kernel may add or subtract up to `reach`."""
    most = Lk + reach
    return most if causal is None else max(-Lq - reach, min(causal, most))


def bounded_window(window: int | None, Lq: int, Lk: int, reach: int = 0) -> int | None:
    """Window for a kernel; None if it excludes no key. `reach` is as for :func:`bounded_offset`."""
    return None if window is None or window <= 1 - Lq - reach else min(window, Lk + reach)


def tensor_arguments(**tensors: Tensor) -> dict[str, object]:
    """Kernel arguments of (B, H, L, D) tensors with last stride 1: each tensor and three strides in units of UNIT."""
    unit = 8 if all(stride % 8 == 0 for t in tensors.values() for stride in t.stride()[:3]) else 1
    arguments: dict[str, object] = {"UNIT": unit}
    for name, t in tensors.items():
        arguments[name] = t
        for dim, stride in zip(("batch", "head", "row"), t.stride()[:3], strict=True):
            arguments[f"{name}_{dim}"] = stride // unit
    return arguments


def bounds_arguments(params: AttentionParams, Lq: int, Lk: int) -> dict[str, object]:
    """Kernel arguments that bound the keys of each query."""
    lengths, packed = params.lengths, params.packed
    reach = max(Lq, Lk) if packed is not None and packed.bottom_right else 0
    return {
        "lengths": lengths, "lengths_batch": 0 if lengths is None else lengths.stride(0),
        "lengths_query": 0 if lengths is None or lengths.dim() == 1 else lengths.stride(1),
        "queries": Lq, "keys": Lk, "causal_offset": bounded_offset(params.causal, Lq, Lk, reach),
        "window": bounded_window(params.window, Lq, Lk, reach),
        "query_ids": params.query_ids, "query_ids_batch": batch_stride(params.query_ids),
        "key_ids": params.key_ids, "key_ids_batch": batch_stride(params.key_ids),
    }  # fmt: skip


def batch_stride(ids: Tensor | None) -> int:
    """Batch stride of (B|1, L); 0 for packed rows (T,) and for a row shared by all batches."""
    return 0 if ids is None or ids.dim() == 1 or ids.shape[0] == 1 else ids.stride(0)


def distance_arguments(distance_bias: Tensor | None, zero: int) -> dict[str, object]:
    """Kernel arguments of a bias by distance (B|1, H|1, distances) whose entry of distance 0 is `zero`."""
    strides = [0, 0]
    if distance_bias is not None:
        strides = [s if n > 1 else 0 for n, s in zip(distance_bias.shape[:2], distance_bias.stride()[:2], strict=True)]
    return {
        "distance_bias": distance_bias, "distance_zero": zero,
        "distance_batch": strides[0], "distance_head": strides[1],
    }  # fmt: skip


def changes_scores(params: AttentionParams) -> bool:
    """Return True if scores are more than scaled products, so that a kernel applies the mask to each tile."""
    return params.bias is not None or params.distance_bias is not None or params.softcap is not None


def sequence_arguments(params: AttentionParams, logsumexp: Tensor, stored: Tensor) -> dict[str, object]:
    """Kernel arguments of the sequence boundaries of a packed batch; None for a padded batch.

    Args:
        params: as given to the launcher.
        logsumexp: (B, H, Lq), or packed (H, Tq).
        stored: the keys as given to the launcher, (B, Hkv, Lk, D), or packed (Tk, Hkv, D).
    """
    packed = params.packed
    parts = "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "bias_starts"
    return {name: None if packed is None else getattr(packed, name) for name in parts} | {
        "BOTTOM_RIGHT": packed is not None and packed.bottom_right,
        "total_queries": logsumexp.shape[-1],
        "total_keys": stored.shape[0],
        "pairs": 0 if packed is None or params.bias is None else params.bias.shape[1],
    }


def mask_arguments(q: Tensor, k: Tensor, params: AttentionParams) -> dict[str, object]:
    """Kernel arguments of mask, scale and dropout, without dense masks, whose bits are in :mod:`.tile_map`. Size-1
    dimensions of a bias get stride 0."""
    bias, dropout_p = params.bias, params.dropout_p
    threshold = round(dropout_p * 65536)
    H, Lq, D = q.shape[1:]
    Hkv, Lk = k.shape[1:3]
    arguments = bounds_arguments(params, Lq, Lk)
    # Without such a part, a packed sequence has empty rows only if it has no keys; then the mean is 0 too.
    packed = params.packed
    emptying = arguments["window"] is not None or arguments["causal_offset"] < 0
    emptying = emptying or (packed is not None and packed.bottom_right and params.causal is not None)
    emptying = emptying or any(part is not None for part in (bias, params.distance_bias, params.query_ids))
    zero = Lq - 1
    if packed is not None:
        zero = (packed.max_seqlen_k if packed.bottom_right else packed.max_seqlen_q) - 1
    strides = [0, 0, 0, 0]
    if bias is not None and packed is not None:  # the kernel computes its rows
        strides = [0, bias.stride(0) if bias.shape[0] > 1 else 0, 0, 1]
    elif bias is not None:
        bias = with_32_bit_offsets(bias)
        strides = [s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True)]
    # Only reads of a bias use MASK_UNIT. Without a bias MASK_UNIT is constant, so that lengths do not recompile.
    aligned = bias is not None and packed is None and all(n % 16 == 0 for n in (Lk, *strides[:3]))
    unit = 16 if aligned else 1
    arguments |= {"MASK_UNIT": unit, "bias": bias, "bias_key": strides[3]}
    for dim, stride in zip(("batch", "head", "query"), strides[:3], strict=True):
        arguments[f"bias_{dim}"] = stride // unit
    zero_empty_rows = params.zero_empty_rows or params.sinks is not None
    return arguments | distance_arguments(params.distance_bias, zero) | {
        "softcap": params.softcap,
        "sinks": params.sinks,
        "seed": params.seed if dropout_p > 0.0 else None,
        "threshold": threshold,
        "rescale": 1.0 / (1.0 - dropout_p) if threshold < 65536 else 0.0,
        "scale": params.scale,
        "heads": H,
        "group": H // Hkv,
        "HEAD_DIM": D,
        "BLOCK_D": padded_head_dim(D),
        "ZERO_EMPTY_ROWS": zero_empty_rows or not (params.packed is None or emptying),
    }  # fmt: skip
