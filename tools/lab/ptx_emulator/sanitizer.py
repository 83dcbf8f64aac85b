"""Shadow state of memory: writer and reader of each granule, their time, and checks for races.

An epoch of a CTA lasts from one barrier to the next. Within an epoch nothing orders two warps, so a write and another
access of a different warp to the same bytes is a race. Within a warp, bar.warp.sync begins a new epoch of the warp.
A granule is as wide as the kernel's narrowest access, so that an access always covers whole granules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from .state import EPOCH_BITS, THREAD_BITS, State

BLOCK = 16
"""Bytes of the widest access."""
LOG_LIMIT = 256


def _rows(shadow: np.ndarray, places: np.ndarray, total: int, granule: int) -> np.ndarray:
    """Granules of each access, one row per access. Accesses are aligned to their size."""
    return shadow.reshape(-1, max(1, total // granule))[places >> (total.bit_length() - 1)]


def _set_rows(shadow: np.ndarray, places: np.ndarray, total: int, granule: int, values: np.ndarray | bool) -> None:
    column = values[:, None] if isinstance(values, np.ndarray) else values
    shadow.reshape(-1, max(1, total // granule))[places >> (total.bit_length() - 1)] = column


def _pick(values: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    return values if lanes is None else values[lanes]


class Watcher(Protocol):
    """Reader of shared memory beside the threads, which is told what they write."""

    def check_overwrite(self, lanes: np.ndarray | None, places: np.ndarray, index: int, what: str) -> None: ...
    def written(self, places: np.ndarray, total: int, by_copy: bool) -> None: ...


class SharedShadow:
    """Shadow of the shared memory of some CTAs.

    For most accesses, summaries per block of 16 bytes decide: no thread wrote or read the block in this epoch, and all
    of it has been written. Otherwise the granules are checked. Reads are kept as a list until a check needs their
    threads.
    """

    def __init__(self, state: State, size: int, stride: int, granule: int) -> None:
        granules, blocks = size // granule, size // BLOCK
        self.state, self.granule, self.stride = state, granule, stride
        self.stamp = np.zeros(granules, np.int64)
        self.read_epoch = np.zeros((granules, state.warps), np.int32)
        self.in_flight = np.zeros(granules, bool)
        self.block_written = np.zeros(blocks, np.int32)  # epoch of the last write
        self.block_read = np.zeros(blocks, np.int32)  # epoch of the last read
        self.block_complete = np.zeros(blocks, bool)  # every byte has been written
        self.block_in_flight = np.zeros(blocks, bool)
        self._reads: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []
        self.watcher: Watcher | None = None

    def read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        """Check before a read: the bytes are written, arrived, and ordered after their write."""
        state, granule, block = self.state, self.granule, places >> 4
        epoch = _pick(state.epoch, lanes)
        if self.block_in_flight[block].any():
            in_flight = _rows(self.in_flight, places, total, granule)
            if in_flight.any():
                self._report("shared read of bytes with a cp.async in flight", in_flight, lanes, places, index)
        if not self.block_complete[block].all():
            self.initialised(lanes, places, total, index)
        if (self.block_written[block] == epoch).any():
            self._check_writer(lanes, places, total, index, epoch)
        self.mark_read(places, total, _pick(state.warp, lanes), epoch)

    def mark_read(self, places: np.ndarray, total: int, warp: np.ndarray, epoch: np.ndarray) -> None:
        self.block_read[places >> 4] = epoch
        self._reads.append((places, total, warp, epoch))
        if len(self._reads) > LOG_LIMIT:
            self._expand_reads()

    def writers(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(thread, epoch) of the last write to each granule of some blocks, (n, granules) each; epoch 0: none."""
        stamp = self.stamp.reshape(-1, BLOCK // self.granule)[blocks]
        return stamp & ((1 << THREAD_BITS) - 1), stamp >> (THREAD_BITS + EPOCH_BITS)

    def _check_writer(
        self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, epoch: np.ndarray
    ) -> None:
        state = self.state
        stamp = _rows(self.stamp, places, total, self.granule)
        writer = stamp & ((1 << THREAD_BITS) - 1)
        fresh = (stamp >> (THREAD_BITS + EPOCH_BITS)) == epoch[:, None]
        fresh &= writer != _pick(state.thread, lanes)[:, None]
        if not fresh.any():
            return
        of_other = fresh & (writer >> 5 != _pick(state.warp, lanes)[:, None])
        if of_other.any():
            kind = "shared race: read after another warp's write without a barrier"
            self._report(kind, of_other, lanes, places, index, writer)
        written_in = (stamp >> THREAD_BITS) & ((1 << EPOCH_BITS) - 1)
        within = fresh & ~of_other & (written_in == _pick(state.warp_epoch, lanes)[:, None])
        if within.any():
            kind = "shared race: read after another lane's write without bar.warp.sync"
            self._report(kind, within, lanes, places, index, writer)

    def initialised(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        """Check before a read: every byte has been written."""
        unwritten = (_rows(self.stamp, places, total, self.granule) == 0) & ~_rows(
            self.in_flight, places, total, self.granule
        )
        if unwritten.any():
            self._report("shared bytes read that were never written", unwritten, lanes, places, index)
        block = places >> 4
        self.block_complete[block] = (self.stamp.reshape(-1, BLOCK // self.granule)[block] != 0).all(1)

    def check_overwrite(
        self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, what: str,
        changes: Callable[[], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Check before a write or a copy: no other warp may have accessed these bytes since the barrier.

        changes: tells of each access whether it changes what is in memory; None: an access may change it.
        """
        state, granule, block = self.state, self.granule, places >> 4
        epoch = _pick(state.epoch, lanes)
        if self.watcher is not None:
            self.watcher.check_overwrite(lanes, places, index, what)
        if self.block_in_flight[block].any():
            in_flight = _rows(self.in_flight, places, total, granule)
            if in_flight.any():
                self._report(f"shared {what} to bytes with a cp.async in flight", in_flight, lanes, places, index)
        if (self.block_written[block] == epoch).any():
            stamp = _rows(self.stamp, places, total, granule)
            writer = stamp & ((1 << THREAD_BITS) - 1)
            written = (stamp >> (THREAD_BITS + EPOCH_BITS)) == epoch[:, None]
            written &= writer >> 5 != _pick(state.warp, lanes)[:, None]
            if written.any():
                harmful = written if changes is None else written & changes()[:, None]
                if harmful.any():
                    kind = f"shared race: {what} after another warp's write without a barrier"
                    self._report(kind, harmful, lanes, places, index, writer)
                else:
                    kind = "several warps store the same value to the same shared bytes"
                    self._report(kind, written, lanes, places, index, writer, note=True)
        if (self.block_read[block] == epoch).any():
            self._expand_reads()
            by_granule = self.read_epoch.reshape(-1, max(1, total // granule), state.warps)
            read = by_granule[places >> (total.bit_length() - 1)] == epoch[:, None, None]
            read[np.arange(len(read)), :, _pick(state.warp, lanes)] = False
            if read.any():
                kind = f"shared race: {what} after another warp's read without a barrier"
                self._report(kind, read.any(2), lanes, places, index)

    def mark_written(self, lanes: np.ndarray | None, places: np.ndarray, total: int, by_copy: bool = False) -> None:
        if self.watcher is not None:
            self.watcher.written(places, total, by_copy)
        _set_rows(self.stamp, places, total, self.granule, _pick(self.state.stamp, lanes))
        block = places >> 4
        self.block_written[block] = _pick(self.state.epoch, lanes)
        if total == BLOCK:
            self.block_complete[block] = True

    def overwritten(self, lanes: np.ndarray | None, places: np.ndarray, index: int, lost: np.ndarray) -> None:
        """Check after a store. lost: True per access that another lane of the same instruction overwrote."""
        if lost.any():
            kind = "shared race: two lanes of one store write different values"
            self._report(kind, lost[:, None], lanes, places, index)

    def mark_in_flight(self, places: np.ndarray, total: int, value: bool) -> None:
        _set_rows(self.in_flight, places, total, self.granule, value)
        block = places >> 4
        if total < BLOCK and not value:
            self.block_in_flight[block] = self.in_flight.reshape(-1, BLOCK // self.granule)[block].any(1)
        else:
            self.block_in_flight[block] = value

    def forget_reads(self) -> None:
        """Drop recorded reads after a barrier of all CTAs."""
        self._reads.clear()

    def _expand_reads(self) -> None:
        for places, total, warp, epoch in self._reads:
            readers = self.read_epoch.reshape(-1, max(1, total // self.granule), self.state.warps)
            readers[places >> (total.bit_length() - 1), :, warp] = epoch[:, None]
        self._reads.clear()

    def _report(
        self, kind: str, wrong: np.ndarray, lanes: np.ndarray | None, places: np.ndarray, index: int,
        writer: np.ndarray | None = None, note: bool = False,
    ) -> None:  # fmt: skip
        access, granule = np.argwhere(wrong)[0]
        lane = int(access if lanes is None else lanes[access])
        byte = int(places[access] + granule * self.granule) % self.stride
        by = "" if writer is None else f", written by thread {writer[access, granule]}"
        self.state.report(kind, index, f"{self.state.thread_name(lane)}: byte {byte}{by}", note=note)


SEVERAL = -2


class GlobalShadow:
    """Shadow of global memory for all programs of a launch; nothing orders two CTAs.

    describe: names a place in global memory.
    """

    def __init__(self, size: int, granule: int, describe: Callable[[int], str]) -> None:
        granules = size // granule
        self.granule, self.describe = granule, describe
        self.writer = np.zeros(granules, np.int64)  # thread of the grid + 1
        self.write_epoch = np.zeros(granules, np.int32)
        self.reader = np.zeros(granules, np.int32)  # CTA + 1, or SEVERAL

    def reach(self, start: int, size: int) -> int:
        """Number of bytes up to the end of the last accessed byte."""
        granules = slice(start // self.granule, -(-(start + size) // self.granule))
        touched = np.flatnonzero((self.writer[granules] != 0) | (self.reader[granules] != 0))
        return min(size, int(touched[-1] + 1) * self.granule) if touched.size else 0

    def read(self, state: State, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        self._check_writer(state, lanes, places, total, index, "read")
        cta = _pick(state.cta_number, lanes)[:, None] + 1
        rows = self.reader.reshape(-1, max(1, total // self.granule))
        at = places >> (total.bit_length() - 1)
        before = rows[at]
        rows[at] = np.where((before == 0) | (before == cta), cta, SEVERAL)
        clash = rows[at] != cta  # also where two CTAs of this machine read the same bytes
        if clash.any():
            rows[at[clash.any(1)]] = SEVERAL

    def write(self, state: State, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        self._check_writer(state, lanes, places, total, index, "write")
        cta = _pick(state.cta_number, lanes)[:, None]
        reader = _rows(self.reader, places, total, self.granule)
        read = (reader != 0) & (reader != cta + 1)
        if read.any():
            self._report(state, "global race: write of bytes that another CTA read", read, lanes, places, index)
        thread = _pick(state.thread_of_grid, lanes) + 1
        _set_rows(self.writer, places, total, self.granule, thread)
        _set_rows(self.write_epoch, places, total, self.granule, _pick(state.epoch, lanes))
        writer = _rows(self.writer, places, total, self.granule)
        clash = writer != thread[:, None]
        if clash.any():
            of_other_cta = clash & ((writer - 1) // state.threads != cta)
            if of_other_cta.any():
                kind = "global race: write of bytes that another CTA wrote"
                self._report(state, kind, of_other_cta, lanes, places, index)
            else:
                kind = "several lanes of a CTA store to the same global bytes at once"
                self._report(state, kind, clash, lanes, places, index, note=True)

    def _check_writer(
        self, state: State, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int, verb: str
    ) -> None:
        writer = _rows(self.writer, places, total, self.granule)
        if not writer.any():
            return
        of_other = (writer > 0) & (writer != _pick(state.thread_of_grid, lanes)[:, None] + 1)
        if not of_other.any():
            return
        other_cta = of_other & ((writer - 1) // state.threads != _pick(state.cta_number, lanes)[:, None])
        if other_cta.any():
            kind = f"global race: {verb} of bytes that another CTA wrote"
            self._report(state, kind, other_cta, lanes, places, index)
        same_epoch = _rows(self.write_epoch, places, total, self.granule) == _pick(state.epoch, lanes)[:, None]
        other_warp = (writer - 1) % state.threads // 32 != _pick(state.warp, lanes)[:, None]
        within = of_other & ~other_cta & same_epoch & other_warp
        if within.any():
            kind = f"global race: {verb} after another warp's write without a barrier"
            self._report(state, kind, within, lanes, places, index)

    def _report(
        self, state: State, kind: str, wrong: np.ndarray, lanes: np.ndarray | None, places: np.ndarray,
        index: int, note: bool = False,
    ) -> None:  # fmt: skip
        access, granule = np.argwhere(wrong)[0]
        lane = int(access if lanes is None else lanes[access])
        where = self.describe(int(places[access] + granule * self.granule))
        state.report(kind, index, f"{state.thread_name(lane)}: {where}", note=note)
