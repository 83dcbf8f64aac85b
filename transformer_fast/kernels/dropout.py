"""y = [residual +] dropout([relu] x) and its backward: one read and one write, the mask drawn where it is used."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import dropout_config
from .launching import Launch, run_again
from .norm import dropout_arguments
from .philox import elementwise_keep_tile, load_seed


@triton.jit
def _place(n_rows, d, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The tile of this program: row numbers, first column, offsets and which elements exist."""
    blocks = tl.cdiv(d, BLOCK_COLUMNS)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = (tl.program_id(0) % blocks) * BLOCK_COLUMNS
    columns = start + tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < d)[None, :]
    return rows, start, rows[:, None] * d + columns[None, :], inside


@triton.jit(do_not_specialize=["n_rows", "threshold"])
def _forward_kernel(
    x, residual, out, seed, n_rows, d, threshold, rescale,
    RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    key_low, key_high = load_seed(seed)
    rows, start, offsets, inside = _place(n_rows, d, BLOCK_ROWS, BLOCK_COLUMNS)
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        tile = tl.where(tile < 0.0, 0.0, tile)  # a NaN passes, as in torch.relu
    keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, BLOCK_ROWS, BLOCK_COLUMNS)
    tile = tl.where(keep, tile * rescale, 0.0)
    if residual is not None:
        tile += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "threshold"])
def _backward_kernel(
    grad_out, y, grad_x, seed, n_rows, d, threshold, rescale, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    rows, start, offsets, inside = _place(n_rows, d, BLOCK_ROWS, BLOCK_COLUMNS)
    tile = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    if y is not None:  # after a ReLU the output is positive exactly where x is positive and kept
        keep = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32) > 0.0
    else:
        key_low, key_high = load_seed(seed)
        keep = elementwise_keep_tile(key_low, key_high, threshold, rows, start, BLOCK_ROWS, BLOCK_COLUMNS)
    tl.store(grad_x + offsets, tl.where(keep, tile * rescale, 0.0).to(grad_x.dtype.element_ty), mask=inside)


def _launch(name: str, kernel: object, like: Tensor, arguments: dict[str, object]) -> Launch:
    d = like.shape[-1]
    n_rows = like.numel() // d
    config = dropout_config(d)
    tile = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns}
    grid = triton.cdiv(n_rows, config.block_rows) * triton.cdiv(d, config.block_columns)
    name = f"dropout {name} {config.block_rows}x{config.block_columns} {like.dtype}"
    return Launch(
        name, kernel, grid, arguments | tile | {"n_rows": n_rows, "d": d}, config.num_warps, config.num_stages
    )


def forward_launch(
    x: Tensor, residual: Tensor | None, out: Tensor, relu: bool, p: float, seed: Tensor | None
) -> Launch:
    """The launch that fills `out`; all contiguous."""
    arguments = {"x": x, "residual": residual, "out": out, "RELU": relu, **dropout_arguments(p, seed)}
    return _launch("forward", _forward_kernel, x, arguments)


def backward_launch(grad_out: Tensor, y: Tensor | None, grad_x: Tensor, p: float, seed: Tensor | None) -> Launch:
    """The launch that fills `grad_x`; all contiguous."""
    arguments = {"grad_out": grad_out, "y": y, "grad_x": grad_x, **dropout_arguments(p, seed)}
    return _launch("backward", _backward_kernel, grad_out, arguments)


def dropout_forward(x: Tensor, residual: Tensor | None, relu: bool, p: float, seed: Tensor) -> Tensor:
    """``[residual +] dropout([relu] x)`` by Triton.

    Args:
        x: (..., d), fp32, fp16 or bf16.
        residual: x's shape and dtype, or None.
        relu: apply ReLU to x first.
        p, seed: drop probability in (0, 1]; seed int64 (1,) on x's device.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        residual = None if residual is None else residual.contiguous()
        run_again(
            ("dropout forward", relu, p), (x.contiguous(), residual, seed), (out,),
            lambda x, residual, seed, out: [forward_launch(x, residual, out, relu, p, seed)],
        )  # fmt: skip
    return out


def dropout_backward(grad_out: Tensor, y: Tensor | None, relu: bool, p: float, seed: Tensor) -> Tensor:
    """Gradient of x, by Triton; with ``relu`` the mask is read off the output y, else drawn again.

    Args:
        grad_out: (..., d), any strides.
        y: the forward's output (without a residual); needed when ``relu``.
        relu, p, seed: those of the forward.
    """
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    if grad_x.numel() > 0:
        y = y.contiguous() if relu else None
        run_again(
            ("dropout backward", p), (grad_out.contiguous(), y, seed), (grad_x,),
            lambda grad_out, y, seed, grad_x: [backward_launch(grad_out, y, grad_x, p, seed)],
        )  # fmt: skip
    return grad_x


def compile_cases(arch: str) -> Iterator[Launch]:
    """A launch for every config, forward and backward, in bf16."""
    for d in (64, 512, 4096):
        x = torch.empty((1024, d), dtype=torch.bfloat16, device="meta")
        seed = torch.empty((1,), dtype=torch.int64, device="meta")
        yield forward_launch(x, x, x, True, 0.1, seed)
        yield backward_launch(x, None, x, 0.1, seed)
