"""Where a kernel spills: accesses to local memory in its machine code, inside and outside the loop that costs the time.

A program of an attention kernel runs one loop over tiles, and around it code that runs once or hardly ever. What is
spilled outside costs a few accesses a program; inside it would be paid for at every tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sass import Instruction

_LOCAL = ("LDL", "STL")


class NoHotLoopError(ValueError):
    """A kernel whose products are not in loops, or not of tensor cores."""


@dataclass(frozen=True)
class Spills:
    """How many instructions of a kernel read or write local memory, in its hot loop and elsewhere."""

    hot: int
    elsewhere: int


def hot_loop(code: Sequence[Instruction]) -> Sequence[Instruction]:
    """The loop, without another inside, with the most matrix products of tensor cores; the first of several.

    That is the loop over tiles: those that repeat a tile have smaller ones.

    Raises:
        NoHotLoopError: no loop has any.
    """
    ends: dict[int, int] = {}
    for i in code:
        if i.target is not None and i.target < i.address:
            ends[i.target] = max(ends.get(i.target, 0), i.address)
    innermost = {a: b for a, b in ends.items() if not any((a, b) != o and a <= o[0] <= o[1] <= b for o in ends.items())}
    bodies = [[i for i in code if first <= i.address <= last] for first, last in sorted(innermost.items())]
    best = max(bodies, key=_products, default=[])
    if not _products(best):
        raise NoHotLoopError("no loop has a product of tensor cores")
    return best


def spills(code: Sequence[Instruction]) -> Spills:
    """Accesses to local memory in the hot loop, branches that only some steps take included, and outside it."""
    hot = sum(i.name in _LOCAL for i in hot_loop(code))
    return Spills(hot, sum(i.name in _LOCAL for i in code) - hot)


def _products(code: Sequence[Instruction]) -> int:
    return sum(i.is_tensor for i in code)
