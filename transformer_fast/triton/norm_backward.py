"""LayerNorm, Norm and RMSNorm, backward: one pass over gradient and rows, which also sums the weight gradients.

With g = dy * weight and h = (x - mean) * rstd all norms have dx = rstd * (g - average(g) - h * slope):

    layer: slope = sum(g h) / d
    std:   slope = sum(g h) / sqrt(sum(h h) * (d - 1)), which holds for any eps; 0 for a constant row, where h = 0
    rms:   the slope of layer; without mean and average(g)

A bounded number of programs shares the rows; each keeps a partial sum of the weight gradients in registers and stores
it once, as a row of an fp32 buffer. A last kernel sums the buffer in a fixed order. Without atomics, two runs agree bit
for bit.

Rows of up to 8192 columns stay in registers from the averages to the gradients. A wider row is cut into slices of up to
16,384 columns, with one program per slice. The sums of a slice take 64 of a thread's 128 registers. So the row is read
again after the averages, and every program of a row reads the whole row for the averages. Memory traffic is still that
of one pass: programs of one row run at the same time, and their rows (65,536 columns of bf16: 256 KB of dy and x, 9 MB
on a whole H100) fit in its L2 cache. A 16-bit element costs 6 bytes of memory traffic, and 10 bytes of L2 traffic with
one slice, plus 4 for each further slice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import norm_config
from .launch_cache import LaunchCall, run_kept
from .launcher import Launch, blocks_of, contiguous, multiprocessors_of
from .norm import as_rows, dropout_arguments, load_tile
from .philox import elementwise_keep_tile, load_seed


@triton.jit
def _slope(gh, hh, d, KIND: tl.constexpr):
    if KIND == "std":
        return tl.where(hh > 0.0, gh / tl.sqrt(tl.where(hh > 0.0, hh * (d - 1), 1.0)), 0.0)
    else:
        return gh / d


@triton.jit
def _store_gradients(
    gradient, grad_summed, grad_x, grad_residual, rows, start, columns, inside, grad_summed_stride, d,
    key_low, key_high, threshold, rescale, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add the gradient of the residual path, and store the total for the residual and, through dropout, for x."""
    offsets = rows[:, None] * d + columns[None, :]
    if grad_summed is not None:
        gradient += load_tile(grad_summed, rows, columns, inside, grad_summed_stride)
    if DROPOUT:
        tl.store(grad_residual + offsets, gradient.to(grad_residual.dtype.element_ty), mask=inside)
        keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, gradient.shape[0], gradient.shape[1])
        gradient = tl.where(keep, gradient * rescale, 0.0)
    tl.store(grad_x + offsets, gradient.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold"])
def _backward_kernel(
    dy, grad_summed, x, weight, mean, rstd, grad_x, grad_residual, partials, seed,
    n_rows, d, dy_stride, grad_summed_stride, x_stride, threshold, rescale,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of narrow rows: a program takes every num_programs-th tile of rows; partials is (2,
    programs, d), (1, programs, d) for rms, or None."""
    DROPOUT: tl.constexpr = seed is not None
    key_low, key_high = load_seed(seed) if DROPOUT else (0, 0)
    columns = tl.arange(0, BLOCK_COLUMNS)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0), disable_licm=True):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (rows < n_rows)[:, None] & (columns < d)[None, :]
        dy_tile = load_tile(dy, rows, columns, inside, dy_stride)
        x_tile = load_tile(x, rows, columns, inside, x_stride)
        if KIND != "rms":
            row_mean = tl.load(mean + rows, mask=rows < n_rows, other=0.0)
        row_rstd = tl.load(rstd + rows, mask=rows < n_rows, other=0.0)
        if KIND == "rms":
            h = x_tile * row_rstd[:, None]
        else:
            h = tl.where(inside, (x_tile - row_mean[:, None]) * row_rstd[:, None], 0.0)
        g = dy_tile
        if weight is not None:
            g *= tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
        slope = _slope(tl.sum(g * h, 1), tl.sum(h * h, 1), d, KIND)
        if partials is not None:
            weight_sum += dy_tile * h
            if KIND != "rms":
                bias_sum += dy_tile
        if KIND == "rms":
            gradient = (g - h * slope[:, None]) * row_rstd[:, None]
        else:
            gradient = (g - (tl.sum(g, 1) / d)[:, None] - h * slope[:, None]) * row_rstd[:, None]
        _store_gradients(
            gradient, grad_summed, grad_x, grad_residual, rows, 0, columns, inside, grad_summed_stride, d,
            key_low, key_high, threshold, rescale, DROPOUT,
        )  # fmt: skip
    if partials is not None:
        partials += tl.program_id(0).to(tl.int64) * d + columns
        tl.store(partials, tl.sum(weight_sum, 0), mask=columns < d)
        if KIND != "rms":
            tl.store(partials + tl.num_programs(0).to(tl.int64) * d, tl.sum(bias_sum, 0), mask=columns < d)


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold"])
def _backward_wide_kernel(
    dy, grad_summed, x, weight, mean, rstd, grad_x, grad_residual, partials, seed,
    n_rows, d, dy_stride, grad_summed_stride, x_stride, threshold, rescale,
    KIND: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of rows wider than BLOCK_COLUMNS: a program owns a slice of BLOCKS column blocks.

    The program reads the whole row for the averages, then its slice again, from a cache, for the gradients.
    """
    DROPOUT: tl.constexpr = seed is not None
    key_low, key_high = load_seed(seed) if DROPOUT else (0, 0)
    slices = tl.cdiv(d, BLOCKS * BLOCK_COLUMNS)
    programs = tl.num_programs(0) // slices
    program = tl.program_id(0) // slices
    first = tl.program_id(0) % slices * (BLOCKS * BLOCK_COLUMNS)
    zeros = tl.zeros((1, BLOCK_COLUMNS), tl.float32)
    weight_sums = (zeros,) * BLOCKS
    bias_sums = (zeros,) * BLOCKS
    for row in tl.range(program, n_rows, programs, disable_licm=True):
        rows = tl.cast(row, tl.int64) + tl.arange(0, 1)
        row_mean = tl.load(mean + rows)[:, None] if KIND != "rms" else 0.0
        row_rstd = tl.load(rstd + rows)[:, None]
        g_sum = zeros
        gh_sum = zeros
        hh_sum = zeros
        for start in tl.range(0, d, BLOCK_COLUMNS, num_stages=STAGES):
            _, g, h, _, _ = _block_of_row(
                dy, x, weight, rows, row_mean, row_rstd, start, dy_stride, x_stride, d, BLOCK_COLUMNS
            )
            g_sum += g
            gh_sum += g * h
            hh_sum += h * h
        average = (tl.sum(g_sum, 1) / d)[:, None] if KIND != "rms" else 0.0
        slope = _slope(tl.sum(gh_sum, 1), tl.sum(hh_sum, 1), d, KIND)[:, None]
        new_weight_sums = ()
        new_bias_sums = ()
        for block in tl.static_range(BLOCKS):
            # Adds 0, so that the compiler does not hold addresses and masks of blocks in registers from row to row.
            start = tl.multiple_of(first + block * BLOCK_COLUMNS + tl.minimum(row, 0), 16)
            dy_tile, g, h, columns, inside = _block_of_row(
                dy, x, weight, rows, row_mean, row_rstd, start, dy_stride, x_stride, d, BLOCK_COLUMNS
            )
            _store_gradients(
                (g - average - h * slope) * row_rstd, grad_summed, grad_x, grad_residual, rows, start, columns, inside,
                grad_summed_stride, d, key_low, key_high, threshold, rescale, DROPOUT,
            )  # fmt: skip
            new_weight_sums += (weight_sums[block] + dy_tile * h,)
            if KIND != "rms":
                new_bias_sums += (bias_sums[block] + dy_tile,)
        weight_sums = new_weight_sums
        if KIND != "rms":
            bias_sums = new_bias_sums
    if partials is not None:
        rows = tl.cast(program, tl.int64) + tl.arange(0, 1)
        for block in tl.static_range(BLOCKS):
            columns = first + block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            offsets = rows[:, None] * d + columns[None, :]
            inside = (columns < d)[None, :]
            tl.store(partials + offsets, weight_sums[block], mask=inside)
            if KIND != "rms":
                tl.store(partials + tl.cast(programs, tl.int64) * d + offsets, bias_sums[block], mask=inside)


@triton.jit
def _block_of_row(
    dy, x, weight, rows, row_mean, row_rstd, start, dy_stride, x_stride, d, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Load dy, g and h of one block of columns, fp32 (1, BLOCK_COLUMNS), 0 outside; also return the columns and their
    mask."""
    columns = start + tl.arange(0, BLOCK_COLUMNS)
    inside = (columns < d)[None, :]
    dy_tile = load_tile(dy, rows, columns, inside, dy_stride)
    h = tl.where(inside, (load_tile(x, rows, columns, inside, x_stride) - row_mean) * row_rstd, 0.0)
    g = dy_tile
    if weight is not None:
        g *= tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
    return dy_tile, g, h, columns, inside


@triton.jit(do_not_specialize=["programs"])
def _sum_partials_kernel(
    partials, grad_weight, grad_bias, programs, d, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum fp32 partials (2, programs, d) to the two gradients, in the gradients' dtypes."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, programs, BLOCK_ROWS):
        rows = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_ROWS)
        inside = (rows < programs)[:, None] & (columns < d)[None, :]
        if grad_weight is not None:
            weight_sum += load_tile(partials, rows, columns, inside, d)
        if grad_bias is not None:
            bias_sum += load_tile(partials, rows + programs, columns, inside, d)
    if grad_weight is not None:
        tl.store(grad_weight + columns, tl.sum(weight_sum, 0).to(grad_weight.dtype.element_ty), mask=columns < d)
    if grad_bias is not None:
        tl.store(grad_bias + columns, tl.sum(bias_sum, 0).to(grad_bias.dtype.element_ty), mask=columns < d)


def sum_of_partials(partials: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None, programs: int) -> Launch:
    """Launch that sums fp32 partials (2, programs, d) to the gradients of weight and bias, or (programs, d) to that of
    the weight."""
    config, d = norm_config("sum", programs), partials.shape[-1]
    arguments = {
        "partials": partials, "grad_weight": grad_weight, "grad_bias": grad_bias, "programs": programs, "d": d,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns,
    }  # fmt: skip
    sums = " and ".join(name for name, t in (("weight", grad_weight), ("bias", grad_bias)) if t is not None)
    name = f"sum of partials {config.block_rows}x{config.block_columns}, {sums}"
    grid = blocks_of(d, config.block_columns)
    return Launch(name, _sum_partials_kernel, grid, arguments, config.num_warps, config.num_stages)


def slices_of(d: int) -> tuple[int, int]:
    """Return (slices, blocks): a row of d columns is cut into `slices` slices of `blocks` blocks, one program per
    slice."""
    config = norm_config("backward", d)
    blocks = blocks_of(d, config.block_columns)
    slices = blocks_of(blocks, config.most_blocks)
    return slices, blocks_of(blocks, slices)


def sharing_programs(n_rows: int, d: int, multiprocessors: int) -> int:
    """Number of programs that share the rows of a slice, each with fp32 partial sums of the weight gradients."""
    config = norm_config("backward", d)
    most = multiprocessors * config.programs_per_multiprocessor // slices_of(d)[0]
    return min(blocks_of(n_rows, config.block_rows), max(most, 1))


def backward_launches(
    dy: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    grad_x: Tensor, grad_residual: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    partials: Tensor | None, kind: str, dropout_p: float, seed: Tensor | int | None, programs: int,
) -> list[Launch]:  # fmt: skip
    """Launches that fill the four gradients of (rows, d) matrices, in order. `partials`, for gradients of weight or
    bias, is fp32 (2, programs, d), or (1, programs, d) for rms."""
    n_rows, d = x.shape
    config = norm_config("backward", d)
    slices, blocks = slices_of(d)
    arguments = {
        "dy": dy, "grad_summed": grad_summed, "x": x, "weight": weight, "mean": mean, "rstd": rstd, "grad_x": grad_x,
        "grad_residual": grad_residual, "partials": partials, "n_rows": n_rows, "d": d, "dy_stride": dy.stride(0),
        "grad_summed_stride": 0 if grad_summed is None else grad_summed.stride(0), "x_stride": x.stride(0),
        "KIND": kind, "BLOCK_COLUMNS": config.block_columns, **dropout_arguments(dropout_p, seed),
    }  # fmt: skip
    name = f"{kind} norm backward {config.block_rows}x{config.block_columns} {x.dtype}"
    kernel = _backward_kernel if blocks == 1 else _backward_wide_kernel
    if blocks == 1:
        arguments["BLOCK_ROWS"] = config.block_rows
    else:
        arguments |= {"BLOCKS": blocks, "STAGES": config.num_stages}
        name += f", slices of {blocks} blocks"
    launches = [Launch(name, kernel, slices * programs, arguments, config.num_warps, config.num_stages)]
    if partials is not None:
        launches.append(sum_of_partials(partials, grad_weight, grad_bias, programs))
    return launches


def norm_backward(
    dy: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, kind: str,
    dropout_p: float, seed: Tensor | int | None, has_bias: bool, dtype_of_x: torch.dtype | None = None,
    call: LaunchCall | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of :func:`.norm.norm_forward`, by Triton.

    Args:
        dy: (..., d), gradient of the norm; any strides.
        grad_summed: gradient of residual + dropout(x), or None.
        x: (..., d), the rows that were normed: x, or residual + dropout(x).
        weight: (d,) or None.
        mean, rstd: (rows,) fp32, from the forward; the mean is not read for "rms".
        kind, dropout_p, seed: values of the forward.
        has_bias: True computes the gradient of a bias; "rms" has no bias.
        dtype_of_x: the forward's, if it is not that of the rows; only with dropout.
        call: key that the launches are kept with.

    Returns:
        grad_x (..., d); grad_residual (..., d), or None without dropout, where it equals grad_x; grad_weight and
        grad_bias (d,) in weight's dtype (x's without a weight), or None.
    """
    d = x.shape[-1]
    dtype = x.dtype if weight is None else weight.dtype
    grad_x = torch.empty(x.shape, dtype=dtype_of_x or x.dtype, device=x.device)
    grad_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dropout_p > 0.0 else None
    fill = torch.empty if x.numel() > 0 else torch.zeros
    grad_weight = None if weight is None else fill((d,), dtype=dtype, device=x.device)
    grad_bias = fill((d,), dtype=dtype, device=x.device) if has_bias else None
    if x.numel() > 0:
        n_rows = x.numel() // d
        programs = sharing_programs(n_rows, d, multiprocessors_of(x))
        summing = weight is not None or has_bias
        sums = 1 if kind == "rms" else 2
        partials = torch.empty((sums, programs, d), dtype=torch.float32, device=x.device) if summing else None
        weight = contiguous(weight)
        outputs = grad_x, grad_residual, grad_weight, grad_bias, partials
        run_kept(
            call,
            outputs,
            lambda: backward_launches(
                as_rows(dy), as_rows(grad_summed), as_rows(x), weight, mean, rstd, *outputs,
                kind, dropout_p, seed, programs,
            ),
        )  # fmt: skip
    return grad_x, grad_residual, grad_weight, grad_bias
