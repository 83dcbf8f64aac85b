"""From a launch to its predicted time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import pipes
from .grid import launch_cycles
from .kernels import Durations, Kernel, Steps, Walked, durations
from .machine import H100, Machine

HELD_UP = 0.5
"""Where no pipe is busy for this share of the time, what binds is waiting: for memory, barriers and results."""


@dataclass(frozen=True)
class Range:
    """Fast and slow end of a predicted time, in seconds."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Launched:
    """A kernel with its programs.

    Args:
        kernel: compiled.
        works: of each program, in the order in which they start.
        moved: bytes read and written at least once.
        operations: floating-point operations of the products that are needed.
        cached: what it reads is small and was written just before, so that it lies in the L2.
    """

    kernel: Kernel
    works: tuple[Steps | Walked, ...]
    moved: int
    operations: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Prediction:
    """Prediction for one launch.

    Args:
        name: of the kernel.
        registers, spilled, shared, warps: see :class:`.kernels.Kernel`.
        spills: loads and stores of spilled registers in a step of the main loop, or in all where there is none.
        programs: of the launch.
        resident: programs on a multiprocessor.
        limited_by: what there is too little of for one more.
        instructions: of one warp, by pipe: in a step of the main loop without mask code, or in all.
        busy: share of the time that each pipe works, in what `instructions` are of.
        binding: the busiest of them, or "waiting" where none is busy; "memory" where the bytes take longer; both where
            this depends on the end of the range.
        cycles: replayed, of the whole launch.
        moved: bytes.
        operations: floating-point operations of the products that are needed.
        time: predicted, with the gap to the next kernel.
    """

    name: str
    registers: int
    spilled: int
    spills: int
    shared: int
    warps: int
    programs: int
    resident: int
    limited_by: str
    instructions: dict[str, int]
    busy: dict[str, float]
    binding: str
    cycles: float
    moved: int
    operations: float
    time: Range


def predict(launched: Launched, factor: Range, machine: Machine = H100) -> Prediction:
    """Replay a launch.

    Args:
        launched: kernel and programs.
        factor: published by simulated speed of the calibration.
        machine: assumptions. Where a kernel has no main loop, which hides the latency of memory, the slow end of the
            range has a longer latency than the fast end.
    """
    kernel, works = launched.kernel, launched.works
    fit, limited_by = kernel.resident()
    resident = min(fit, -(-len(works) // machine.multiprocessors))
    latencies = (machine.cached_latency, machine.memory_latency, machine.loaded_latency)[not launched.cached :]

    def launch(of: Durations) -> float:
        return launch_cycles(works, of.cycles, machine.multiprocessors, resident)

    fast, slow = (durations(kernel, resident, replace(machine, memory_latency=latency)) for latency in latencies[:2])
    cycles = launch(fast)
    if isinstance(works[0], Walked):
        path, shown = kernel.flow.counted(works[0].loops), fast.whole(works[0])
        slowest = launch(slow)
    else:
        path, shown = kernel.walk.full, fast.busiest(works)
        slowest = cycles
    low, high = cycles / factor.high, slowest / factor.low
    floor = launched.moved / machine.copy
    time = Range(*(max(c / machine.clock, floor) + machine.gap for c in (low, high)))
    busiest = shown.busiest
    pipe = busiest if shown.busy[busiest] >= HELD_UP else f"waiting ({busiest})"
    if floor >= high / machine.clock:
        binding = "memory"
    else:
        binding = f"memory or {pipe}" if floor >= low / machine.clock else pipe
    return Prediction(
        kernel.name,
        kernel.registers,
        kernel.spilled,
        kernel.spills_in(path),
        kernel.shared,
        kernel.warps,
        len(works),
        resident,
        limited_by if resident == fit else "programs",
        pipes.counts(path),
        shown.busy,
        binding,
        round(cycles),
        launched.moved,
        launched.operations,
        time,
    )
