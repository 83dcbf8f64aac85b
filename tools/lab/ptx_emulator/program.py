"""A translated kernel: basic blocks, each with the Python function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .kernel import Kernel


class Step(Enum):
    """Last step of a block."""

    NEXT = auto()
    BRANCH = auto()
    EXIT = auto()
    BARRIER = auto()


@dataclass
class Block:
    """One basic block.

    Args:
        first, last: indices of its instructions, both inclusive.
        step, target: kind of its last step, and the target block of a branch.
        function: runs it; returns the lanes that take its branch or exit, or None for all.
    """

    first: int
    last: int
    step: Step = Step.NEXT
    target: int = 0
    function: Callable[..., Any] = lambda *_: None


@dataclass
class Program:
    """A kernel translated. Granules are the narrowest accesses to shared and global memory, in bytes."""

    kernel: Kernel
    blocks: list[Block]
    shared_granule: int
    global_granule: int
