"""Run the mutants of a recorded launch. A mutant is seen if there is a finding, if the run cannot continue, or if a
result is wrong."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .idle_mutants import idle_mutants
from .launch import Argument
from .launch import launch as run_launch
from .mutants import SHORT, Mutant, RecordedLaunch, copied, mutants, shortened
from .report import EmulationError, Report

ORDERS = ("lockstep", "reverse", "serial")
# Largest distance of a result from that of the faultless kernel, in units of the type's precision.
ULPS = 32.0


@dataclass(frozen=True)
class Verdict:
    """Verdict on a mutant: detected, with the finding; or missed, with the reason if known.

    ``noted``: it was seen, but as a note, which fails no run: what compilers rely on beyond the letter of the ISA, see
    README.md.
    """

    kernel: str
    kind: str
    line: int
    instruction: str
    seen: bool
    how: str
    noted: bool = False


class Judge:
    """Runs the mutants of one launch, whose kernel must have no finding in any order of warps.

    Args:
        recorded_launch: launch of a kernel without faults.
        seconds: time limit per mutant, in the main thread. A mutant that exceeds it is seen.
    """

    def __init__(self, recorded_launch: RecordedLaunch, seconds: float = 60.0) -> None:
        self.launch, self.seconds = recorded_launch, seconds
        self.correct: dict[str, list[Tensor]] = {}
        self.notes: dict[str, Counter[tuple[str, str]]] = {}
        report = self._run_correct("lockstep")
        self.lines, self.reach = {line for _, line in report.lines}, report.reach

    def executed_mutants(self) -> list[Mutant]:
        """Mutants whose instruction this launch executes."""
        return [m for m in mutants(self.launch) if m.argument is not None or m.line in self.lines]

    def idle_mutants(self) -> dict[Mutant, str]:
        """Executed mutants that change nothing, with reasons."""
        return idle_mutants(self.launch, self.executed_mutants(), self.reach)

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
        return self._said(mutant, False, WHY_MISSED.get(mutant.kind, "the result is the same without it"))

    def _said(self, mutant: Mutant, seen: bool, how: str) -> Verdict:
        return Verdict(self.launch.kernel, mutant.kind, mutant.line, mutant.instruction, seen, how)

    def _run_correct(self, order: str) -> Report:
        report, self.correct[order] = self._run(self.launch.ptx, self.launch.arguments, order)
        if report.findings:
            raise ValueError(f"the kernel has findings as it is: {report}")
        self.notes[order] = notes_of(report)
        return report

    def _run(self, ptx: str, arguments: tuple[Argument, ...], order: str) -> tuple[Report, list[Tensor]]:
        own = list(copied(arguments))
        report = run_launch(
            ptx, self.launch.grid, self.launch.threads, self.launch.shared, own, sanitize=True, order=order
        )
        return report, [a.value if isinstance(a.value, Tensor) else torch.empty(0) for a in own]


def notes_of(report: Report) -> Counter[tuple[str, str]]:
    """Counts of the notes, by kind and instruction."""
    found: Counter[tuple[str, str]] = Counter()
    for note in report.notes:
        found[note.kind, note.instruction] += note.count
    return found


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


def is_wrong(result: Tensor, correct: Tensor) -> bool:
    """Return True if a result differs by more than rounding."""
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
    """Raise TimeoutError in the main thread after this time."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
