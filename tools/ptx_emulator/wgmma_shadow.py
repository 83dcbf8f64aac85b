"""Checks of the shared memory that wgmma reads: initialised, ordered, fenced for its proxy, left alone until it is done.

wgmma reads shared memory through the async proxy; stores and copies of threads go through the generic proxy. Bytes that
threads wrote are safe to read after a fence.proxy.async between the write and the wgmma, next to the barrier that
orders the two: the writer may fence before the barrier, or every reader after it. cp.async writes through the generic
proxy too, but compilers rely on its wait and a barrier alone; for its bytes a missing fence is a note and no finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .sanitizer import SharedShadow

CHUNK = 16
UNFENCED = np.int32(2**31 - 1)


class WgmmaShadow:
    """Next to a SharedShadow, of a kernel that has wgmma.

    Attributes:
        fenced: epoch of the first proxy fence since a granule's last write, or UNFENCED.
        copied: the last write of a granule was a cp.async.
        fence_epoch: epoch of each lane's last proxy fence.
        readers: for each chunk the warps of its CTA, one bit each, that have a wgmma in flight which reads it.
    """

    def __init__(self, shadow: SharedShadow) -> None:
        self.shadow, self.machine = shadow, shadow.machine
        self.granules = CHUNK // shadow.granule
        self.fenced = np.full(len(shadow.writer), UNFENCED, np.int32)
        self.copied = np.zeros(len(shadow.writer), bool)
        self.fence_epoch = np.full(self.machine.lanes, -1, np.int32)
        self.readers = np.zeros(len(shadow.writer) // self.granules, np.uint32)
        self.any_reader = False

    # ---- called for every access of threads

    def written(self, places: np.ndarray, total: int, by_copy: bool) -> None:
        """Threads wrote `total` bytes at each place."""
        at = places >> (total.bit_length() - 1)
        per_access = max(1, total // self.shadow.granule)
        self.fenced.reshape(-1, per_access)[at] = UNFENCED
        self.copied.reshape(-1, per_access)[at] = by_copy

    def check_overwrite(self, lanes: np.ndarray | None, places: np.ndarray, index: int, what: str) -> None:
        """Before threads write: no wgmma in flight may still read these bytes."""
        if not self.any_reader:
            return
        wrong = self.readers[places // CHUNK] != 0
        if wrong.any():
            kind = f"shared {what} to bytes that a wgmma in flight reads"
            access = int(np.flatnonzero(wrong)[0])
            lane = access if lanes is None else int(lanes[access])
            byte = int(places[access]) % self.shadow.stride
            self.machine.report(kind, index, f"{self.machine.thread_name(lane)}: byte {byte}")

    def fence(self, mask: np.ndarray | None) -> None:
        """fence.proxy.async: orders the writes that its threads made, or that barriers made visible to them."""
        machine, shadow = self.machine, self.shadow
        active = machine.active(mask)
        self.fence_epoch[active] = machine.epoch[active]
        open_granules = np.flatnonzero((self.fenced == UNFENCED) & (shadow.writer >= 0))
        if not len(open_granules):
            return
        cta = open_granules * shadow.granule // shadow.stride
        own = active[cta * machine.threads + shadow.writer[open_granules]]
        by_cta = active.reshape(-1, machine.threads)
        epoch = np.where(by_cta, machine.epoch.reshape(-1, machine.threads), -1).max(1)
        fenced = own | (shadow.write_epoch[open_granules] < epoch[cta])
        self.fenced[open_granules[fenced]] = epoch[cta[fenced]]

    # ---- called for wgmma

    def read(self, warps: np.ndarray, chunks: np.ndarray, index: int) -> None:
        """A wgmma of some warps starts to read.

        Args:
            warps: numbers of the warps in the machine; (n,).
            chunks: numbers of the 16-byte chunks that each reads; (n, any).
        """
        machine, shadow = self.machine, self.shadow
        # The warps of a warpgroup read the same: one of them stands for all that are there.
        _, leaders = np.unique(warps // 4, return_index=True)
        lane = warps[leaders] * 32
        at = chunks[leaders]
        epoch = machine.epoch[lane][:, None, None]
        writer = shadow.writer.reshape(-1, self.granules)[at]
        written = shadow.write_epoch.reshape(-1, self.granules)[at]
        unwritten = writer < 0
        if unwritten.any():
            self._report("shared bytes read that were never written", unwritten, lane, at, index)
        if shadow.any_in_flight:
            copying = shadow.in_flight.reshape(-1, self.granules)[at]
            if copying.any():
                self._report("shared read of bytes with a cp.async in flight", copying, lane, at, index)
        fresh = (written == epoch) & ~unwritten
        if fresh.any():
            self._report("shared race: wgmma reads bytes written without a barrier before it", fresh, lane, at, index)
        by_reader = self.fence_epoch.reshape(-1, 32)[warps[leaders]].min(1)[:, None, None]
        open_ = ~(unwritten | fresh)
        open_ &= (self.fenced.reshape(-1, self.granules)[at] >= epoch) & (by_reader <= written)
        if open_.any():
            copied = self.copied.reshape(-1, self.granules)[at]
            kind = "wgmma reads shared bytes that threads wrote, without fence.proxy.async in between"
            if (open_ & ~copied).any():
                self._report(kind, open_ & ~copied, lane, at, index)
            kind = "wgmma reads shared bytes that cp.async wrote, without fence.proxy.async in between"
            if (open_ & copied).any():
                self._report(kind, open_ & copied, lane, at, index, note=True)
        self.mark_readers(warps, chunks)

    def mark_readers(self, warps: np.ndarray, chunks: np.ndarray) -> None:
        of_cta = warps % self.machine.warps
        for warp in np.unique(of_cta):
            self.readers[chunks[of_cta == warp]] |= np.uint32(1 << warp)
        self.any_reader = True

    def done(self, warps: np.ndarray, chunks: np.ndarray) -> None:
        """wgmma of some warps that read these chunks are complete: their reads belong to the epoch that it is now."""
        machine, shadow = self.machine, self.shadow
        of_cta = warps % machine.warps
        for warp in np.unique(of_cta):
            chosen = of_cta == warp
            self.readers[chunks[chosen]] &= ~np.uint32(1 << warp)
        by_chunk = shadow.read_epoch.reshape(-1, self.granules, machine.warps)
        for granule in range(self.granules):
            by_chunk[chunks, granule, of_cta[:, None]] = machine.epoch[warps * 32][:, None]
        self.any_reader = bool(self.readers.any())

    def _report(
        self, kind: str, wrong: np.ndarray, lanes: np.ndarray, chunks: np.ndarray, index: int, note: bool = False
    ) -> None:
        reader, place, granule = np.argwhere(wrong)[0]
        number = chunks[reader, place]
        byte = (int(number) * CHUNK + int(granule) * self.shadow.granule) % self.shadow.stride
        writer = int(self.shadow.writer.reshape(-1, self.granules)[number, granule])
        by = f", written by thread {writer}" if writer >= 0 else ""
        detail = f"{self.machine.thread_name(int(lanes[reader]))} and its warpgroup: byte {byte}{by}"
        self.machine.report(kind, index, detail, note=note)
