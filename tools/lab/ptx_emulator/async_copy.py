"""cp.async: copies from global to shared memory that arrive when the thread waits for their group.

Between copy and wait the bytes are in flight and must not be accessed. After the wait, the waiting thread sees the
bytes; other warps see them after the next barrier, like other writes of the thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import Array
from .machine import Machine


@dataclass
class Copy:
    """One executed cp.async. All arrays have an element a lane; source -1 stands for zeros."""

    waiting: np.ndarray
    target: np.ndarray
    source: np.ndarray
    size: int
    given: np.ndarray
    group: np.ndarray
    index: int


class AsyncCopies:
    """The copies in flight of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.groups = np.zeros(machine.lanes, np.int32)
        self.copies: list[Copy] = []

    def start(
        self, mask: Array, target: Array, target_offset: int, source: Array, source_offset: int, size: int,
        given: Array | None, index: int,
    ) -> None:  # fmt: skip
        """given: bytes to copy, the rest up to size is zero; None for all."""
        machine, shared, memory = self.machine, self.machine.shared, self.machine.memory
        lanes, targets = shared.place(mask, target, target_offset, size, index)
        if not targets.size:
            return
        waiting = np.zeros(machine.lanes, bool)
        waiting[slice(None) if lanes is None else lanes] = True
        amount = np.full(machine.lanes, size) if given is None else machine.full(given).astype(np.int64)
        reading = waiting & (amount > 0)
        from_lanes, sources = memory.place(reading, source, source_offset, size, index)
        if sources.size:
            memory.check_read(from_lanes, sources, size, index)
        everywhere = slice(None)
        source_places = np.full(machine.lanes, -1)
        source_places[everywhere if from_lanes is None else from_lanes] = sources
        target_places = np.full(machine.lanes, -1)
        target_places[everywhere if lanes is None else lanes] = targets
        if shared.shadow is not None:
            shared.shadow.check_overwrite(lanes, targets, size, index, "cp.async")
            shared.shadow.mark_in_flight(targets, size, True)
        self.copies.append(Copy(waiting, target_places, source_places, size, amount, self.groups.copy(), index))

    def commit(self, mask: Array) -> None:
        self.groups = self.groups + (1 if mask is None else mask.astype(np.int32))

    def wait(self, mask: Array, pending: int | None) -> None:
        """Wait until at most `pending` groups of the thread are in flight; None: until nothing is in flight."""
        for copy in self.copies:
            ready = copy.waiting if pending is None else copy.waiting & (copy.group < self.groups - pending)
            if mask is not None:
                ready = ready & mask
            if ready.any():
                self._arrive(copy, np.flatnonzero(ready))
        self.copies = [copy for copy in self.copies if copy.waiting.any()]

    def _arrive(self, copy: Copy, lanes: np.ndarray) -> None:
        shared, size = self.machine.shared, copy.size
        targets, sources = copy.target[lanes], copy.source[lanes]
        data = self.machine.memory.data.reshape(-1, size)[sources // size]
        given = np.where(sources < 0, 0, copy.given[lanes])
        if (given < size).any():
            data[np.arange(size) >= given[:, None]] = 0
        shared.data.reshape(-1, size)[targets // size] = data
        if shared.shadow is not None:
            shared.shadow.mark_written(lanes, targets, size, by_copy=True)
            shared.shadow.mark_in_flight(targets, size, False)
        copy.waiting[lanes] = False

    def finish(self) -> None:
        """Report copies that were never waited for, at the end of the program."""
        for copy in self.copies:
            self.machine.report("cp.async never waited for", copy.index, "")


def start(machine: Machine, *arguments: object) -> None:
    machine.extension(AsyncCopies).start(*arguments)  # type: ignore[arg-type]


def commit(machine: Machine, mask: Array) -> None:
    machine.extension(AsyncCopies).commit(mask)


def wait(machine: Machine, mask: Array, pending: int | None) -> None:
    machine.extension(AsyncCopies).wait(mask, pending)
