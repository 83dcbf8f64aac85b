"""Launches of norm, dropout and loss, and the work of each of their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.launch_tensors import META, number, results, values
from transformer_fast.triton import cross_entropy, dropout, norm, norm_backward
from transformer_fast.triton.launcher import Launch, blocks_of, multiprocessors_of

from .kernels import Walked, compiled
from .machine import H100
from .predictions import Launched

ROWS = 16_384
NORM_WIDTHS = (512, 1024, 2048, 4096, 8192)
DROPOUT_WIDTHS = (1024, 4096)
VOCABULARY = 32_000
P = 0.1
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Work:
    """A launch and what it does.

    Args:
        launch: on meta tensors, or on those of a device.
        loops: steps of each loop of its programs.
        moved: bytes read and written at least once.
        cached: see :class:`.predictions.Launched`.
    """

    launch: Launch
    loops: tuple[int, ...]
    moved: int
    cached: bool = False

    def compiled(self) -> Launched:
        """Compile the launch for an H100."""
        return Launched(compiled(self.launch), (Walked(self.loops),) * self.launch.grid, self.moved, cached=self.cached)


def norm_forward(d: int, residual_and_dropout: bool, device: str = META, rows: int = ROWS) -> list[Work]:
    """LayerNorm of bf16 rows of d columns, or of residual + dropout(x)."""
    x, out = values(rows, d, dtype=BF16, device=device), results(rows, d, dtype=BF16, device=device)
    weight, bias = (values(d, dtype=BF16, device=device) for _ in range(2))
    mean, rstd = (results(rows, dtype=F32, device=device) for _ in range(2))
    residual = summed = seed = None
    if residual_and_dropout:
        residual, summed, seed = torch.randn_like(x), torch.full_like(out, float("nan")), number(7, device)
    p = P if residual_and_dropout else 0.0
    launch = norm.forward_launch(x, residual, weight, bias, out, summed, mean, rstd, 1e-5, "layer", p, seed)
    return [Work(launch, (), ((4 if residual_and_dropout else 2) * 2 * d + 8) * rows)]


def norm_backward_of(d: int, residual_and_dropout: bool, device: str = META, rows: int = ROWS) -> list[Work]:
    """The gradients of :func:`norm_forward`."""
    dy, x = (values(rows, d, dtype=BF16, device=device) for _ in range(2))
    weight, grad_weight, grad_bias = (make(d, dtype=BF16, device=device) for make in (values, results, results))
    mean, rstd = (values(rows, dtype=F32, device=device) for _ in range(2))
    grad_x = results(rows, d, dtype=BF16, device=device)
    grad_summed = grad_residual = seed = None
    if residual_and_dropout:
        grad_summed, grad_residual, seed = torch.randn_like(x), torch.full_like(grad_x, float("nan")), number(7, device)
    p = P if residual_and_dropout else 0.0
    multiprocessors = H100.multiprocessors if device == META else multiprocessors_of(x)
    programs = norm_backward.sharing_programs(rows, d, multiprocessors)
    partials = results(2, programs, d, dtype=F32, device=device)
    gradients, sums = norm_backward.backward_launches(
        dy, grad_summed, x, weight, mean, rstd, grad_x, grad_residual, grad_weight, grad_bias, partials,
        "layer", p, seed, programs,
    )  # fmt: skip
    a_tile, blocks = gradients.arguments.get("BLOCK_ROWS", 1), blocks_of(d, gradients.arguments["BLOCK_COLUMNS"])
    steps = blocks_of(blocks_of(rows, a_tile), programs)
    matrices = 5 if residual_and_dropout else 3
    return [
        Work(gradients, (steps,) if blocks == 1 else (steps, blocks), (matrices * 2 * d + 8) * rows),
        Work(sums, (blocks_of(programs, sums.arguments["BLOCK_ROWS"]),), 4 * 2 * programs * d, cached=True),
    ]


def dropout_forward(d: int, device: str = META, rows: int = ROWS) -> list[Work]:
    """Dropout of bf16 rows of d columns; its backward is the same kernel on other rows."""
    x, out = values(rows, d, dtype=BF16, device=device), results(rows, d, dtype=BF16, device=device)
    return [Work(dropout.forward_launch(x, None, None, out, False, P, number(7, device)), (), 4 * d * rows)]


def loss_rows(device: str = META, vocabulary: int = VOCABULARY, rows: int = 1024) -> list[Work]:
    """Loss and gradient of bf16 logits, which another launch made: read, and written over."""
    logits, losses = values(rows, vocabulary, dtype=BF16, device=device), results(rows, dtype=F32, device=device)
    target = torch.arange(rows, device=device) % vocabulary
    launch = cross_entropy.rows_launch(logits, target, losses, 0.1, 0, True)
    steps = blocks_of(vocabulary, launch.arguments["BLOCK_COLUMNS"])
    return [Work(launch, (steps, steps), 4 * vocabulary * rows)]


def cases() -> dict[str, Callable[..., list[Work]]]:
    """Every case by name; called with a device, it makes its tensors there."""
    found: dict[str, Callable[..., list[Work]]] = {}
    for fused, what in ((False, "layer norm"), (True, "residual + dropout + layer norm")):
        for d in NORM_WIDTHS:
            found[f"{what} {ROWS}x{d} forward"] = partial(norm_forward, d, fused)
            found[f"{what} {ROWS}x{d} backward"] = partial(norm_backward_of, d, fused)
    found |= {f"dropout {ROWS}x{d}": partial(dropout_forward, d) for d in DROPOUT_WIDTHS}
    found[f"loss of 1024x{VOCABULARY} logits, with gradient"] = loss_rows
    return found
