"""Registers that a wgmma may not find in order: followed through the kernel's jumps before it runs.

The rules of the PTX ISA document, section "Asynchronous warpgroup level matrix instructions":

- a wgmma.fence stands between any access to a register and the wgmma.mma_async that uses it as accumulator or first
  factor; only accumulators pass from one wgmma.mma_async to another of the same shape without it;
- from wgmma.mma_async until the wgmma.wait_group that completes it, nothing touches its accumulator, and nothing writes
  its first factor.

The first is decided here: an instruction is unfenced if some path of jumps reaches it so. For the second the analysis
only finds the instructions that could break it; whether they do is asked when they are executed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from .kernel import Instruction, Kernel

WITHOUT_RESULT = {
    "st",
    "cp",
    "bar",
    "barrier",
    "bra",
    "ret",
    "exit",
    "trap",
    "membar",
    "fence",
    "stmatrix",
    "red",
    "wgmma",
}
"""Opcodes whose first operand is not written."""


@dataclass(frozen=True)
class WgmmaRegisters:
    """Registers of one wgmma.mma_async, as bit masks of Kernel.registers' numbers."""

    shape: str
    accumulator: int
    first_factor: int


@dataclass
class WgmmaAnalysis:
    """Result of :func:`analyse`.

    Attributes:
        unfenced: by index of a wgmma.mma_async, registers accessed before it without a wgmma.fence in between.
        delivered: by index of a wgmma.wait_group, registers of accumulators that it may complete.
        suspects: indices of other instructions that touch registers of a wgmma that may be in flight.
    """

    unfenced: dict[int, int] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)


def registers_of(kernel: Kernel, text: str) -> int:
    """The registers that a text of operands names, as a bit mask."""
    mask = 0
    for name in re.findall(r"%[\w$@]+", text):
        number = kernel.registers.get(name)
        if number is not None:
            mask |= 1 << number
    return mask


def is_mma(instruction: Instruction) -> bool:
    return instruction.opcode[:2] == ("wgmma", "mma_async")


def wgmma_registers(kernel: Kernel, instruction: Instruction) -> WgmmaRegisters:
    first = instruction.operands[1]
    return WgmmaRegisters(
        ".".join(instruction.opcode),
        registers_of(kernel, instruction.operands[0]),
        registers_of(kernel, first) if first.startswith("{") else 0,
    )


def accesses(kernel: Kernel, instruction: Instruction) -> tuple[int, int]:
    """(all registers that an instruction names, those that it writes)."""
    touched = registers_of(kernel, " ".join(instruction.operands))
    if instruction.predicate is not None:
        touched |= registers_of(kernel, instruction.predicate)
    if instruction.opcode[0] in WITHOUT_RESULT or not instruction.operands:
        return touched, 0
    return touched, registers_of(kernel, instruction.operands[0])


@dataclass
class _State:
    """State that is possible before an instruction; joined over the paths that lead there.

    Attributes:
        accessed: registers accessed since the last wgmma.fence, by other instructions.
        accumulated: the same by wgmma.mma_async, as accumulators: by opcode.
        multiplied: the same, as first factors.
        issued, committed: (accumulators, first factors) in flight, before and after wgmma.commit_group.
    """

    accessed: int = 0
    accumulated: dict[str, int] = field(default_factory=dict)
    multiplied: int = 0
    issued: tuple[int, int] = (0, 0)
    committed: tuple[int, int] = (0, 0)

    def join(self, other: _State) -> bool:
        """Merge the state of another path; return True if anything is new."""
        before = (self.accessed, dict(self.accumulated), self.multiplied, self.issued, self.committed)
        self.accessed |= other.accessed
        self.multiplied |= other.multiplied
        for shape, mask in other.accumulated.items():
            self.accumulated[shape] = self.accumulated.get(shape, 0) | mask
        self.issued = _both(self.issued, other.issued)
        self.committed = _both(self.committed, other.committed)
        return before != (self.accessed, self.accumulated, self.multiplied, self.issued, self.committed)

    def copy(self) -> _State:
        return _State(self.accessed, dict(self.accumulated), self.multiplied, self.issued, self.committed)


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] | other[0], one[1] | other[1]


def analyse(kernel: Kernel) -> WgmmaAnalysis:
    """Follow every path through the kernel."""
    result = WgmmaAnalysis()
    if not any(is_mma(instruction) for instruction in kernel.instructions):
        return result
    used = 0
    for instruction in kernel.instructions:
        if is_mma(instruction):
            registers = wgmma_registers(kernel, instruction)
            used |= registers.accumulator | registers.first_factor
    touched = [tuple(mask & used for mask in accesses(kernel, i)) for i in kernel.instructions]
    starts = sorted({0, *kernel.labels.values(), *(i.index + 1 for i in kernel.instructions if _ends_block(i))})
    starts = [start for start in starts if start < len(kernel.instructions)]
    ends = dict(zip(starts, [*starts[1:], len(kernel.instructions)], strict=True))
    states: dict[int, _State] = defaultdict(_State)
    states[0] = _State(accessed=used)  # the first wgmma of all needs a fence too
    waiting = [0]
    while waiting:
        start = waiting.pop()
        state = states[start].copy()
        for index in range(start, ends[start]):
            _step(kernel, kernel.instructions[index], touched[index], state, result)
        for successor in successors(kernel, ends[start] - 1):
            new = successor not in states
            if (states[successor].join(state) or new) and successor < len(kernel.instructions):
                waiting.append(successor)
    return result


def _ends_block(instruction: Instruction) -> bool:
    return instruction.opcode[0] in ("bra", "ret", "exit", "trap")


def successors(kernel: Kernel, last: int) -> list[int]:
    """Indices of the instructions that may follow this one."""
    instruction = kernel.instructions[last]
    following = [last + 1] if last + 1 < len(kernel.instructions) else []
    if instruction.opcode[0] == "bra":
        target = kernel.labels[instruction.operands[0]]
        return [target] if instruction.predicate is None else [target, *following]
    if instruction.opcode[0] in ("ret", "exit", "trap") and instruction.predicate is None:
        return []
    return following


def _step(
    kernel: Kernel, instruction: Instruction, touched: tuple[int, ...], state: _State, result: WgmmaAnalysis
) -> None:
    """Apply one instruction to the state, and note the rules that it breaks."""
    name = instruction.opcode[:2]
    if name == ("wgmma", "fence"):
        state.accessed, state.accumulated, state.multiplied = 0, {}, 0
    elif name == ("wgmma", "commit_group"):
        state.committed, state.issued = _both(state.committed, state.issued), (0, 0)
    elif name == ("wgmma", "wait_group"):
        result.delivered[instruction.index] = result.delivered.get(instruction.index, 0) | state.committed[0]
        if int(instruction.operands[0], 0) == 0:
            state.committed = 0, 0
    elif is_mma(instruction):
        registers = wgmma_registers(kernel, instruction)
        others = 0
        for shape, mask in state.accumulated.items():
            others |= mask if shape != registers.shape else mask & registers.first_factor
        broken = registers.accumulator & (state.accessed | others | state.multiplied)
        broken |= registers.first_factor & (state.accessed | others)
        if broken:
            result.unfenced[instruction.index] = result.unfenced.get(instruction.index, 0) | broken
        state.accumulated[registers.shape] = state.accumulated.get(registers.shape, 0) | registers.accumulator
        state.multiplied |= registers.first_factor
        state.issued = _both(state.issued, (registers.accumulator, registers.first_factor))
    else:
        everything, written = touched
        accumulators, first_factors = _both(state.issued, state.committed)
        if everything & accumulators or written & first_factors:
            result.suspects.add(instruction.index)
        state.accessed |= everything
