"""Calibration: measured speed of a published kernel divided by its predicted speed; all predictions are multiplied
by it.

The kernel is :mod:`.calibration_kernel`, compiled and replayed as all others are. The published figures are of the
fastest of some tiles, and so is this one. The published kernel is that of Triton's tutorial, which does the same in the
same order; on an H100 it may load its tiles by TMA, while ours loads them by cp.async.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.launch_tensors import META, results, values
from transformer_fast.triton.launcher import Launch

from .calibration_kernel import attention_kernel
from .grid import launch_cycles
from .kernels import Durations, Steps, compiled
from .machine import H100, Machine
from .predictions import Range

BATCH_HEADS, LENGTH = 128, 4096


@dataclass(frozen=True)
class Published:
    """A measured speed on an H100 SXM, forward without a mask, 4,096 keys."""

    head_dim: int
    low: float
    high: float
    source: str


PUBLISHED = (
    Published(64, 400e12, 400e12, "J. Shah et al., FlashAttention-3, 2024: Triton at 4k"),
    Published(
        128,
        389e12,
        460e12,
        "389: the same paper; 458: pytorch/benchmark, pull 2391; 460: facebookexperimental/triton, pull 206",
    ),
)

TILES = ((64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 3))
"""(queries, keys, warps, stages): of those that the tutorial tries, the ones that the replay finds fast."""


@dataclass(frozen=True)
class Calibration:
    """Predicted speed without the factor, in FLOP/s, and the published speed."""

    published: Published
    tile: tuple[int, int, int, int]
    predicted: float

    @property
    def factor(self) -> Range:
        return Range(self.published.low / self.predicted, self.published.high / self.predicted)


def launch(head_dim: int, tile: tuple[int, int, int, int], device: str = META) -> Launch:
    """Return the launch on a device; on META its tensors have no contents."""
    queries, keys, warps, stages = tile
    shape = BATCH_HEADS, LENGTH, head_dim
    q, k, v = (values(*shape, dtype=torch.float16, device=device) for _ in range(3))
    arguments = {
        "q": q, "k": k, "v": v, "out": results(*shape, dtype=torch.float16, device=device),
        "logsumexp": results(BATCH_HEADS, LENGTH, dtype=torch.float32, device=device),
        "scale": head_dim**-0.5, "length": LENGTH, "head_stride": LENGTH * head_dim,
        "HEAD_DIM": head_dim, "BLOCK_QUERIES": queries, "BLOCK_KEYS": keys,
    }  # fmt: skip
    name = f"fused attention d{head_dim} {queries}x{keys} {warps} warps {stages} stages"
    return Launch(name, attention_kernel, BATCH_HEADS * LENGTH // queries, arguments, warps, stages)


def operations(head_dim: int) -> float:
    """Floating-point operations of a launch."""
    return 4.0 * BATCH_HEADS * LENGTH * LENGTH * head_dim


def speed(head_dim: int, tile: tuple[int, int, int, int], machine: Machine = H100) -> float:
    """FLOP/s by the replay; 0 where a tile does not fit on a multiprocessor or spills in its loop."""
    kernel = compiled(launch(head_dim, tile))
    resident, _ = kernel.resident()
    if resident == 0 or kernel.spills_in(kernel.walk.full):
        return 0.0
    durations = Durations(kernel, machine=machine)
    works = [Steps(LENGTH // tile[1], 0)] * (BATCH_HEADS * LENGTH // tile[0])
    cycles = launch_cycles(works, durations.cycles, machine.multiprocessors, resident)
    return operations(head_dim) / cycles * machine.clock


def calibrate(say: Callable[[str], None] = lambda line: None, machine: Machine = H100) -> list[Calibration]:
    """Return the fastest tile for every published figure."""
    found = []
    for published in PUBLISHED:
        speeds = {}
        for tile in TILES:
            speeds[tile] = speed(published.head_dim, tile, machine)
            say(f"calibration d{published.head_dim} {tile}: {speeds[tile] / 1e12:.0f} TFLOP/s")
        best = max(speeds, key=speeds.__getitem__)
        found.append(Calibration(published, best, speeds[best]))
    return found


def factor(calibrations: list[Calibration]) -> Range:
    """Return the smallest and the largest factor."""
    return Range(min(c.factor.low for c in calibrations), max(c.factor.high for c in calibrations))
