"""Path of a warp through a kernel: basic blocks, loops, and the instructions from start to end.

The taken branches depend on data that is unknown here, so these rules choose a path. Rare loops (which repeat a tile
after an empty row or a NaN) and out-of-line calls are left out. The longest remaining path is taken, so that a
prediction is not too fast. In the main loop, a full tile takes the shortest path with all its products, and a tile at
the edge of a mask takes the longest. As in the output of ptxas, only the end of a loop branches back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tools.sass import Instruction

_RARE = 8
"""In a kernel without tensor cores, a loop with more than the main loop's work divided by this repeats a tile."""


@dataclass(frozen=True)
class Block:
    """Instructions between branches, and the addresses of the blocks that may come next: forward, and back."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]
    back: int | None

    @property
    def address(self) -> int:
        return self.instructions[0].address

    @property
    def ends(self) -> bool:
        """Return True if the kernel ends here."""
        last = self.instructions[-1]
        return last.name == "EXIT" and not last.is_conditional

    @property
    def may_end(self) -> bool:
        return self.instructions[-1].name == "EXIT"


@dataclass(frozen=True)
class Loop:
    """Blocks from address `first` to address `last`; the last block branches back to the first."""

    first: int
    last: int

    def holds(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Walk:
    """Instructions of a warp in a kernel with a main loop.

    Args:
        before, after: instructions before and after the loop.
        full, masked: instructions of one step, for a full and for a masked tile.
        skipped: all instructions, if the loop takes no step.
        exited: all instructions of a program without work.
    """

    before: list[Instruction]
    full: list[Instruction]
    masked: list[Instruction]
    after: list[Instruction]
    skipped: list[Instruction]
    exited: list[Instruction]

    def steps(self, full: int, masked: int) -> list[Instruction]:
        """All instructions, with these numbers of full and masked steps."""
        if full + masked == 0:
            return self.skipped
        return [*self.before, *self.full * full, *self.masked * masked, *self.after]


class Flow:
    """Blocks and loops of one kernel."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.blocks = _blocks(instructions)
        ends: dict[int, int] = {}
        for block in self.blocks.values():
            if block.back is not None:
                ends[block.back] = max(ends.get(block.back, 0), block.address)
        # A branch to itself after the last exit is padding.
        reached = self._reached()
        self.loops = [Loop(first, last) for first, last in sorted(ends.items()) if first in reached]

    @cached_property
    def innermost(self) -> list[Loop]:
        return [loop for loop in self.loops if not any(loop.holds(other) for other in self.loops)]

    @cached_property
    def has_products(self) -> bool:
        """Return True if the kernel uses tensor cores."""
        return any(i.is_tensor for block in self.blocks.values() for i in block.instructions)

    def main_loop(self) -> Loop:
        """Innermost loop with the most work; the first of equals.

        Raises:
            ValueError: the kernel has no loop.
        """
        if not self.loops:
            raise ValueError("the kernel has no loop")
        return max(self.innermost, key=lambda loop: (self.work(loop), -loop.first))

    def work(self, loop: Loop) -> int:
        """Number of tensor-core products in a loop, or of fp32 operations if the kernel has no such products."""
        sums = ("FFMA", "FMUL", "FADD")
        return sum(i.is_tensor if self.has_products else i.name in sums for i in self.inside(loop))

    def inside(self, loop: Loop) -> list[Instruction]:
        """The instructions of a loop, in the order of their addresses."""
        return [i for a, b in sorted(self.blocks.items()) if loop.first <= a <= loop.last for i in b.instructions]

    def walk(self) -> Walk:
        """Path through a kernel with a main loop."""
        main = self.main_loop()
        rare_loops = [loop for loop in self.innermost if loop != main and self._is_rare(loop, main)]
        rare = {a for a in self.blocks if any(loop.first <= a <= loop.last for loop in rare_loops)}
        rare |= {a for a, block in self.blocks.items() if any(i.name == "CALL" for i in block.instructions)}
        rare |= self._filling(main)
        # Copies ahead of a loop without steps are not executed.
        around = [loop for loop in self.loops if not loop.holds(main) and any(map(loop.holds, rare_loops))]
        idle = {a for a in self.blocks if any(loop.first <= a <= loop.last for loop in around)}
        inside = {a for a in self.blocks if main.first <= a <= main.last}
        start = min(self.blocks)
        before = self.path(start, {main.first}, avoid=rare)[:-1]
        after_main = [s for s in self.blocks[main.last].successors if s > main.last]
        ends = {a for a, block in self.blocks.items() if block.ends}
        after = self.path(after_main[0], ends, avoid=rare)
        try:
            skipped = self.path(start, ends, avoid=rare | inside)
        except ValueError:  # the loop always takes a step
            skipped = before + after
        exits = {a for a, block in self.blocks.items() if block.may_end}
        return Walk(
            self._listed(before, idle),
            self._listed(self.path(main.first, {main.last}, avoid=rare - inside, shortest=True)),
            self._listed(self.path(main.first, {main.last}, avoid=rare - inside)),
            self._listed(after),
            self._listed(skipped, set(skipped)),
            self._listed(self.path(start, exits, shortest=True, product=0)),
        )

    def _is_rare(self, loop: Loop, main: Loop) -> bool:
        """Return True if a loop repeats a tile: it has products, or much work in a kernel without products."""
        return self.work(loop) > 0 if self.has_products else self.work(loop) * _RARE > self.work(main)

    def _filling(self, main: Loop) -> set[int]:
        """Blocks that fill rows of no sequence in a kernel with products: loops that write to memory, and blocks that
        lead only to them."""
        loops = [loop for loop in self.innermost if loop != main and any(i.name == "STG" for i in self.inside(loop))]
        found = {a for a in self.blocks if self.has_products and any(loop.first <= a <= loop.last for loop in loops)}
        for address in sorted((a for a in self.blocks if found and a < max(found)), reverse=True):
            leads = any(successor in found for successor in self.blocks[address].successors)
            if leads and self._leads(main.first, avoid=found | {address}):
                found.add(address)
        return found

    def _leads(self, end: int, avoid: Collection[int]) -> bool:
        """Return True if a way from the start of the kernel leads to a block."""
        start = min(self.blocks)
        try:
            return start not in avoid and bool(self.path(start, {end}, avoid=avoid))
        except ValueError:
            return False

    def counted(self, steps: Sequence[int]) -> list[Instruction]:
        """Longest path through a kernel, for given numbers of steps per loop, in order of the loops' addresses.

        Raises:
            ValueError: the kernel has another number of loops.
        """
        if len(self.loops) != len(steps):
            raise ValueError(f"the kernel has {len(self.loops)} loops, not {len(steps)}")
        calls = {address for address, block in self.blocks.items() if any(i.name == "CALL" for i in block.instructions)}
        ends = {address for address, block in self.blocks.items() if block.ends}
        return self._listed(self._repeated(self.path(min(self.blocks), ends, avoid=calls), range(len(steps)), steps))

    def _repeated(self, path: list[int], loops: Sequence[int], steps: Sequence[int]) -> list[int]:
        """Repeat each loop's part of a path as often as the loop takes steps; `loops` are the loops that may be in the
        path."""
        outer = [n for n in loops if not any(self.loops[other].holds(self.loops[n]) for other in loops)]
        repeated: list[int] = []
        begin = 0
        for n in outer:
            inside = [k for k, at in enumerate(path) if self.loops[n].first <= at <= self.loops[n].last]
            if inside:
                own = path[inside[0] : inside[-1] + 1]
                inner = [other for other in loops if self.loops[n].holds(self.loops[other])]
                repeated += path[begin : inside[0]] + self._repeated(own, inner, steps) * steps[n]
                begin = inside[-1] + 1
        return repeated + path[begin:]

    def path(
        self,
        start: int,
        ends: Collection[int],
        *,
        avoid: Collection[int] = (),
        shortest: bool = False,
        product: float = 1e6,
    ) -> list[int]:
        """Addresses of the blocks on the longest or the shortest path; `product` is the weight of a matrix product.

        Raises:
            ValueError: no path exists.
        """
        sign = -1 if shortest else 1

        def weight_of(address: int) -> float:
            instructions = self.blocks[address].instructions
            return sign * len(instructions) + product * sum(i.is_tensor for i in instructions)

        best: dict[int, tuple[float, int | None]] = {start: (weight_of(start), None)}
        for address in sorted(self.blocks):
            if address not in best or address in avoid or (address in ends and address != start):
                continue
            for successor in self.blocks[address].successors:
                if successor in self.blocks and successor not in avoid:
                    weight = best[address][0] + weight_of(successor)
                    if successor not in best or weight > best[successor][0]:
                        best[successor] = (weight, address)
        reached = [end for end in ends if end in best and end not in avoid]
        if not reached:
            raise ValueError(f"no way leads from {start:#x} to {', '.join(map(hex, sorted(ends)))}")
        at: int | None = max(reached, key=lambda end: best[end][0])
        path = []
        while at is not None:
            path.append(at)
            at = best[at][1]
        return path[::-1]

    def _reached(self) -> set[int]:
        reached, todo = set(), [min(self.blocks)]
        while todo:
            address = todo.pop()
            if address not in reached and address in self.blocks:
                reached.add(address)
                block = self.blocks[address]
                todo += block.successors
                if block.back is not None:
                    todo.append(block.back)
        return reached

    def _listed(self, path: Sequence[int], idle: Collection[int] = ()) -> list[Instruction]:
        """Instructions of a path, without copies to shared memory in the blocks `idle`."""
        return [i for a in path for i in self.blocks[a].instructions if i.name != "LDGSTS" or a not in idle]


def _blocks(instructions: Sequence[Instruction]) -> dict[int, Block]:
    starts = {instructions[0].address} | {i.target for i in instructions if i.target is not None}
    for one, following in itertools.pairwise(instructions):
        if one.name in ("BRA", "EXIT", "RET", "BRX", "JMP"):
            starts.add(following.address)
    blocks: dict[int, Block] = {}
    own: list[Instruction] = []
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        own.append(one)
        if following is None or following.address in starts:
            blocks[own[0].address] = _block(own, following)
            own = []
    return blocks


def _block(own: list[Instruction], following: Instruction | None) -> Block:
    last, forward, back = own[-1], [], None
    if last.target is not None:
        if last.target > own[0].address:
            forward.append(last.target)
        else:
            back = last.target
    leaves = last.name in ("BRA", "EXIT", "RET", "BRX", "JMP") and not last.is_conditional
    if following is not None and not leaves:
        forward.append(following.address)
    return Block(tuple(own), tuple(forward), back)
