"""y = [residual +] dropout([relu] (x [+ bias])) and its backward: one read and one write; each kernel draws the mask.

The backward also sums the gradient of the bias. A bounded number of programs shares the rows of each stripe of columns,
and each program keeps its partial sum in registers. A last kernel adds the partial sums in a fixed order. Without
atomics, two runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import dropout_config
from .launch_cache import LaunchCall, run_kept
from .launcher import Launch, blocks_of, contiguous, multiprocessors_of
from .norm import dropout_arguments
from .norm_backward import sum_of_partials
from .philox import elementwise_keep_tile, load_seed


@triton.jit
def _place(n_rows, d, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Tile of this program: row numbers, first column, offsets, and a mask of existing elements."""
    blocks = tl.cdiv(d, BLOCK_COLUMNS)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = (tl.program_id(0) % blocks) * BLOCK_COLUMNS
    columns = start + tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < d)[None, :]
    return rows, start, rows[:, None] * d + columns[None, :], inside


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold"])
def _forward_kernel(
    x, bias, residual, out, seed, n_rows, d, threshold, rescale,
    RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, start, offsets, inside = _place(n_rows, d, BLOCK_ROWS, BLOCK_COLUMNS)
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        tile += tl.load(bias + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
    if RELU:
        tile = tl.where(tile < 0.0, 0.0, tile)  # a NaN passes, as in torch.relu
    if seed is not None:
        key_low, key_high = load_seed(seed)
        keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, BLOCK_ROWS, BLOCK_COLUMNS)
        tile = tl.where(keep, tile * rescale, 0.0)
    if residual is not None:
        tile += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(grad_out, y, seed, rows, start, offsets, inside, threshold, rescale):
    """The fp32 gradient of a tile of x; 0 outside."""
    tile = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    if y is not None:  # after a ReLU the output is positive exactly where the input is positive and kept
        keep = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32) > 0.0
        return tl.where(keep, tile * rescale, 0.0)
    elif seed is not None:
        key_low, key_high = load_seed(seed)
        keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, tile.shape[0], tile.shape[1])
        return tl.where(keep, tile * rescale, 0.0)
    else:
        return tile


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold"])
def _backward_kernel(
    grad_out, y, grad_x, seed, n_rows, d, threshold, rescale, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    rows, start, offsets, inside = _place(n_rows, d, BLOCK_ROWS, BLOCK_COLUMNS)
    tile = _gradient(grad_out, y, seed, rows, start, offsets, inside, threshold, rescale)
    tl.store(grad_x + offsets, tile.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "n_rows", "threshold", "programs"])
def _backward_bias_kernel(
    grad_out, y, grad_x, partials, seed, n_rows, d, threshold, rescale, programs,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the bias gradient: a program owns a stripe of columns and takes every programs-th tile of rows; partials is
    (programs, d)."""
    start = (tl.program_id(0) // programs) * BLOCK_COLUMNS
    program = tl.program_id(0) % programs
    columns = start + tl.arange(0, BLOCK_COLUMNS)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_ROWS), programs):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (rows < n_rows)[:, None] & (columns < d)[None, :]
        offsets = rows[:, None] * d + columns[None, :]
        gradient = _gradient(grad_out, y, seed, rows, start, offsets, inside, threshold, rescale)
        tl.store(grad_x + offsets, gradient.to(grad_x.dtype.element_ty), mask=inside)
        bias_sum += gradient
    tl.store(partials + tl.cast(program, tl.int64) * d + columns, tl.sum(bias_sum, 0), mask=columns < d)


def _launch(name: str, kernel: object, like: Tensor, arguments: dict[str, object], programs: int = 0) -> Launch:
    """Launch over all tiles; `programs` is the number of programs that share the rows of a stripe of columns."""
    d = like.shape[-1]
    n_rows = like.numel() // d
    config = dropout_config(d)
    tile = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns}
    grid = (programs or blocks_of(n_rows, config.block_rows)) * blocks_of(d, config.block_columns)
    name = f"dropout {name} {config.block_rows}x{config.block_columns} {like.dtype}"
    return Launch(
        name, kernel, grid, arguments | tile | {"n_rows": n_rows, "d": d}, config.num_warps, config.num_stages
    )


def sharing_programs(n_rows: int, d: int, multiprocessors: int) -> int:
    """Number of programs that share the rows of a stripe of columns, each with fp32 partial sums of a bias gradient."""
    config = dropout_config(d)
    most = blocks_of(multiprocessors * config.programs_per_multiprocessor, blocks_of(d, config.block_columns))
    return min(blocks_of(n_rows, config.block_rows), most)


def forward_launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, relu: bool, p: float,
    seed: Tensor | int | None,
) -> Launch:  # fmt: skip
    """Launch that fills `out`; all contiguous."""
    arguments = {"x": x, "bias": bias, "residual": residual, "out": out, "RELU": relu, **dropout_arguments(p, seed)}
    return _launch("forward", _forward_kernel, x, arguments)


def backward_launches(
    grad_out: Tensor, y: Tensor | None, grad_x: Tensor, grad_bias: Tensor | None, partials: Tensor | None, p: float,
    seed: Tensor | int | None,
) -> list[Launch]:  # fmt: skip
    """Launches that fill `grad_x`, and by way of `partials`, fp32 (programs, d), `grad_bias`; all contiguous."""
    arguments = {"grad_out": grad_out, "y": y, "grad_x": grad_x, **dropout_arguments(p, seed)}
    if partials is None:
        return [_launch("backward", _backward_kernel, grad_out, arguments)]
    programs = partials.shape[0]
    arguments |= {"partials": partials, "programs": programs}
    return [
        _launch("backward with bias", _backward_bias_kernel, grad_out, arguments, programs),
        sum_of_partials(partials, grad_bias, None, programs),
    ]


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, p: float, seed: Tensor | int | None,
    call: LaunchCall | None = None,
) -> Tensor:  # fmt: skip
    """``[residual +] dropout([relu] (x [+ bias]))`` by Triton.

    Args:
        x: (..., d), fp32, fp16 or bf16.
        bias: (d,), any of them, or None.
        residual: x's shape and dtype, or None.
        relu: apply ReLU to x first.
        p, seed: drop probability in [0, 1]; seed an int or int64 (1,) on x's device, None where p is 0.
        call: key that the launches are kept with.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        bias, residual = contiguous(bias), contiguous(residual)
        run_kept(call, (out,), lambda: [forward_launch(x.contiguous(), bias, residual, out, relu, p, seed)])
    return out


def dropout_backward(
    grad_out: Tensor, y: Tensor | None, relu: bool, p: float, seed: Tensor | int | None, has_bias: bool,
    call: LaunchCall | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x and of the bias, by Triton; with ``relu`` the output y gives the mask, else it is drawn again.

    Args:
        grad_out: (..., d), any strides.
        y: the forward's output (without a residual); needed when ``relu``.
        relu, p, seed: values of the forward.
        has_bias: True computes the gradient of a bias.
        call: key that the launches are kept with.

    Returns:
        grad_x (..., d) in grad_out's dtype; grad_bias (d,) fp32, or None without a bias.
    """
    d, device = grad_out.shape[-1], grad_out.device
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=device)
    fill = torch.empty if grad_x.numel() > 0 else torch.zeros
    grad_bias = fill((d,), dtype=torch.float32, device=device) if has_bias else None
    if grad_x.numel() > 0:
        y = y.contiguous() if relu else None
        programs = sharing_programs(grad_x.numel() // d, d, multiprocessors_of(grad_out))
        partials = torch.empty((programs, d), dtype=torch.float32, device=device) if has_bias else None
        outputs = grad_x, grad_bias, partials
        run_kept(call, outputs, lambda: backward_launches(grad_out.contiguous(), y, *outputs, p, seed))
    return grad_x, grad_bias
