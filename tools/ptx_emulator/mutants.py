"""Faulty versions of a kernel, by which the emulator proves what it sees.

A mutant is a PTX text with one thing taken out: a barrier, a wait for asynchronous copies, the predicate that keeps an
access inside its tensor, a store; on sm_90 also a fence, commit or wait of wgmma, or a proxy fence. Or a launch is left
as it is, and one of its tensors is an element shorter than the kernel believes. Each is run on a launch recorded
earlier. It is seen if there is a finding, if the run cannot go on, or if a result is wrong.
"""

from __future__ import annotations

import copy
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from . import Argument, EmulationError, Report, triton_driver
from . import launch as run_launch

ORDERS = ("lockstep", "reverse", "serial")
# What may be taken out, by the beginning of its operation. Triton's accesses of global memory are all guarded.
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
# How far, in units of the type's precision, a result may be from that of the faultless kernel.
ULPS = 32.0


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as it was asked for: what ``launch`` takes, its tensors as they were before it."""

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
        line: of the PTX text, from 1; 0 for a tensor.
        instruction: the faultless one, or the name of the tensor.
        start, end: its place in the text.
        becomes: what stands there instead.
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
        """The text with the fault."""
        return ptx[: self.start] + self.becomes + ptx[self.end :]


@dataclass(frozen=True)
class Verdict:
    """Whether a mutant was seen, and by what; or what can be said of why not.

    ``changes_nothing``: it was shown that on this launch the fault makes no difference. ``noted``: it was seen, but as
    a note, which fails no run: what compilers rely on beyond the letter of the ISA, see README.md.
    """

    kernel: str
    kind: str
    line: int
    instruction: str
    seen: bool
    how: str
    changes_nothing: bool = False
    noted: bool = False


@contextmanager
def recorded() -> Iterator[list[RecordedLaunch]]:
    """Inside ``triton_driver.emulated``: the launches that are made, which run as always."""
    launches: list[RecordedLaunch] = []

    def launch(
        ptx: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: list[Argument], **options: object
    ) -> Report:
        launches.append(RecordedLaunch(ptx, grid, threads, shared, copied(arguments)))
        return run_launch(ptx, grid, threads, shared, arguments, **options)

    with mock.patch.object(triton_driver, "launch", launch):
        yield launches


def copied(arguments: list[Argument] | tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The arguments with tensors of their own, which share memory where these do."""
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
    """Every one of a launch."""
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


class Judge:
    """Runs the mutants of one launch, whose kernel must have no finding in any order of warps.

    Args:
        recorded_launch: which, of a kernel without faults.
        seconds: how long a mutant may run before it is stopped, in the main thread. It is seen, then.
    """

    def __init__(self, recorded_launch: RecordedLaunch, seconds: float = 60.0) -> None:
        self.launch, self.seconds = recorded_launch, seconds
        self.correct: dict[str, list[Tensor]] = {}
        self.notes: dict[str, Counter[tuple[str, str]]] = {}
        self.lines = {line for _, line in self._run_correct("lockstep").lines}

    def executed_mutants(self) -> list[Mutant]:
        """Those whose instruction this launch executes."""
        return [m for m in mutants(self.launch) if m.argument is not None or m.line in self.lines]

    def verdict(self, mutant: Mutant, orders: tuple[str, ...] = ORDERS) -> Verdict:
        """Run a mutant in each order of warps until it is seen."""
        arguments = self.launch.arguments
        if mutant.argument is not None:
            arguments = shortened(arguments, mutant.argument)
        new_notes: list[tuple[str, str]] = []
        for order in orders:
            if order not in self.correct:
                self._run_correct(order)
            try:
                with time_limit(self.seconds):
                    report, results = self._run(mutant.of(self.launch.ptx), arguments, order)
            except EmulationError as error:
                return self._said(mutant, True, f"cannot run on: {error}".splitlines()[0])
            except TimeoutError:
                return self._said(mutant, True, "does not end")
            if report.findings:
                return self._said(mutant, True, report.findings[0].kind)
            new_notes = new_notes or [*(notes_of(report) - self.notes[order])]
            for number, (result, correct) in enumerate(zip(results, self.correct[order], strict=True)):
                if number != mutant.argument and is_wrong(result, correct):
                    return self._said(mutant, True, "wrong result")
        if new_notes:
            return replace(self._said(mutant, False, f"a note: {new_notes[0][0]}"), noted=True)
        how, changes_nothing = self._why_missed(mutant)
        return replace(self._said(mutant, False, how), changes_nothing=changes_nothing)

    def _said(self, mutant: Mutant, seen: bool, how: str) -> Verdict:
        return Verdict(self.launch.kernel, mutant.kind, mutant.line, mutant.instruction, seen, how)

    def _run_correct(self, order: str) -> Report:
        report, self.correct[order] = self._run(self.launch.ptx, self.launch.arguments, order)
        if report.findings:
            raise ValueError(f"the kernel has findings as it is: {report}")
        self.notes[order] = notes_of(report)
        return report

    def _run(self, ptx: str, arguments: tuple[Argument, ...], order: str) -> tuple[Report, list[Tensor]]:
        own = copied(arguments)
        report = run_launch(
            ptx, self.launch.grid, self.launch.threads, self.launch.shared, list(own), sanitize=True, order=order
        )
        return report, [a.value if isinstance(a.value, Tensor) else torch.empty(0) for a in own]

    def _why_missed(self, mutant: Mutant) -> tuple[str, bool]:
        guard = GUARD.match(mutant.instruction)
        if (
            guard
            and mutant.kind != "guard"
            and not self._is_reached(mutant, f"@{guard.group(1)}{guard.group(2)} trap; ")
        ):
            return "its guard keeps every lane out", True
        if mutant.kind == "guard":
            if guard:
                trap = f"@{'' if guard.group(1) else '!'}{guard.group(2)} trap; "
            else:
                size, given = mutant.instruction.rsplit(",", 2)[1:]
                trap = f"setp.ne.u32 %mutant, {given}, {size}; @%mutant trap; "
            if not self._is_reached(mutant, trap):
                return "the guard holds for every lane", True
        if mutant.kind == "barrier" and any(
            another_beside(self.launch.ptx, mutant, where, USES_SHARED) for where in ("after", "before")
        ):
            return "no shared memory is used between it and another barrier", True
        if mutant.kind == "proxy fence" and another_beside(self.launch.ptx, mutant, "before", WRITES_SHARED):
            return "no shared memory is written between another one and it", True
        if mutant.kind == "proxy fence" and another_beside(self.launch.ptx, mutant, "after", MULTIPLIES):
            return "no wgmma comes between it and another one", True
        return WHY_MISSED.get(mutant.kind, "the result is the same without it"), False

    def _is_reached(self, mutant: Mutant, trap: str) -> bool:
        """Whether a lane that comes to the instruction runs into a trap before it."""
        text = self.launch.ptx[: mutant.start] + trap + self.launch.ptx[mutant.start :]
        body = text.index("{", text.index(".entry")) + 1
        text = f"{text[:body]} .reg .pred %mutant;{text[body:]}"
        try:
            self._run(text, self.launch.arguments, "lockstep")
        except EmulationError:
            return True
        return False


def notes_of(report: Report) -> Counter[tuple[str, str]]:
    """How often each note was made, by its kind and instruction."""
    found: Counter[tuple[str, str]] = Counter()
    for note in report.notes:
        found[note.kind, note.instruction] += note.count
    return found


def another_beside(ptx: str, mutant: Mutant, where: str, ending: str) -> bool:
    """Whether another instruction of a mutant's kind stands "before" it, or "after", with neither a jump nor anything
    that matches `ending` in between."""
    listed = list(statements(ptx))
    here = [start for start, _ in listed].index(mutant.start)
    last = mutant.start
    for start, instruction in listed[here + 1 :] if where == "after" else listed[:here][::-1]:
        between = ptx[min(start, last) : max(start, last)]
        if re.search(r"^(?!\$L__tmp)[\w$]+:", between, re.M):  # those are the debugger's
            return False
        if re.match(REMOVED[mutant.kind], instruction):
            return True
        if re.search(rf"\bbra\b|\bret\b|{ending}", instruction):
            return False
        last = start
    return False


USES_SHARED = r"\.shared|ldmatrix|stmatrix|wgmma|cp\.async"
# cp.async writes until it has been waited for.
WRITES_SHARED = r"(?:st|atom|red)\S*\.shared|stmatrix|cp\.async"
MULTIPLIES = r"wgmma\.mma_async"
WHY_MISSED = {
    "guard": "what it keeps out lies inside the tensor, and makes no difference",
    "barrier": "no access before it meets one of another warp between it and the next barrier",
    "cp.async wait": "nothing is read before the next wait",
    "store": "what it stores is not read, or stored again",
    "wgmma commit": "its products belong to the next group, which is waited for before they are used",
    "wgmma wait": "nothing that it completes is used before the next wait",
    "proxy fence": "another one comes between the writes and the wgmma that reads them",
    SHORT: "its last element is not touched",
}


def shortened(arguments: tuple[Argument, ...], number: int) -> tuple[Argument, ...]:
    """The arguments with the memory of one tensor an element shorter.

    A tensor without gaps ends with its last element. Another may be a view through which a kernel sees more.
    """
    given = arguments[number].value
    start = given.storage_offset()
    everything = given.new_empty(0).set_(given.untyped_storage())
    end = start + given.numel() if given.is_contiguous() else everything.numel()
    value = everything[: end - 1].clone()[start:]
    return (*arguments[:number], replace(arguments[number], value=value), *arguments[number + 1 :])


def is_wrong(result: Tensor, correct: Tensor) -> bool:
    """Whether a result is another one, and not only rounded in another way."""
    if not correct.is_floating_point():
        return not torch.equal(result, correct)
    a, b = result.double(), correct.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return True
    finite = b.isfinite()
    if not finite.any():
        return False
    allowed = ULPS * torch.finfo(correct.dtype).eps * b[finite].abs().max()
    return bool((a[finite] - b[finite]).abs().max() > allowed)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so long."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
