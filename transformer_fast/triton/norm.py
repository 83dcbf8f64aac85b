"""LayerNorm, Norm and RMSNorm over the last dimension, forward: residual + dropout + norm in one pass.

    layer: y = (x - mean) / sqrt(var + eps) * weight + bias     (variance over d)
    std:   y = (x - mean) / (std + eps) * weight + bias         (variance over d - 1)
    rms:   y = x / sqrt(average(x x) + eps) * weight

A program holds a tile of whole rows in registers, reads the rows once and writes the results once. For a row wider than
a tile, one program loops over blocks of columns. Statistics are fp32, in two passes: mean, then centred squares. For
rms one pass sums the squares.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import norm_config
from .launch_cache import LaunchCall, run_kept
from .launcher import Launch, contiguous
from .philox import elementwise_keep_tile, load_seed


@triton.jit
def load_tile(base, rows, columns, inside, stride):
    """Load a tile of a matrix with unit column stride as fp32; 0 outside."""
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _summed_tile(
    x, residual, summed, rows, start, columns, inside, x_stride, residual_stride, d,
    key_low, key_high, threshold, rescale, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Rows to be normed: x, or residual + dropout(x), which is also stored, with the rounding of the stored dtype."""
    tile = load_tile(x, rows, columns, inside, x_stride)
    if residual is not None:
        if DROPOUT:
            keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, tile.shape[0], tile.shape[1])
            tile = tl.where(keep, tile * rescale, 0.0)
        tile += load_tile(residual, rows, columns, inside, residual_stride)
        rounded = tile.to(summed.dtype.element_ty)
        tl.store(summed + rows[:, None] * d + columns[None, :], rounded, mask=inside)
        tile = rounded.to(tl.float32)
    return tile


@triton.jit
def _mean(tile, inside, count):
    """Mean per row, corrected by the mean of the remainder: exact for constant rows and accurate for large offsets."""
    mean = tl.sum(tile, 1) / count
    return mean + tl.sum(tl.where(inside, tile - mean[:, None], 0.0), 1) / count


@triton.jit
def _scale(squares, d, eps, KIND: tl.constexpr):
    """Factor of a row from the sum of its squares (centred, except for rms)."""
    if KIND == "std":
        return 1.0 / (tl.sqrt(squares / (d - 1)) + eps)
    else:
        return 1.0 / tl.sqrt(squares / d + eps)


@triton.jit
def _store_normed(out, centred, rstd, weight, bias, rows, columns, inside, d):
    normed = centred * rstd[:, None]
    if weight is not None:
        normed *= tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        normed += tl.load(bias + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows[:, None] * d + columns[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold"])
def _forward_kernel(
    x, residual, weight, bias, out, summed, mean_out, rstd_out, seed,
    n_rows, d, x_stride, residual_stride, eps, threshold, rescale,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Norm rows of up to BLOCK_COLUMNS columns, held in registers."""
    DROPOUT: tl.constexpr = seed is not None
    key_low, key_high = load_seed(seed) if DROPOUT else (0, 0)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < d)[None, :]
    tile = _summed_tile(
        x, residual, summed, rows, 0, columns, inside, x_stride, residual_stride, d,
        key_low, key_high, threshold, rescale, DROPOUT,
    )  # fmt: skip
    if KIND == "rms":
        centred = tile
    else:
        mean = _mean(tile, inside, d)
        centred = tl.where(inside, tile - mean[:, None], 0.0)
    rstd = _scale(tl.sum(centred * centred, 1), d, eps, KIND)
    if KIND != "rms":
        tl.store(mean_out + rows, mean, mask=rows < n_rows)
    tl.store(rstd_out + rows, rstd, mask=rows < n_rows)
    _store_normed(out, centred, rstd, weight, bias, rows, columns, inside, d)


@triton.jit(do_not_specialize=["seed", "threshold"])
def _forward_wide_kernel(
    x, residual, weight, bias, out, summed, mean_out, rstd_out, seed,
    d, x_stride, residual_stride, eps, threshold, rescale,
    KIND: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Norm one row of any width in three loops over its columns (two for rms); only the first loop reads from
    memory."""
    DROPOUT: tl.constexpr = seed is not None
    key_low, key_high = load_seed(seed) if DROPOUT else (0, 0)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    # Sums start from the mean of the first block, so that a constant row sums to exactly zero.
    shift = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, BLOCK_COLUMNS), tl.float32)
    for start in range(0, d, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = (columns < d)[None, :]
        tile = _summed_tile(
            x, residual, summed, rows, start, columns, inside, x_stride, residual_stride, d,
            key_low, key_high, threshold, rescale, DROPOUT,
        )  # fmt: skip
        if KIND == "rms":
            sums += tile * tile
        else:
            if start == 0:
                shift = _mean(tile, inside, BLOCK_COLUMNS)
            sums += tl.where(inside, tile - shift[:, None], 0.0)
    mean = shift if KIND == "rms" else shift + tl.sum(sums, 1) / d  # rms has no mean: 0

    source = x if residual is None else summed
    stride = x_stride if residual is None else d
    if residual is not None:
        tl.debug_barrier()  # the loops below read values that other threads of this program stored
    if KIND == "rms":
        squares = sums
    else:
        squares = tl.zeros((1, BLOCK_COLUMNS), tl.float32)
        for start in range(0, d, BLOCK_COLUMNS):
            columns = start + tl.arange(0, BLOCK_COLUMNS)
            inside = (columns < d)[None, :]
            centred = tl.where(inside, load_tile(source, rows, columns, inside, stride) - mean[:, None], 0.0)
            squares += centred * centred
    rstd = _scale(tl.sum(squares, 1), d, eps, KIND)
    if KIND != "rms":
        tl.store(mean_out + rows, mean)
    tl.store(rstd_out + rows, rstd)

    for start in range(0, d, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = (columns < d)[None, :]
        centred = load_tile(source, rows, columns, inside, stride) - mean[:, None]
        _store_normed(out, centred, rstd, weight, bias, rows, columns, inside, d)


def as_rows(x: Tensor | None) -> Tensor | None:
    """View as (rows, d) with unit stride along d, or copy if the strides allow no view."""
    if x is None:
        return None
    d = x.shape[-1]
    x = x if d == 1 or x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(x.numel() // d, d)


def dropout_arguments(p: float, seed: Tensor | int | None) -> dict[str, object]:
    """Kernel arguments of the dropout."""
    return {
        "seed": seed if p > 0.0 else None,
        "threshold": round(p * 65536),
        "rescale": 1.0 / (1.0 - p) if p < 1.0 else 0.0,
    }


def forward_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, out: Tensor,
    summed: Tensor | None, mean: Tensor | None, rstd: Tensor, eps: float, kind: str, dropout_p: float,
    seed: Tensor | int | None,
) -> Launch:  # fmt: skip
    """Launch that norms the (rows, d) matrix x into out."""
    n_rows, d = x.shape
    config = norm_config("forward", d)
    arguments = {
        "x": x, "residual": residual, "weight": weight, "bias": bias, "out": out, "summed": summed,
        "mean_out": mean, "rstd_out": rstd, "d": d, "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "eps": eps, "KIND": kind, "BLOCK_COLUMNS": config.block_columns, **dropout_arguments(dropout_p, seed),
    }  # fmt: skip
    name = f"{kind} norm forward {config.block_rows}x{config.block_columns} {x.dtype}"
    if d > config.block_columns:
        return Launch(f"{name} wide", _forward_wide_kernel, n_rows, arguments, config.num_warps, config.num_stages)
    arguments |= {"n_rows": n_rows, "BLOCK_ROWS": config.block_rows}
    grid = triton.cdiv(n_rows, config.block_rows)
    return Launch(name, _forward_kernel, grid, arguments, config.num_warps, config.num_stages)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str,
    dropout_p: float, seed: Tensor | int | None, call: LaunchCall | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Norm of x, or of residual + dropout(x), by Triton.

    Args:
        x: (..., d), fp32, fp16 or bf16; any strides.
        residual: x's shape, fp32, fp16 or bf16, or None (then dropout_p is 0).
        weight, bias: (d,), any float dtype, or None; "rms" has no bias.
        eps, kind: as in the formulas above; "std" needs d > 1.
        dropout_p, seed: dropout of x, drawn by :mod:`.philox`; seed an int or int64 (1,) on x's device, or None.
        call: key that the launches are kept with.

    Returns:
        out (..., d); residual + dropout(x) (..., d), or None without a residual; mean and the factor applied, (rows,)
        fp32; "rms" has no mean, but None. The first two have the residual's dtype, if there is one.
    """
    out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    summed = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    n_rows = x.numel() // x.shape[-1]
    rstd = torch.empty((n_rows,), dtype=torch.float32, device=x.device)
    mean = None if kind == "rms" else torch.empty((n_rows,), dtype=torch.float32, device=x.device)
    outputs = out, summed, mean, rstd
    if n_rows > 0:
        run_kept(
            call,
            outputs,
            lambda: [
                forward_launch(
                    as_rows(x), as_rows(residual), contiguous(weight), contiguous(bias), *outputs,
                    eps, kind, dropout_p, seed,
                )
            ],
        )  # fmt: skip
    return outputs
