"""Shadow state: who wrote and read each granule of memory, when, and what may not follow.

An epoch of a CTA lasts from one barrier to the next. Within an epoch nothing orders two warps, so a write and another
access of a different warp to the same bytes is a race. Within a warp, bar.warp.sync begins a new epoch of the warp.
A granule is as wide as the kernel's narrowest access, so that an access always covers whole granules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .machine import Machine

NOBODY = -1


def _rows(shadow: np.ndarray, places: np.ndarray, total: int, granule: int) -> np.ndarray:
    """The granules of each access, one row an access. Accesses are aligned to their size."""
    return shadow.reshape(-1, max(1, total // granule))[places >> (total.bit_length() - 1)]


def _set_rows(shadow: np.ndarray, places: np.ndarray, total: int, granule: int, values: np.ndarray | bool) -> None:
    column = values[:, None] if isinstance(values, np.ndarray) else values
    shadow.reshape(-1, max(1, total // granule))[places >> (total.bit_length() - 1)] = column


def _pick(values: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    return values if lanes is None else values[lanes]


class SharedShadow:
    def __init__(self, machine: Machine, size: int, stride: int, granule: int) -> None:
        granules = size // granule
        self.machine, self.granule, self.stride = machine, granule, stride
        self.writer = np.full(granules, NOBODY, np.int32)
        self.write_epoch = np.zeros(granules, np.int32)
        self.write_warp_epoch = np.zeros(granules, np.int32)
        self.read_epoch = np.zeros((granules, machine.warps), np.int32)
        self.in_flight = np.zeros(granules, bool)
        self.any_in_flight = False

    def read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        machine, granule = self.machine, self.granule
        thread, epoch = _pick(machine.thread, lanes)[:, None], _pick(machine.epoch, lanes)[:, None]
        warp = _pick(machine.warp, lanes)[:, None]
        writer = _rows(self.writer, places, total, granule)
        unwritten = writer < 0
        if unwritten.any():
            self._report("shared bytes read that were never written", unwritten, lanes, places, index)
        if self.any_in_flight:
            in_flight = _rows(self.in_flight, places, total, granule)
            if in_flight.any():
                self._report("shared read of bytes with a cp.async in flight", in_flight, lanes, places, index)
        fresh = (_rows(self.write_epoch, places, total, granule) == epoch) & (writer != thread) & ~unwritten
        if fresh.any():
            of_other = fresh & (writer // 32 != warp)
            if of_other.any():
                kind = "shared race: read after another warp's write without a barrier"
                self._report(kind, of_other, lanes, places, index, writer)
            same_step = (
                _rows(self.write_warp_epoch, places, total, granule) == _pick(machine.warp_epoch, lanes)[:, None]
            )
            within = fresh & ~of_other & same_step
            if within.any():
                kind = "shared race: read after another lane's write without bar.warp.sync"
                self._report(kind, within, lanes, places, index, writer)
        readers = self.read_epoch.reshape(-1, max(1, total // granule), machine.warps)
        readers[places >> (total.bit_length() - 1), :, warp[:, 0]] = epoch

    def write(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, data: np.ndarray) -> None:
        """Of bytes that are in memory already; data are the bits that each access wrote."""
        self.check_overwrite(lanes, places, total, index, "write")
        machine, granule = self.machine, self.granule
        thread = _pick(machine.thread, lanes)
        self.mark_written(lanes, places, total)
        writer = _rows(self.writer, places, total, granule)
        clash = writer != thread[:, None]
        if clash.any():
            now = self.machine.shared.data.view(data.dtype).reshape(-1, data.shape[1])[
                places >> (total.bit_length() - 1)
            ]
            differ = (now != data).any(1)
            if differ.any():
                kind = "shared race: two lanes of one store write different values"
                self._report(kind, differ[:, None], lanes, places, index, writer)
            elif (writer // 32 != thread[:, None] // 32).any():
                kind = "several warps store the same value to the same shared bytes"
                self._report(kind, clash, lanes, places, index, writer, note=True)

    def check_overwrite(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, what: str) -> None:
        """Before a write, or a copy that will write: nobody else may have accessed these bytes since the barrier."""
        machine, granule = self.machine, self.granule
        epoch, warp = _pick(machine.epoch, lanes)[:, None], _pick(machine.warp, lanes)[:, None]
        if self.any_in_flight:
            in_flight = _rows(self.in_flight, places, total, granule)
            if in_flight.any():
                self._report(f"shared {what} to bytes with a cp.async in flight", in_flight, lanes, places, index)
        writer = _rows(self.writer, places, total, granule)
        written = (_rows(self.write_epoch, places, total, granule) == epoch) & (writer >= 0) & (writer // 32 != warp)
        if written.any():
            kind = f"shared race: {what} after another warp's write without a barrier"
            self._report(kind, written, lanes, places, index, writer)
        by_granule = self.read_epoch.reshape(-1, max(1, total // granule), machine.warps)
        read = by_granule[places >> (total.bit_length() - 1)] == epoch[:, :, None]
        read[np.arange(len(read)), :, warp[:, 0]] = False
        if read.any():
            kind = f"shared race: {what} after another warp's read without a barrier"
            self._report(kind, read.any(2), lanes, places, index)

    def mark_written(self, lanes: np.ndarray | None, places: np.ndarray, total: int) -> None:
        machine, granule = self.machine, self.granule
        _set_rows(self.writer, places, total, granule, _pick(machine.thread, lanes))
        _set_rows(self.write_epoch, places, total, granule, _pick(machine.epoch, lanes))
        _set_rows(self.write_warp_epoch, places, total, granule, _pick(machine.warp_epoch, lanes))

    def mark_in_flight(self, places: np.ndarray, total: int, value: bool) -> None:
        _set_rows(self.in_flight, places, total, self.granule, value)
        self.any_in_flight = value or bool(self.in_flight.any())

    def initialised(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        unwritten = _rows(self.writer, places, total, self.granule) < 0
        if unwritten.any():
            self._report("shared bytes read that were never written", unwritten, lanes, places, index)

    def _report(
        self, kind: str, wrong: np.ndarray, lanes: np.ndarray | None, places: np.ndarray, index: int,
        writer: np.ndarray | None = None, note: bool = False,
    ) -> None:  # fmt: skip
        access, granule = np.argwhere(wrong)[0]
        lane = int(access if lanes is None else lanes[access])
        byte = int(places[access] + granule * self.granule) % self.stride
        by = "" if writer is None else f", written by thread {writer[access, granule]}"
        self.machine.report(kind, index, f"{self.machine.thread_name(lane)}: byte {byte}{by}", note=note)


class GlobalShadow:
    """Of all programs of a launch; nothing orders two CTAs."""

    def __init__(self, size: int, granule: int) -> None:
        granules = size // granule
        self.granule = granule
        self.writer = np.zeros(granules, np.int64)  # thread of the grid + 1
        self.write_epoch = np.zeros(granules, np.int32)
        self.reader = np.zeros(granules, np.int32)  # CTA + 1, or SEVERAL

    def read(self, machine: Machine, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        self._check_writer(machine, lanes, places, total, index, "read")
        cta = _pick(machine.cta_number, lanes) + 1
        reader = _rows(self.reader, places, total, self.granule)
        same = (reader == 0) | (reader == cta[:, None])
        rows = self.reader.reshape(-1, max(1, total // self.granule))
        at = places >> (total.bit_length() - 1)
        rows[at] = np.where(same, cta[:, None], SEVERAL)
        clash = rows[at] != cta[:, None]
        if clash.any():
            rows[at[clash.any(1)]] = SEVERAL

    def write(self, machine: Machine, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        self._check_writer(machine, lanes, places, total, index, "write")
        cta = _pick(machine.cta_number, lanes)[:, None]
        reader = _rows(self.reader, places, total, self.granule)
        read = (reader != 0) & (reader != cta + 1)
        if read.any():
            self._report(machine, "global race: write of bytes that another CTA read", read, lanes, places, index)
        thread = _pick(machine.thread_of_grid, lanes) + 1
        _set_rows(self.writer, places, total, self.granule, thread)
        _set_rows(self.write_epoch, places, total, self.granule, _pick(machine.epoch, lanes))
        writer = _rows(self.writer, places, total, self.granule)
        clash = writer != thread[:, None]
        if clash.any():
            of_other_cta = clash & ((writer - 1) // machine.threads != cta)
            if of_other_cta.any():
                kind = "global race: write of bytes that another CTA wrote"
                self._report(machine, kind, of_other_cta, lanes, places, index)
            else:
                kind = "several lanes of a CTA store to the same global bytes at once"
                self._report(machine, kind, clash, lanes, places, index, note=True)

    def _check_writer(
        self, machine: Machine, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, verb: str
    ) -> None:
        writer = _rows(self.writer, places, total, self.granule)
        thread = _pick(machine.thread_of_grid, lanes)[:, None] + 1
        of_other = (writer > 0) & (writer != thread)
        if not of_other.any():
            return
        other_cta = of_other & ((writer - 1) // machine.threads != _pick(machine.cta_number, lanes)[:, None])
        if other_cta.any():
            kind = f"global race: {verb} of bytes that another CTA wrote"
            self._report(machine, kind, other_cta, lanes, places, index)
        same_epoch = _rows(self.write_epoch, places, total, self.granule) == _pick(machine.epoch, lanes)[:, None]
        other_warp = (writer - 1) % machine.threads // 32 != _pick(machine.warp, lanes)[:, None]
        within = of_other & ~other_cta & same_epoch & other_warp
        if within.any():
            kind = f"global race: {verb} after another warp's write without a barrier"
            self._report(machine, kind, within, lanes, places, index)

    def _report(
        self, machine: Machine, kind: str, wrong: np.ndarray, lanes: np.ndarray | None, places: np.ndarray,
        index: int, note: bool = False,
    ) -> None:  # fmt: skip
        access, granule = np.argwhere(wrong)[0]
        lane = int(access if lanes is None else lanes[access])
        where = machine.memory.tensors.describe(int(places[access] + granule * self.granule))
        machine.report(kind, index, f"{machine.thread_name(lane)}: {where}", note=note)


SEVERAL = -2
