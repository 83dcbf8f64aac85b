"""Checks of the shared memory that wgmma reads: written, ordered, fenced for its proxy, and unchanged until it is done.

wgmma reads shared memory through the async proxy; stores and copies of threads go through the generic proxy. Bytes that
threads wrote are safe to read after a fence.proxy.async between the write and the wgmma, next to the barrier that
orders the two: the writer may fence before the barrier, or every reader after it. cp.async writes through the generic
proxy too, but compilers rely on its wait and a barrier alone; for its bytes a missing fence is a note and no finding.
A chunk is 16 bytes, the unit in which descriptors address memory, and a block of SharedShadow.
"""

from __future__ import annotations

import numpy as np

from .sanitizer import SharedShadow

CHUNK = 16
UNFENCED = np.int32(2**31 - 1)


class WgmmaShadow:
    """Additional shadow state for kernels with wgmma, beside a SharedShadow.

    Attributes:
        fenced: per granule, the epoch of the first proxy fence after its last write, or UNFENCED.
        chunk_fenced: per chunk, the latest value of ``fenced``.
        copied: per chunk, True if its last write was a cp.async.
        lane_fenced: epoch of each lane's last proxy fence.
        readers: for each chunk the warps of its CTA, one bit each, that have a wgmma in flight which reads it.
    """

    def __init__(self, shadow: SharedShadow) -> None:
        self.shadow, self.state = shadow, shadow.state
        shadow.watcher = self
        self.granules = CHUNK // shadow.granule
        chunks = len(shadow.stamp) // self.granules
        self.fenced = np.zeros(len(shadow.stamp), np.int32)
        self.chunk_fenced = np.zeros(chunks, np.int32)
        self.copied = np.zeros(chunks, bool)
        self.lane_fenced = np.zeros(self.state.lanes, np.int32)
        self.readers = np.zeros(chunks, np.uint32)
        self.any_reader = False

    # ---- called for accesses of threads

    def written(self, places: np.ndarray, total: int, by_copy: bool) -> None:
        """Threads wrote `total` bytes at each place."""
        chunk = places // CHUNK
        self.fenced.reshape(-1, max(1, total // self.shadow.granule))[places >> (total.bit_length() - 1)] = UNFENCED
        self.chunk_fenced[chunk] = UNFENCED
        self.copied[chunk] = by_copy

    def check_overwrite(self, lanes: np.ndarray | None, places: np.ndarray, index: int, what: str) -> None:
        """Check before threads write: no wgmma in flight may still read these bytes."""
        if not self.any_reader:
            return
        wrong = self.readers[places // CHUNK] != 0
        if wrong.any():
            access = int(np.flatnonzero(wrong)[0])
            lane = access if lanes is None else int(lanes[access])
            detail = f"{self.state.thread_name(lane)}: byte {int(places[access]) % self.shadow.stride}"
            self.state.report(f"shared {what} to bytes that a wgmma in flight reads", index, detail)

    def fence(self, mask: np.ndarray | None) -> None:
        """fence.proxy.async: orders the writes that its threads made, or that barriers made visible to them."""
        state, shadow = self.state, self.shadow
        active = state.active(mask)
        self.lane_fenced[active] = state.epoch[active]
        chunks = np.flatnonzero(self.chunk_fenced == UNFENCED)
        if not len(chunks):
            return
        cta = chunks * CHUNK // shadow.stride
        epoch = np.where(active, state.epoch, 0).reshape(-1, state.threads).max(1)[cta][:, None]
        writer, written = shadow.writers(chunks)
        own = active[cta[:, None] * state.threads + writer]
        rows = self.fenced.reshape(-1, self.granules)
        fenced = rows[chunks]
        fenced = np.where((fenced == UNFENCED) & (own | (written < epoch)), epoch, fenced)
        rows[chunks] = fenced
        self.chunk_fenced[chunks] = fenced.max(1)

    # ---- called for wgmma

    def read(self, warps: np.ndarray, chunks: np.ndarray, index: int) -> None:
        """Record that a wgmma starts to read.

        Args:
            warps: a warp of each warpgroup that executes it, as number in the machine; (n,).
            chunks: numbers of the chunks that each warpgroup reads; (n, any).
        """
        shadow = self.shadow
        epoch = self.state.epoch[warps * 32][:, None]
        if shadow.block_in_flight[chunks].any():
            kind = "shared read of bytes with a cp.async in flight"
            self._report(kind, shadow.block_in_flight[chunks], warps, chunks, index)
        if not shadow.block_complete[chunks].all():
            complete = (shadow.stamp.reshape(-1, self.granules)[chunks] != 0).all(2)
            shadow.block_complete[chunks] = complete
            if not complete.all():
                self._report("shared bytes read that were never written", ~complete, warps, chunks, index)
        fresh = shadow.block_written[chunks] == epoch
        if fresh.any():
            self._report(
                "shared race: wgmma reads bytes written without a barrier before it", fresh, warps, chunks, index
            )
        not_fenced = (self.chunk_fenced[chunks] >= epoch) & ~fresh
        if not_fenced.any():
            by_reader = self.lane_fenced.reshape(-1, 32)[warps].min(1)[:, None]
            not_fenced &= by_reader <= shadow.block_written[chunks]
            for by, note in (("threads", False), ("cp.async", True)):
                wrong = not_fenced & (self.copied[chunks] == note)
                if wrong.any():
                    kind = f"wgmma reads shared bytes that {by} wrote, without fence.proxy.async in between"
                    self._report(kind, wrong, warps, chunks, index, note=note)

    def mark_readers(self, warps: np.ndarray, chunks: np.ndarray) -> None:
        """Record that these warps (n,) have a wgmma in flight that reads these chunks (n, any)."""
        of_cta = warps % self.state.warps
        for warp in np.unique(of_cta):
            self.readers[chunks[of_cta == warp]] |= np.uint32(1 << warp)
        self.any_reader = True

    def done(self, warps: np.ndarray, chunks: np.ndarray) -> None:
        """The wgmma of these warps (n,) that read these chunks (n, any) is complete. The reads of that wgmma belong to
        this epoch."""
        of_cta = warps % self.state.warps
        for warp in np.unique(of_cta):
            self.readers[chunks[of_cta == warp]] &= ~np.uint32(1 << warp)
        self.any_reader = bool(self.readers.any())
        count = chunks.shape[1]
        self.shadow.mark_read(
            chunks.reshape(-1) * CHUNK,
            CHUNK,
            np.repeat(of_cta, count),
            np.repeat(self.state.epoch[warps * 32], count),
        )

    def _report(
        self, kind: str, wrong: np.ndarray, warps: np.ndarray, chunks: np.ndarray, index: int, note: bool = False
    ) -> None:
        reader, place = np.argwhere(wrong)[0]
        byte = int(chunks[reader, place]) * CHUNK % self.shadow.stride
        thread = self.state.thread_name(int(warps[reader]) * 32)
        self.state.report(kind, index, f"{thread} and its warpgroup: 16 bytes at {byte}", note=note)
