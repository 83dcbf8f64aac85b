"""Faulty versions of a kernel, which test the emulator's checks.

A mutant is a PTX text with one thing taken out: a barrier, a wait for asynchronous copies, the predicate that keeps an
access inside its tensor, a store; on sm_90 also a fence, commit or wait of wgmma, or a proxy fence. Or a launch is left
as it is, and one of its tensors is an element shorter than the kernel believes. `idle_mutants.py` says which of them
change nothing on a launch, `judge.py` runs the others and says whether they are seen.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from torch import Tensor

from . import triton_driver
from .launch import Argument
from .launch import launch as run_launch
from .report import Report

# Instructions that may be taken out, by the beginning of their operation. Triton's accesses of global memory are all
# guarded.
REMOVED = {
    "barrier": r"bar\.sync|barrier\.sync(?:\.aligned)?",
    "cp.async wait": r"cp\.async\.wait_(?:group|all)",
    "store": r"st\.(?:global|shared)|stmatrix",
    "wgmma fence": r"wgmma\.fence",
    "wgmma commit": r"wgmma\.commit_group",
    "wgmma wait": r"wgmma\.wait_group",
    "proxy fence": r"fence\.proxy\.async",
}
GUARDED = r"ld\.global|st\.global|ld\.shared|st\.shared"
SHORT = "tensor one element short"
KINDS = (*REMOVED, "guard", SHORT)
GUARD = re.compile(r"^@(!?)(%\w+)\s+")
COPY = re.compile(r"cp\.async\.c[ag]\.")


@dataclass(frozen=True)
class RecordedLaunch:
    """Recorded launch: the arguments of ``launch``, with tensors as they were before the launch."""

    ptx: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[Argument, ...]

    @property
    def kernel(self) -> str:
        found = re.search(r"\.entry\s+([\w$]+)", self.ptx)
        return found.group(1) if found else "?"


@dataclass(frozen=True)
class Mutant:
    """One fault: its kind and where it is.

    Args:
        kind: one of KINDS.
        line: line of the PTX text, from 1; 0 for a tensor.
        instruction: the faultless one, or the name of the tensor.
        start, end: position of the instruction in the text.
        becomes: replacement text.
        argument: number of the tensor that is made shorter.
    """

    kind: str
    line: int
    instruction: str
    start: int = 0
    end: int = 0
    becomes: str = ""
    argument: int | None = None

    def of(self, ptx: str) -> str:
        """Return the text with the fault."""
        return ptx[: self.start] + self.becomes + ptx[self.end :]


@contextmanager
def recorded() -> Iterator[list[RecordedLaunch]]:
    """Record the launches made inside ``triton_driver.emulated``; they still run."""
    launches: list[RecordedLaunch] = []

    def launch(
        ptx: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: list[Argument], **options: object
    ) -> Report:
        launches.append(RecordedLaunch(ptx, grid, threads, shared, copied(arguments)))
        return run_launch(ptx, grid, threads, shared, arguments, **options)

    with mock.patch.object(triton_driver, "launch", launch):
        yield launches


def copied(arguments: list[Argument] | tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Copy the arguments; tensors that share memory still share memory in the copy."""
    known: dict[int, object] = {}
    return tuple(
        replace(a, value=copy.deepcopy(a.value.detach(), known)) if isinstance(a.value, Tensor) else a
        for a in arguments
    )


def statements(ptx: str) -> Iterator[tuple[int, str]]:
    """(place in the text, instruction without its semicolon) of the kernel's body."""
    body = ptx.index("{", ptx.index(".entry"))
    text = re.sub(r"//[^\n]*|\.loc\b[^\n]*", lambda found: " " * len(found.group()), ptx)
    start = body
    while (end := text.find(";", start)) >= 0:
        leading = re.compile(r"(?:[\s{}]|[\w$]+:)*").match(text, start, end)
        assert leading is not None
        if leading.end() < end:
            yield leading.end(), text[leading.end() : end]
        start = end + 1


def mutants(recorded_launch: RecordedLaunch) -> list[Mutant]:
    """All mutants of a launch."""
    ptx = recorded_launch.ptx
    found = []
    for start, instruction in statements(ptx):
        guard = GUARD.match(instruction)
        operation = instruction[guard.end() :] if guard else instruction
        line, end, shown = ptx.count("\n", 0, start) + 1, start + len(instruction), " ".join(instruction.split())
        for kind, pattern in REMOVED.items():
            if re.match(rf"(?:{pattern})\b", operation):
                found.append(Mutant(kind, line, shown, start, end + 1))
        if guard and re.match(GUARDED, operation):
            found.append(Mutant("guard", line, shown, start, end, operation))
        elif COPY.match(operation) and operation.count(",") == 3:
            found.append(Mutant("guard", line, shown, start, end, instruction[: instruction.rindex(",")]))
    return found + [
        Mutant(SHORT, 0, a.name, argument=number)
        for number, a in enumerate(recorded_launch.arguments)
        if isinstance(a.value, Tensor) and a.value.numel() > 0
    ]


def end_of(tensor: Tensor) -> int:
    """Elements of its storage up to a tensor's end; all if it has gaps, for a kernel may see more through a view."""
    if tensor.is_contiguous():
        return tensor.storage_offset() + tensor.numel()
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def shortened(arguments: tuple[Argument, ...], number: int) -> tuple[Argument, ...]:
    """Copy the arguments, with the memory of one tensor shortened by an element."""
    given = arguments[number].value
    everything = given.new_empty(0).set_(given.untyped_storage())
    value = everything[: end_of(given) - 1].clone()[given.storage_offset() :]
    return (*arguments[:number], replace(arguments[number], value=value), *arguments[number + 1 :])
