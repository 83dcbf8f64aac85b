"""Launches compiled for an H100, and how long their programs would run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from tools.control_flow import Flow, Walk
from tools.multiprocessors import MULTIPROCESSORS
from tools.sass import Instruction, disassemble
from tools.triton_kernels import resource_usage, triton_compiled

from . import pipes
from .machine import H100, Machine
from .replay import Replay, replay

CAPABILITY = 90


@dataclass(frozen=True, eq=False)
class Kernel:
    """One compiled kernel; equal binaries are one object.

    Args:
        name: of the launch.
        instructions: its SASS.
        registers: a thread.
        spilled: bytes a thread.
        shared: bytes a program.
        warps: a program.
    """

    name: str
    instructions: tuple[Instruction, ...]
    registers: int
    spilled: int
    shared: int
    warps: int

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.instructions)

    @cached_property
    def walk(self) -> Walk:
        return self.flow.walk()

    def resident(self) -> tuple[int, str]:
        """Return (programs that fit on a multiprocessor, the resource that limits them)."""
        programs, _, scarce = MULTIPROCESSORS[CAPABILITY].occupancy(self.registers, self.shared, self.warps)
        return programs, scarce

    def spills_in(self, path: list[Instruction]) -> int:
        """Loads and stores of spilled registers along a path."""
        return sum(instruction.name in ("LDL", "STL") for instruction in path)


_KERNELS: dict[bytes, Kernel] = {}


def compiled(launch) -> Kernel:
    """Compile a :class:`transformer_fast.triton.launcher.Launch` for sm_90; Triton caches the binary."""
    binary = triton_compiled(launch, CAPABILITY)
    cubin = binary.asm["cubin"]
    if cubin not in _KERNELS:
        _KERNELS[cubin] = _read(launch, binary)
    return _KERNELS[cubin]


def _read(launch, binary) -> Kernel:
    usage = resource_usage(binary.asm["cubin"])
    return Kernel(
        re.sub(r" torch\.", " ", launch.name),
        tuple(disassemble(binary.asm["cubin"])),
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        binary.metadata.shared,
        launch.num_warps,
    )


@dataclass(frozen=True)
class Steps:
    """Work of one program of a kernel with a main loop: steps without mask code, steps with it.

    Args:
        full, masked: steps of the main loop.
        exits: the program finds that it has no work.
    """

    full: int
    masked: int
    exits: bool = False


@dataclass(frozen=True)
class Walked:
    """Work of a program of a kernel without a main loop; the same for all programs of a launch.

    Args:
        loops: steps of each of its loops, by their addresses.
    """

    loops: tuple[int, ...] = ()

    def at_most(self, steps: int) -> Walked:
        """Return the work with at most this many steps of the first loop."""
        return Walked((min(steps, self.loops[0]), *self.loops[1:])) if self.loops else self


@cache
def durations(kernel: Kernel, most: int, machine: Machine) -> Durations:
    """Durations, cached for all launches of a kernel, so that nothing is replayed twice."""
    return Durations(kernel, most, machine)


class Durations:
    """Cycles that programs of a kernel take, by their work and by how many share a multiprocessor.

    Args:
        kernel: compiled.
        most: programs on a multiprocessor at most; None for as many as fit.
        machine: assumptions.
    """

    REPLAYED = 3
    """Programs of more steps are replayed with so many; each further step takes what it does in the loop alone."""
    COUNTED = 2
    """Of kernels without a main loop with so many, and twice as many, for what each further step takes."""

    def __init__(self, kernel: Kernel, most: int | None = None, machine: Machine = H100) -> None:
        self.kernel, self.machine = kernel, machine
        fit = kernel.resident()[0]
        self.most = min(fit, fit if most is None else most)
        self._replays: dict[tuple[object, int], Replay] = {}
        self._known: dict[tuple[Steps | Walked, int], float] = {}

    def cycles(self, work: Steps | Walked, resident: int) -> float:
        """Cycles of a program while `resident` programs of equal work share the multiprocessor: replayed for 1 and
        for the largest number, interpolated in between."""
        if (work, resident) not in self._known:
            cycles = self._cycles(work, self.most)
            if resident < self.most:
                alone = self._cycles(work, 1)
                cycles = alone + (cycles - alone) * (resident - 1) / (self.most - 1)
            self._known[work, resident] = cycles
        return self._known[work, resident]

    def step(self, masked: bool = False, resident: int | None = None) -> Replay:
        """Replay the main loop alone, with as many programs as fit."""
        walk = self.kernel.walk
        return self._replay(("step", masked), walk.masked if masked else walk.full, resident or self.most)

    def whole(self, work: Steps | Walked) -> Replay:
        """Replay whole programs of one kind of work, as many as fit."""
        self._cycles(work, self.most)
        if isinstance(work, Walked):
            work = work.at_most(2 * self.COUNTED)
        return self._replays[work, self.most]

    def busiest(self, works: Sequence[Steps | Walked]) -> Replay:
        """Return the replay that represents a launch: of the main loop if programs take more than a few steps of it,
        else of the most frequent whole program."""
        steps = [work for work in works if isinstance(work, Steps) and work.full + work.masked > 0]
        common = Counter(steps).most_common(1)[0][0] if steps else works[0]
        if steps and sum(work.full + work.masked for work in steps) > self.REPLAYED * len(steps):
            return self.step()
        return self.whole(self._replayed(common) if isinstance(common, Steps) else common)

    def _replayed(self, work: Steps) -> Steps:
        """Part of a program that is replayed as a whole."""
        masked = min(work.masked, self.REPLAYED)
        return Steps(min(work.full, self.REPLAYED - masked), masked)

    def _cycles(self, work: Steps | Walked, resident: int) -> float:
        kernel = self.kernel
        if isinstance(work, Walked):
            return self._counted(work, resident)
        if work.exits:
            return self._replay(work, kernel.walk.exited, resident, whole=True).cycles
        replayed = self._replayed(work)
        full, masked = replayed.full, replayed.masked
        cycles = self._replay(replayed, kernel.walk.steps(full, masked), resident, whole=True).cycles
        if work.full > full:
            cycles += (work.full - full) * self.step(False, resident).cycles
        if work.masked > masked:
            cycles += (work.masked - masked) * self.step(True, resident).cycles
        return cycles

    def _counted(self, work: Walked, resident: int) -> float:
        few, more = work.at_most(self.COUNTED), work.at_most(2 * self.COUNTED)
        cycles = self._replay(more, self.kernel.flow.counted(more.loops), resident, whole=True).cycles
        if more == work:
            return cycles
        step = cycles - self._replay(few, self.kernel.flow.counted(few.loops), resident, whole=True).cycles
        return cycles + step / self.COUNTED * (work.loops[0] - more.loops[0])

    def _replay(self, key: object, path: list[Instruction], resident: int, whole: bool = False) -> Replay:
        if (key, resident) not in self._replays:
            trace = [pipes.operation(instruction, self.machine) for instruction in path]
            passes = {} if not whole else {"passes": 9, "skip": 2} if len(path) < 3000 else {"passes": 5, "skip": 1}
            if whole:
                trace.append(pipes.program_end(self.machine))
            self._replays[key, resident] = replay(trace, self.kernel.warps, resident, machine=self.machine, **passes)
        return self._replays[key, resident]
