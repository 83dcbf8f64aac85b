"""Detection of mutants that cannot be seen because they change nothing, without running them.

A mutant without effect is not a fault, so it does not belong in a sample of faults. Some are found from the kernel's
jumps: on every path another instruction already enforces the order that the mutant removed. Others are found from the
launch: a guard that held for every lane, or a tensor whose last element was not accessed. The detection does not use
the checks that mutants test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from .kernel import Instruction, Kernel
from .launch import Argument
from .launch import launch as run_launch
from .mutants import GUARD, SHORT, Mutant, RecordedLaunch, copied, end_of
from .parser import parse
from .wgmma_analysis import WgmmaRegisters, accesses, is_mma, successors, wgmma_registers

Test = Callable[[Instruction], bool]


def idle_mutants(recorded: RecordedLaunch, mutants: Iterable[Mutant], reach: dict[str, int]) -> dict[Mutant, str]:
    """Mutants that change nothing, with reasons.

    Args:
        recorded: the launch, of a kernel without faults.
        mutants: some of its mutants.
        reach: ``reach`` of the report of its faultless run.
    """
    mutants = list(mutants)
    jumps = Jumps(next(iter(parse(recorded.ptx).values())))
    found = _unguarded(recorded, mutants)
    for mutant in mutants:
        if mutant.kind == SHORT:
            if not _last_is_touched(recorded, mutant, reach):
                found[mutant] = "its last element is not touched"
        elif mutant.kind in COVERED and mutant not in found:
            reason = COVERED[mutant.kind](jumps, jumps.instruction(mutant))
            if reason is not None:
                found[mutant] = reason
    return found


# ---- by what the launch did


def _last_is_touched(recorded: RecordedLaunch, mutant: Mutant, reach: dict[str, int]) -> bool:
    assert mutant.argument is not None
    argument = recorded.arguments[mutant.argument]
    if argument.name not in reach or re.search(r"\b(?:atom|red)\.", recorded.ptx):
        return True
    return reach[argument.name] > (end_of(argument.value) - 1) * argument.value.element_size()


def _unguarded(recorded: RecordedLaunch, mutants: list[Mutant]) -> dict[Mutant, str]:
    """Mutants of guards that held for every lane, and of instructions whose guard excluded every lane.

    Before each a store is put in, into a byte of its own, of the lanes for which the fault would make a difference.
    """
    probes = [(mutant, probe) for mutant in mutants if (probe := _probe(mutant)) is not None]
    if not probes:
        return {}
    text, end = [], 0
    for number, (mutant, probe) in sorted(enumerate(probes), key=lambda numbered: numbered[1][0].start):
        text += [recorded.ptx[end : mutant.start], f"{probe} st.global.b8 [%idle_flags + {number}], %idle_one; "]
        end = mutant.start
    ptx = "".join([*text, recorded.ptx[end:]])
    entry = re.search(r"\.entry\s+[\w$]+\s*\(", ptx)
    assert entry is not None, "an instruction with a guard reads a parameter"
    body = ptx.index("{", entry.end()) + 1
    registers = (
        ".reg .pred %idle; .reg .b16 %idle_one; .reg .b64 %idle_flags; "
        "ld.param.b64 %idle_flags, [idle_flags]; mov.b16 %idle_one, 1; "
    )
    ptx = f"{ptx[: entry.end()]}.param .u64 idle_flags, {ptx[entry.end() : body]} {registers}{ptx[body:]}"
    flags = torch.zeros(len(probes), dtype=torch.uint8)
    arguments = [Argument("idle_flags", "*u8", flags), *copied(recorded.arguments)]
    run_launch(ptx, recorded.grid, recorded.threads, recorded.shared, arguments, sanitize=False)
    return {
        mutant: "the guard holds for every lane" if mutant.kind == "guard" else "its guard keeps every lane out"
        for (mutant, _), flag in zip(probes, flags.tolist(), strict=True)
        if not flag
    }


def _probe(mutant: Mutant) -> str | None:
    """Predicate of the lanes for which the fault matters, with the code that computes it; None without a guard."""
    guard = GUARD.match(mutant.instruction)
    if mutant.kind != "guard":
        return None if guard is None else f"@{guard.group(1)}{guard.group(2)}"
    if guard is not None:
        return f"@{'' if guard.group(1) else '!'}{guard.group(2)}"
    size, given = mutant.instruction.rsplit(",", 2)[1:]
    return f"setp.ne.u32 %idle, {given}, {size}; @%idle"


# ---- by the kernel's jumps


@dataclass
class Jumps:
    """A kernel as a graph of instructions."""

    kernel: Kernel

    @cached_property
    def after(self) -> list[list[int]]:
        """Possible next instructions per instruction; the number of instructions stands for the end."""
        end = len(self.kernel.instructions)
        return [self._following(i) or [end] for i in self.kernel.instructions]

    @cached_property
    def before(self) -> list[list[int]]:
        """Possible previous instructions per instruction; -1 stands for the beginning."""
        found: list[list[int]] = [[] for _ in self.kernel.instructions]
        found[0].append(-1)
        for index, following in enumerate(self.after):
            for place in following:
                if place < len(found):
                    found[place].append(index)
        return found

    def _following(self, instruction: Instruction) -> list[int]:
        following = successors(self.kernel, instruction.index)
        leaves = instruction.opcode[0] in ("ret", "exit", "trap") and instruction.predicate is not None
        return [*following, len(self.kernel.instructions)] if leaves else following

    def instruction(self, mutant: Mutant) -> Instruction:
        """Instruction that a mutant leaves out."""
        return next(i for i in self.kernel.instructions if i.line == mutant.line and i.text == mutant.instruction)

    def first_met(
        self, start: Instruction, covers: Test, matters: Test, *, backward: bool = False, ends: bool
    ) -> list[Instruction] | None:
        """Follow every path from an instruction to the first instruction that covers it; return these.

        None if there is a way on which one that matters comes first. ends: whether a way may end without either.
        """
        graph, instructions = (self.before if backward else self.after), self.kernel.instructions
        found, seen, waiting = [], set(), list(graph[start.index])
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            if not 0 <= index < len(instructions):
                if not ends:
                    return None
            elif covers(instructions[index]) and instructions[index].predicate is None:
                found.append(instructions[index])
            elif matters(instructions[index]):
                return None
            else:
                waiting += graph[index]
        return found

    # ---- wgmma

    @cached_property
    def products(self) -> dict[int, WgmmaRegisters]:
        """Return the registers of each wgmma.mma_async."""
        return {i.index: wgmma_registers(self.kernel, i) for i in self.kernel.instructions if is_mma(i)}

    @cached_property
    def accumulators(self) -> int:
        return _union(registers.accumulator for registers in self.products.values())

    @cached_property
    def first_factors(self) -> int:
        return _union(registers.first_factor for registers in self.products.values())

    def touches(self, instruction: Instruction) -> bool:
        """Return True if an instruction accesses an accumulator of any product, or writes a first factor.

        A product does so if it shares registers with one of another shape, or in another role.
        """
        if not is_mma(instruction):
            everything, written = accesses(self.kernel, instruction)
            return bool(everything & self.accumulators or written & self.first_factors)
        own = self.products[instruction.index]
        others = self.products.values()
        return bool(
            own.first_factor & self.accumulators
            or own.accumulator & self.first_factors
            or any(own.accumulator & other.accumulator and own.shape != other.shape for other in others)
        )

    def touches_any(self, instruction: Instruction) -> bool:
        """`touches`, and whether it reads a first factor."""
        return self.touches(instruction) or (
            not is_mma(instruction) and bool(accesses(self.kernel, instruction)[0] & self.first_factors)
        )

    def needs_complete_products(self, instruction: Instruction) -> bool:
        """Return True if a product in flight could matter to an instruction, of this warp or of another one."""
        return is_barrier(instruction) or writes_shared(instruction) or self.touches(instruction)


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def named(*name: str) -> Test:
    return lambda instruction: instruction.opcode[: len(name)] == name


def uses_memory(instruction: Instruction) -> bool:
    """Return True if an instruction accesses shared state: all memory but parameters and local memory."""
    name = instruction.opcode[0]
    own = {"param", "local"} & set(instruction.opcode)
    return is_mma(instruction) or (name in ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix") and not own)


def writes_shared(instruction: Instruction) -> bool:
    """Return True for a write to shared memory; cp.async counts until a wait for it."""
    name, spaces = instruction.opcode[0], {modifier.split("::")[0] for modifier in instruction.opcode}
    if name in ("st", "atom", "red"):
        return not {"global", "param", "local"} & spaces
    return name in ("cp", "stmatrix")


def is_barrier(instruction: Instruction) -> bool:
    return instruction.opcode[0] in ("bar", "barrier") and "warp" not in instruction.opcode


def waits_for_all(instruction: Instruction) -> bool:
    return _waits(instruction) and pending(instruction) == 0


_fences = named("wgmma", "fence")
_commits = named("wgmma", "commit_group")
_waits = named("wgmma", "wait_group")
_proxy_fences = named("fence", "proxy")


def pending(instruction: Instruction) -> int:
    """Number of groups that a wait leaves in flight."""
    return int(instruction.operands[0], 0)


def barrier_is_covered(jumps: Jumps, barrier: Instruction) -> str | None:
    if any(
        jumps.first_met(barrier, is_barrier, uses_memory, backward=backward, ends=True) is not None
        for backward in (False, True)
    ):
        return "no memory is used between it and other barriers"
    return None


def proxy_fence_is_covered(jumps: Jumps, fence: Instruction) -> str | None:
    if jumps.first_met(fence, _proxy_fences, is_mma, ends=True) is not None:
        return "other proxy fences come before any wgmma"
    if jumps.first_met(fence, _proxy_fences, writes_shared, backward=True, ends=True) is not None:
        return "no shared memory is written between other proxy fences and it"
    return None


def wgmma_fence_is_covered(jumps: Jumps, fence: Instruction) -> str | None:
    if jumps.first_met(fence, _fences, is_mma, ends=True) is not None:
        return "other fences come before any wgmma"
    if jumps.first_met(fence, _fences, jumps.touches_any, backward=True, ends=False) is not None:
        return "no register of a wgmma is used between other fences and it"
    return None


def commit_is_covered(jumps: Jumps, commit: Instruction) -> str | None:
    """Reason why a missing commit has no effect, or None: its products join the next group, or it has none. Each wait
    must then be for all groups, not for a number."""

    def not_for_all(instruction: Instruction) -> bool:
        return _waits(instruction) and not waits_for_all(instruction)

    def unsettled(instruction: Instruction) -> bool:
        return not_for_all(instruction) or jumps.needs_complete_products(instruction)

    # The next group comes before any wait; or nothing needs the products before the wait after the next group.
    for matters_before, matters_after in ((_waits, not_for_all), (unsettled, unsettled)):
        following = jumps.first_met(commit, _commits, matters_before, ends=False)
        if following is not None and all(
            jumps.first_met(other, waits_for_all, matters_after, ends=False) is not None for other in following
        ):
            return "its products are waited for with those of the next group"
    before = jumps.first_met(commit, _commits, is_mma, backward=True, ends=True)
    if before is not None and jumps.first_met(commit, waits_for_all, _waits, ends=True) is not None:
        return "it commits nothing"
    return None


def wait_is_covered(jumps: Jumps, wait: Instruction) -> str | None:
    def covers(instruction: Instruction) -> bool:
        return _waits(instruction) and pending(instruction) <= pending(wait)

    if jumps.first_met(wait, covers, jumps.needs_complete_products, ends=False) is not None:
        return "another wait comes before anything uses its products or overwrites their factors"
    return None


COVERED: dict[str, Callable[[Jumps, Instruction], str | None]] = {
    "barrier": barrier_is_covered,
    "proxy fence": proxy_fence_is_covered,
    "wgmma fence": wgmma_fence_is_covered,
    "wgmma commit": commit_is_covered,
    "wgmma wait": wait_is_covered,
}
"""By kind: why a neighbour keeps the order that the instruction keeps, or None."""
