"""Spills of a kernel: accesses to local memory in its machine code, inside and outside its hot loop.

A program of an attention kernel runs one loop over tiles, and around it code that runs once or hardly ever. Spills
outside the loop cost a few accesses per program; spills inside cost accesses per tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.control_flow import Flow
from tools.sass import Instruction

_LOCAL = ("LDL", "STL")


class NoHotLoopError(ValueError):
    """Error: a kernel has no loop with products of tensor cores."""


@dataclass(frozen=True)
class Spills:
    """Numbers of instructions that read or write local memory, in a kernel's hot loop and elsewhere."""

    hot: int
    elsewhere: int


def hot_loop(code: Sequence[Instruction]) -> Sequence[Instruction]:
    """The loop over tiles: the main one of control_flow.py, if it has products of tensor cores.

    Raises:
        NoHotLoopError: no loop has any.
    """
    flow = Flow(code)
    body = flow.inside(flow.main_loop()) if flow.loops else []
    if not any(i.is_tensor for i in body):
        raise NoHotLoopError("no loop has a product of tensor cores")
    return body


def is_serialised(code: Sequence[Instruction]) -> bool:
    """Return True if each product of a wgmma in the hot loop waits for the one before, which ptxas does if it cannot
    prove that nothing else touches the sums. Otherwise only the last of several on the same sums is waited for."""
    products = [i for i in hot_loop(code) if i.name == "HGMMA"]
    return bool(products) and all("gsb0" in i.operands for i in products)


def spills(code: Sequence[Instruction]) -> Spills:
    """Accesses to local memory in the hot loop, branches that only some steps take included, and outside it."""
    hot = sum(i.name in _LOCAL for i in hot_loop(code))
    return Spills(hot, sum(i.name in _LOCAL for i in code) - hot)
