"""A launch's programs on all multiprocessors: which runs where and when, from how long each takes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Work = TypeVar("Work", bound=Hashable)


@dataclass
class _Multiprocessor:
    running: list[list] = field(default_factory=list)  # [work, share of it that is left]
    time: float = 0.0
    version: int = 0


def launch_cycles(
    works: Sequence[Work], cycles: Callable[[Work, int], float], multiprocessors: int, resident: int
) -> float:
    """Cycles until the last program ends.

    Programs start in order; each goes where the first other one ended, at first to one multiprocessor after the other.
    Those that share a multiprocessor go on as fast as ``cycles`` says of so many.

    Args:
        works: of each program.
        cycles: of (work, programs on the multiprocessor).
        multiprocessors: how many there are.
        resident: programs that fit on each.
    """
    waiting = deque(works)
    machines = [_Multiprocessor() for _ in range(min(multiprocessors, len(works)))]
    for _ in range(resident):
        for machine in machines:
            if waiting:
                machine.running.append([waiting.popleft(), 1.0])
    events: list[tuple[float, int, int]] = []

    def plan(index: int) -> None:
        machine = machines[index]
        machine.version += 1
        if machine.running:
            sharing = len(machine.running)
            left = min(share * cycles(work, sharing) for work, share in machine.running)
            heapq.heappush(events, (machine.time + left, machine.version, index))

    for index in range(len(machines)):
        plan(index)
    end = 0.0
    while events:
        now, version, index = heapq.heappop(events)
        machine = machines[index]
        if version != machine.version:
            continue
        sharing, passed = len(machine.running), now - machine.time
        for program in machine.running:
            program[1] -= passed / cycles(program[0], sharing)
        machine.time = end = now
        machine.running = [program for program in machine.running if program[1] > 1e-9]
        while waiting and len(machine.running) < resident:
            machine.running.append([waiting.popleft(), 1.0])
        plan(index)
    return end
