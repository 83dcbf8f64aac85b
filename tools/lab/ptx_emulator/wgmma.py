"""wgmma: products of a warpgroup (four warps, 128 threads) that run while its threads go on.

A wgmma.mma_async is computed when it is issued and delivered by the wgmma.wait_group that completes it; in between its
accumulator holds no number. Each warp computes its own 16 of the 64 rows, so that warps may come one after another; at
the end of the program the warps of a warpgroup must have executed the same sequence of wgmma instructions.
Factors: f16, bf16 and tf32, the first in registers or in shared memory; accumulators: fp32.

Not here, because Triton 3.7.1 emits none of it for kernels without tensor descriptors: TMA (cp.async.bulk), mbarrier,
clusters of more than one program, named barriers. Such an instruction raises EmulationError with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import Array
from .machine import Machine
from .report import EmulationError
from .warp import converged
from .wgmma_layout import (
    ROWS,
    WARPS,
    accumulator_from_registers,
    accumulator_to_registers,
    first_factor_from_registers,
    product,
)
from .wgmma_operands import Mma, of_warps, operand


@dataclass
class InFlight:
    """An issued wgmma.

    Attributes:
        warps: numbers in the machine of the warps that execute it; all other arrays have an element a warp.
        pending: per warp, True while it is in flight.
        group: number of the warp's commit group, 0 before it is committed.
        result: (n, 16, N); None if a later wgmma accumulates to the same registers.
        chunks: numbers of the 16-byte chunks of shared memory that it reads.
    """

    mma: Mma
    warps: np.ndarray
    pending: np.ndarray
    group: np.ndarray
    result: np.ndarray | None
    chunks: np.ndarray


@dataclass
class Warpgroups:
    """The wgmma instructions of one machine."""

    machine: Machine
    in_flight: list[InFlight] = field(default_factory=list)

    def __post_init__(self) -> None:
        warps = self.machine.lanes // 32
        self.groups = np.zeros(warps, np.int64)
        self.executed = np.zeros(warps, np.uint64)  # a hash of the sequence of instructions
        self.last = 0
        if self.machine.warps % WARPS:
            raise EmulationError(f"{self.machine.kernel.name}: wgmma in a program of {self.machine.warps} warps")

    # ---- instructions

    def multiply(
        self, mask: Array, mma: Mma, accumulators: Sequence[Array], first: Sequence[Array] | Array, second: Array,
        accumulate: Array,
    ) -> list[Array]:  # fmt: skip
        """Execute wgmma.mma_async: start a product; return the placeholder values of its accumulator registers.

        Args:
            accumulators: bits of the accumulator's registers.
            first: bits of the first factor's registers, or its descriptors.
            second: descriptors of the second factor.
            accumulate: scale-d.
        """
        machine = self.machine
        warps = self._execute(mask, mma.index)
        if mma.unfenced:
            kind = "registers of a wgmma were accessed before it without wgmma.fence in between"
            machine.report(kind, mma.index, f"{len(mma.unfenced)} registers, such as {mma.unfenced[0]}")
        groups, leaders, members = np.unique(warps // WARPS, return_index=True, return_inverse=True)
        right, chunks = operand(machine, mma, warps, leaders, members, second, mma.shape.columns, mma.transposed[1])
        if isinstance(first, Sequence):
            left = first_factor_from_registers(of_warps(first, warps), mma.shape.element_bytes)
        else:
            rows, more = operand(machine, mma, warps, leaders, members, first, ROWS, mma.transposed[0])
            left = rows.reshape(len(groups), WARPS, ROWS // WARPS, -1)[members, warps % WARPS]
            chunks = np.concatenate([chunks, more], 1)
        before = self._accumulated(mma, warps, accumulators, accumulate)
        here = len(warps) // len(groups)
        if len(warps) == here * len(groups) and (members == np.repeat(np.arange(len(groups)), here)).all():
            stacked = left.reshape(len(groups), here * 16, -1)
            into = None if before is None else before.reshape(len(groups), here * 16, -1)
            result = product(stacked, right, into, mma.shape.type, mma.negate).reshape(len(warps), 16, -1)
        else:
            result = product(left, right[members], before, mma.shape.type, mma.negate)
        shadow = self.machine.shared.wgmma
        if shadow is not None:
            shadow.read(warps[leaders], chunks, mma.index)
            shadow.mark_readers(warps, chunks[members])
        self.in_flight.append(
            InFlight(mma, warps, np.ones(len(warps), bool), np.zeros(len(warps), np.int64), result, chunks[members])
        )
        undefined = machine.undefined(4)
        if len(warps) * 32 == machine.lanes:
            return [undefined] * len(accumulators)
        lanes = np.repeat(self._chosen(warps), 32)
        return [np.where(lanes, undefined, register) for register in accumulators]

    def commit(self, mask: Array, index: int) -> None:
        """Execute wgmma.commit_group: everything issued so far becomes one group."""
        warps = self._execute(mask, index)
        self.groups[warps] += 1
        here = self._chosen(warps)
        for issued in self.in_flight:
            chosen = (issued.group == 0) & here[issued.warps]
            issued.group[chosen] = self.groups[issued.warps[chosen]]

    def wait(
        self, mask: Array, index: int, remaining: int, numbers: tuple[int, ...], registers: Sequence[Array]
    ) -> list[Array]:
        """Execute wgmma.wait_group: complete all but the last `remaining` groups.

        Args:
            numbers, registers: numbers and bits of all registers that may be accumulators of wgmma in flight.

        Returns:
            The registers with the results of what is complete.
        """
        warps = self._execute(mask, index)
        values = dict(zip(numbers, registers, strict=True))
        waits = self._chosen(warps)
        shadow = self.machine.shared.wgmma
        for issued in self.in_flight:
            ready = issued.pending & (issued.group > 0) & waits[issued.warps]
            ready &= issued.group <= self.groups[issued.warps] - remaining
            if not ready.any():
                continue
            issued.pending &= ~ready
            if issued.result is not None:
                self._deliver(issued, ready, values)
            if shadow is not None:
                shadow.done(issued.warps[ready], issued.chunks[ready])
        self.in_flight = [issued for issued in self.in_flight if issued.pending.any()]
        if shadow is not None:
            for issued in self.in_flight:
                shadow.mark_readers(issued.warps[issued.pending], issued.chunks[issued.pending])
        return [values[number] for number in numbers]

    def fence(self, mask: Array, index: int) -> None:
        """Execute wgmma.fence, which does nothing: wgmma_analysis checks its effect before the kernel runs."""
        self._execute(mask, index)

    def check_registers(self, mask: Array, index: int, accessed: frozenset[int], written: frozenset[int]) -> None:
        """Check before an instruction that no register it accesses belongs to a wgmma in flight."""
        active = self.machine.active(mask).reshape(-1, 32).any(1)
        for issued in self.in_flight:
            here = issued.pending & active[issued.warps]
            if not here.any():
                continue
            state = "in flight" if issued.group[here].all() else "in flight and not committed"
            detail = f"{state}: {self.machine.kernel.instructions[issued.mma.index].text[:80]}"
            if accessed & set(issued.mma.accumulators):
                self.machine.report("accumulator of a wgmma in flight is accessed", index, detail)
            elif written & set(issued.mma.first_factor):
                self.machine.report("first factor of a wgmma in flight is overwritten", index, detail)

    def finish(self) -> None:
        """Report unfinished wgmma instructions at the end of the program."""
        for issued in self.in_flight:
            self.machine.report("wgmma never waited for", issued.mma.index, "")
        differ = np.ptp(self.executed.reshape(-1, WARPS), axis=1) != 0
        if differ.any():
            detail = f"warpgroup {int(np.flatnonzero(differ)[0])}"
            self.machine.report("the warps of a warpgroup executed different wgmma instructions", self.last, detail)

    # ---- parts of them

    def _execute(self, mask: Array, index: int) -> np.ndarray:
        """Numbers of the warps that execute an instruction."""
        some = converged(self.machine, mask, index)
        warps = np.arange(self.machine.lanes // 32) if some is None else np.flatnonzero(some)
        self.executed[warps] = self.executed[warps] * np.uint64(1000003) + np.uint64(index + 1)
        self.last = index
        return warps

    def _chosen(self, warps: np.ndarray) -> np.ndarray:
        """Bool per warp of the machine: True for the given warps."""
        chosen = np.zeros(self.machine.lanes // 32, bool)
        chosen[warps] = True
        return chosen

    def _accumulated(
        self, mma: Mma, warps: np.ndarray, registers: Sequence[Array], accumulate: Array
    ) -> np.ndarray | None:
        """Summand of a product, float32 (n, 16, N): registers, or the results of wgmma in flight."""
        wanted = self.machine.full(accumulate).reshape(-1, 32)[warps]
        if (wanted != wanted[:, :1]).any():
            self.machine.report("lanes of a warp give a wgmma different scale-d", mma.index, "")
        wanted = wanted[:, 0]
        same = [
            issued
            for issued in self.in_flight
            if set(issued.mma.accumulators) & set(mma.accumulators) and issued.result is not None
        ]
        before = None
        if same and same[-1].mma.accumulators == mma.accumulators and _as_a_whole(same[-1], warps):
            before, same[-1].result = same[-1].result, None
        elif same or wanted.any():
            values = dict(zip(mma.accumulators, registers, strict=True))
            for issued in same:
                self._deliver(issued, issued.pending, values)
            before = accumulator_from_registers(of_warps([values[n] for n in mma.accumulators], warps))
        if before is None or not wanted.any():
            return None
        return before if wanted.all() else np.where(wanted[:, None, None], before, np.float32(0))

    def _deliver(self, issued: InFlight, ready: np.ndarray, values: dict[int, Array]) -> None:
        """Write the results of a wgmma, for some of its warps, to the accumulator registers in `values`."""
        assert issued.result is not None
        results = accumulator_to_registers(issued.result[ready])
        warps = issued.warps[ready]
        for place, number in enumerate(issued.mma.accumulators):
            if number not in values:
                continue
            if len(warps) * 32 == self.machine.lanes:
                values[number] = np.ascontiguousarray(results[:, :, place]).reshape(-1)
            else:
                register = self.machine.full(values[number]).copy()
                register.reshape(-1, 32)[warps] = results[:, :, place]
                values[number] = register


def _as_a_whole(issued: InFlight, warps: np.ndarray) -> bool:
    """Return True if exactly these warps have the product in flight."""
    return bool(issued.pending.all()) and np.array_equal(issued.warps, warps)


# ---- called by generated code


def multiply(machine: Machine, *arguments: object) -> list[Array]:
    return machine.extension(Warpgroups).multiply(*arguments)  # type: ignore[arg-type]


def commit(machine: Machine, mask: Array, index: int) -> None:
    machine.extension(Warpgroups).commit(mask, index)


def wait(machine: Machine, *arguments: object) -> list[Array]:
    return machine.extension(Warpgroups).wait(*arguments)  # type: ignore[arg-type]


def fence(machine: Machine, mask: Array, index: int) -> None:
    machine.extension(Warpgroups).fence(mask, index)


def check_registers(machine: Machine, *arguments: object) -> None:
    machine.extension(Warpgroups).check_registers(*arguments)  # type: ignore[arg-type]


def proxy_fence(machine: Machine, mask: Array) -> None:
    """Execute fence.proxy.async."""
    if machine.shared.wgmma is not None:
        machine.shared.wgmma.fence(mask)
