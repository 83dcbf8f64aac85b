"""Schedule of a launch's programs on all multiprocessors: place and time of each, from their durations."""

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
    events: list[tuple[float, int]] = []

    def plan(index: int) -> None:
        machine = machines[index]
        if machine.running:
            sharing = len(machine.running)
            left = min(share * cycles(work, sharing) for work, share in machine.running)
            heapq.heappush(events, (machine.time + left, index))

    def fill(indices: list[int]) -> None:
        for _ in range(resident):
            for index in indices:
                if waiting and len(machines[index].running) < resident:
                    machines[index].running.append([waiting.popleft(), 1.0])
        for index in indices:
            plan(index)

    fill(list(range(len(machines))))
    end = 0.0
    while events:
        end = events[0][0]
        ready = []
        while events and events[0][0] <= end:
            ready.append(heapq.heappop(events)[1])
            machine = machines[ready[-1]]
            sharing, passed = len(machine.running), end - machine.time
            for program in machine.running:
                program[1] -= passed / cycles(program[0], sharing)
            machine.time = end
            machine.running = [program for program in machine.running if program[1] > 1e-9]
        fill(ready)
    return end
