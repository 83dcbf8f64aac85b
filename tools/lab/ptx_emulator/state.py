"""State of the threads of some CTAs: their places, the barriers that they have passed, and where findings go.

Every thread is a lane of numpy arrays. Memory, the sanitizer and the machine build on this; it knows none of them.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Array
from .kernel import Kernel
from .report import Finding, Report

THREAD_BITS, EPOCH_BITS = 11, 26

UNINITIALISED = {
    1: np.False_,
    8: np.uint8(0xD5),
    16: np.uint16(0xFFD5),
    32: np.uint32(0xFFD5BAD1),
    64: np.uint64(0xFFD5BAD1FFD5BAD1),
}
"""Value of a register before it is written: a NaN, and an invalid address."""


def stamps(thread: np.ndarray, epoch: np.ndarray, warp_epoch: np.ndarray) -> np.ndarray:
    """Epoch, epoch of the warp and thread in one number; 0 is no stamp, since epochs begin at 1."""
    return (
        (epoch.astype(np.int64) << (THREAD_BITS + EPOCH_BITS)) | (warp_epoch.astype(np.int64) << THREAD_BITS) | thread
    )


class State:
    """Threads of `ctas` CTAs from number `first` on.

    Attributes:
        lanes: number of threads of all its CTAs; threads, warps: of one CTA.
        cta: per lane, its CTA in this machine; cta_number: its CTA in the grid.
        thread, warp: per lane, its thread and warp in the CTA.
        epoch: barriers that each lane has passed; warp_epoch: also bar.warp.sync.
        special: special registers (%tid.x, ...) as u32.
    """

    def __init__(
        self, kernel: Kernel, first: int, ctas: int, grid: tuple[int, int, int], block: tuple[int, int, int],
        report: Report,
    ) -> None:  # fmt: skip
        self.kernel, self._report = kernel, report
        self.threads = block[0] * block[1] * block[2]
        self.ctas, self.lanes, self.warps = ctas, ctas * self.threads, self.threads // 32
        lane = np.arange(self.lanes)
        self.cta = lane // self.threads
        self.cta_number = (first + self.cta).astype(np.int32)
        self.thread = (lane % self.threads).astype(np.int32)
        self.warp = self.thread // 32
        self.thread_of_grid = self.cta_number.astype(np.int64) * self.threads + self.thread
        self.epoch = np.ones(self.lanes, np.int32)
        self.warp_epoch = np.ones(self.lanes, np.int32)
        self.stamp = stamps(self.thread, self.epoch, self.warp_epoch)
        self.special = self._special_registers(grid, block)

    def _special_registers(self, grid: tuple[int, int, int], block: tuple[int, int, int]) -> dict[str, Array]:
        values: dict[str, Array] = {}
        cta = self.cta_number if self.ctas > 1 else self.cta_number[0]
        for place, of, size in ((self.thread, "tid", block), (cta, "ctaid", grid)):
            for axis, name in enumerate("xyz"):
                values[f"%{of}.{name}"] = (place % size[axis]).astype(np.uint32)
                values[f"%n{of}.{name}"] = np.uint32(size[axis])
                place = place // size[axis]
        for name in "xyz":  # every CTA is a cluster of its own
            values[f"%clusterid.{name}"] = values[f"%ctaid.{name}"]
            values[f"%nclusterid.{name}"] = values[f"%nctaid.{name}"]
            values[f"%cluster_ctaid.{name}"], values[f"%cluster_nctaid.{name}"] = np.uint32(0), np.uint32(1)
        values["%cluster_ctarank"], values["%cluster_nctarank"] = np.uint32(0), np.uint32(1)
        values["%laneid"] = (self.thread % 32).astype(np.uint32)
        values["%warpid"] = self.warp.astype(np.uint32)
        values["%nwarpid"] = np.uint32(self.warps)
        lane, other = np.arange(32)[:, None], np.arange(32)[None, :]
        for name, chosen in {
            "eq": other == lane, "lt": other < lane, "le": other <= lane, "gt": other > lane, "ge": other >= lane,
        }.items():  # fmt: skip
            mask = (chosen * (np.uint32(1) << np.arange(32, dtype=np.uint32))).sum(1, dtype=np.uint32)
            values[f"%lanemask_{name}"] = mask[self.thread % 32]
        return values

    def full(self, value: Array) -> np.ndarray:
        """Expand a uniform value to an array with one element per lane; arrays are returned unchanged."""
        return value if value.shape == (self.lanes,) else np.full(self.lanes, value)

    def active(self, mask: Array) -> np.ndarray:
        return np.ones(self.lanes, bool) if mask is None else mask

    def guarded(self, mask: Array, predicate: Array) -> np.ndarray:
        """The lanes of a mask where a predicate holds."""
        predicate = self.full(predicate)
        return predicate if mask is None else mask & predicate

    def undefined(self, size: int) -> Array:
        return UNINITIALISED[8 * size]

    def begin_warp_epoch(self, lanes: np.ndarray) -> None:
        """Make what these lanes did so far visible to the other lanes of their warps."""
        self.warp_epoch = self.warp_epoch + lanes
        self.stamp = stamps(self.thread, self.epoch, self.warp_epoch)

    def thread_name(self, lane: int) -> str:
        return f"thread {lane % self.threads} of CTA {self.cta_number[lane]}"

    def report(self, kind: str, index: int, detail: str, *, note: bool = False) -> None:
        """Adds a finding at the instruction of this index."""
        instruction = self.kernel.instructions[index]
        finding = Finding(kind, self.kernel.name, instruction.location, instruction.text, detail)
        self._report.add(finding, note=note)
