"""The launches of norm, dropout and loss, compiled, with what each of their programs does."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_fast.triton import cross_entropy, dropout, norm, norm_backward
from transformer_fast.triton.launcher import Launch, blocks_of

from .attention import meta
from .kernels import Walked, compiled
from .machine import H100
from .predictions import Launched

ROWS = 16_384
NORM_WIDTHS = (512, 1024, 2048, 4096, 8192)
DROPOUT_WIDTHS = (1024, 4096)
VOCABULARY = 32_000
P = 0.1
_F32 = torch.float32


def _launched(launch: Launch, loops: tuple[int, ...], moved: int, cached: bool = False) -> Launched:
    return Launched(compiled(launch), (Walked(loops),) * launch.grid, moved, cached=cached)


def norm_forward(d: int, residual_and_dropout: bool) -> Iterator[Launched]:
    """LayerNorm of bf16 rows of d columns, or of residual + dropout(x)."""
    x, vector, statistics = meta(ROWS, d, dtype=torch.bfloat16), meta(d, dtype=torch.bfloat16), meta(ROWS, dtype=_F32)
    residual = x if residual_and_dropout else None
    p, seed = (P, meta(1, dtype=torch.int64)) if residual_and_dropout else (0.0, None)
    launch = norm.forward_launch(
        x, residual, vector, vector, x, residual, statistics, statistics, 1e-5, "layer", p, seed
    )  # fmt: skip
    matrices = 4 if residual_and_dropout else 2
    yield _launched(launch, (), (matrices * 2 * d + 8) * ROWS)


def norm_backward_of(d: int, residual_and_dropout: bool) -> Iterator[Launched]:
    """The gradients of :func:`norm_forward`."""
    x, vector, statistics = meta(ROWS, d, dtype=torch.bfloat16), meta(d, dtype=torch.bfloat16), meta(ROWS, dtype=_F32)
    other = x if residual_and_dropout else None
    p, seed = (P, meta(1, dtype=torch.int64)) if residual_and_dropout else (0.0, None)
    programs = norm_backward.sharing_programs(ROWS, d, H100.multiprocessors)
    partials = meta(2, programs, d, dtype=_F32)
    launches = norm_backward.backward_launches(
        x, other, x, vector, statistics, statistics, x, other, vector, vector, partials,
        "layer", p, seed, programs,
    )  # fmt: skip
    rows, blocks = launches[0].arguments.get("BLOCK_ROWS", 1), blocks_of(d, launches[0].arguments["BLOCK_COLUMNS"])
    steps = blocks_of(blocks_of(ROWS, rows), programs)
    matrices = 5 if residual_and_dropout else 3
    yield _launched(launches[0], (steps,) if blocks == 1 else (steps, blocks), (matrices * 2 * d + 8) * ROWS)
    yield _sum(launches[1], 2 * programs, d)


def _sum(launch: Launch, rows: int, d: int) -> Launched:
    """The launch that sums fp32 partials of `rows` rows."""
    steps = blocks_of(launch.arguments["programs"], launch.arguments["BLOCK_ROWS"])
    return _launched(launch, (steps,), 4 * rows * d, cached=True)


def dropout_forward(d: int) -> Iterator[Launched]:
    """Dropout of bf16 rows of d columns; its backward is the same kernel on other rows."""
    x, seed = meta(ROWS, d, dtype=torch.bfloat16), meta(1, dtype=torch.int64)
    yield _launched(dropout.forward_launch(x, None, None, x, False, P, seed), (), 4 * d * ROWS)


def loss_rows(vocabulary: int = VOCABULARY, rows: int = 1024) -> Iterator[Launched]:
    """Loss and gradient of bf16 logits, which another launch made: read, and written over."""
    logits = meta(rows, vocabulary, dtype=torch.bfloat16)
    launch = cross_entropy.rows_launch(logits, meta(rows, dtype=torch.int64), meta(rows, dtype=_F32), 0.1, 0, True)
    steps = blocks_of(vocabulary, launch.arguments["BLOCK_COLUMNS"])
    yield _launched(launch, (steps, steps), 4 * vocabulary * rows)


def cases() -> Iterator[tuple[str, Iterator[Launched]]]:
    """(name, launches) of every case."""
    for d in NORM_WIDTHS:
        yield f"layer norm {ROWS}x{d} forward", norm_forward(d, False)
        yield f"layer norm {ROWS}x{d} backward", norm_backward_of(d, False)
    for d in NORM_WIDTHS:
        yield f"residual + dropout + layer norm {ROWS}x{d} forward", norm_forward(d, True)
        yield f"residual + dropout + layer norm {ROWS}x{d} backward", norm_backward_of(d, True)
    for d in DROPOUT_WIDTHS:
        yield f"dropout {ROWS}x{d}", dropout_forward(d)
    yield f"loss of 1024x{VOCABULARY} logits, with gradient", loss_rows()
