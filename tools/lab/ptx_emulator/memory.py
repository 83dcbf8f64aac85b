"""Memory: tensors at device addresses with guard gaps between them, shared memory of CTAs, local memory of threads.

Every access goes through one of the spaces here: `place` turns addresses into places in its bytes and leaves out,
with a finding, the lanes whose access is out of bounds or misaligned; `check_read` and `write` ask the sanitizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Array
from .kernel import Variable
from .report import EmulationError
from .sanitizer import GlobalShadow, SharedShadow
from .state import State
from .wgmma_shadow import WgmmaShadow

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
WINDOW_BITS = np.uint64(40)
GUARD = 4096
"""Size of the guard gap between two tensors, in bytes."""
UNDEFINED = 0xFF
"""Value of bytes that were never written: NaN in every float type."""


class Tensors:
    """Copies of tensors' storages, and of a kernel's own variables, with guard gaps between, at device addresses."""

    def __init__(self, tensors: Sequence[tuple[str, Any]], variables: Sequence[Variable]) -> None:
        import torch

        self.regions: list[tuple[str, int, int]] = []
        self._host: list[tuple[int, np.ndarray]] = []
        self._place: dict[int, int] = {}
        self.addresses: dict[str, int] = {}
        at = GUARD
        initial: list[tuple[int, np.ndarray]] = []
        for variable in variables:
            at = -(-at // max(variable.align, 16)) * max(variable.align, 16)
            self.addresses[variable.name] = GLOBAL_BASE + at
            initial.append((at, np.frombuffer(variable.data or b"", np.uint8)))
            self.regions.append((variable.name, at, variable.size))
            at += variable.size + GUARD
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in self._place:
                continue
            at = -(-at // 256) * 256 + storage.data_ptr() % 256
            flat: Any = torch.empty(0, dtype=torch.uint8)
            host = flat.set_(storage, 0, (storage.nbytes(),)).numpy()
            self._place[storage.data_ptr()] = at
            self._host.append((at, host))
            self.regions.append((name, at, storage.nbytes()))
            at += storage.nbytes() + GUARD
        self.data = np.full(-(-at // 256) * 256, UNDEFINED, np.uint8)
        self.valid = np.zeros(self.data.size + 16, bool)
        for start, source in (*initial, *self._host):
            self.data[start : start + source.size] = source
        for _, start, size in self.regions:
            self.valid[start : start + size] = True

    def address(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return GLOBAL_BASE
        return GLOBAL_BASE + self._place[storage.data_ptr()] + tensor.data_ptr() - storage.data_ptr()

    def with_device_addresses(self, struct: bytes) -> bytes:
        """Return the bytes of a struct, with host addresses in these tensors replaced by device addresses."""
        words = np.frombuffer(struct, np.uint64, len(struct) // 8).copy()
        for start, host in self._host:
            offsets = words - np.uint64(host.ctypes.data)  # wraps below the tensor
            inside = offsets < host.size
            words[inside] = offsets[inside] + np.uint64(GLOBAL_BASE + start)
        return words.tobytes() + struct[8 * len(words) :]

    def write_back(self) -> None:
        for start, host in self._host:
            host[:] = self.data[start : start + host.size]

    def describe(self, place: int) -> str:
        """Readable text for an address: the nearest tensor and the offset in it."""
        if not self.regions:
            return f"byte {place}, where there is no tensor"
        name, start, size = min(self.regions, key=lambda region: max(region[1] - place, place - region[1] - region[2]))
        return f"byte {place - start} of the {size} of {name}"


def rows(memory: np.ndarray, data: np.ndarray) -> np.ndarray:
    """View of the memory as rows of the shape of data."""
    return memory.view(data.dtype if data.itemsize > 1 else memory.dtype).reshape(-1, data.shape[1])


def shift(data: np.ndarray) -> int:
    """Bits by which the place of an access is shifted to give its row."""
    return (data.itemsize * data.shape[1]).bit_length() - 1


def _of_lanes(state: State, mask: Array, values: Array) -> tuple[np.ndarray | None, np.ndarray]:
    """Select the lanes under a mask (None: all), and their values."""
    values = state.full(values)
    if mask is None or mask.all():
        return None, values
    lanes = np.flatnonzero(mask)
    return lanes, values[lanes]


class GlobalSpace:
    def __init__(self, state: State, tensors: Tensors, shadow: GlobalShadow | None) -> None:
        self.state, self.tensors, self.data = state, tensors, tensors.data
        self.shadow = shadow

    def place(
        self, mask: Array, address: Array, offset: int, total: int, index: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        lanes, address = _of_lanes(self.state, mask, address)
        places = (address + np.uint64((offset - GLOBAL_BASE) & (2**64 - 1))).view(np.int64)
        outside = places.view(np.uint64) >= np.uint64(self.data.size)
        inside = np.where(outside, 0, places) if outside.any() else places
        outside |= ~(self.tensors.valid[inside] & self.tensors.valid[inside + (total - 1)])
        wrong = outside | ((places & (total - 1)) != 0)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            lane = first if lanes is None else int(lanes[first])
            kind = "global access out of bounds" if outside.any() else "global access misaligned"
            where = self.tensors.describe(int(places[first]))
            self.state.report(kind, index, f"{self.state.thread_name(lane)}: {total} bytes at {where}")
            lanes = np.flatnonzero(~wrong) if lanes is None else lanes[~wrong]
            places = places[~wrong]
        return lanes, places

    def check_read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        if self.shadow is not None:
            self.shadow.read(self.state, lanes, places, total, index)

    def write(self, lanes: np.ndarray | None, places: np.ndarray, data: np.ndarray, index: int) -> None:
        if self.shadow is not None:
            self.shadow.write(self.state, lanes, places, data.itemsize * data.shape[1], index)
        rows(self.data, data)[places >> shift(data)] = data

    def check_atomic(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        """Atomic operations on the same address may meet."""


class SharedSpace:
    """Shared memory of some CTAs, one after another, `stride` bytes each of which `size` are valid."""

    def __init__(self, state: State, size: int, granule: int, sanitize: bool) -> None:
        self.state, self.size = state, size
        self.stride = (size + 31) // 16 * 16
        self.data = np.full(state.ctas * self.stride, UNDEFINED, np.uint8)
        self.base = state.cta * self.stride
        self.shadow = SharedShadow(state, self.data.size, self.stride, granule) if sanitize else None
        watched = self.shadow is not None and state.kernel.wgmma is not None
        self.wgmma = WgmmaShadow(self.shadow) if watched else None

    def place(
        self, mask: Array, address: Array, offset: int, total: int, index: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        lanes, address = _of_lanes(self.state, mask, address)
        places = address.astype(np.int64) + offset
        if places.size and places[0] >= SHARED_WINDOW:
            places = places - SHARED_WINDOW
        wrong = (places < 0) | (places > self.size - total) | ((places & (total - 1)) != 0)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            lane = first if lanes is None else int(lanes[first])
            misaligned = 0 <= places[first] <= self.size - total
            self.state.report(
                "shared access misaligned" if misaligned else "shared access out of bounds",
                index,
                f"{self.state.thread_name(lane)}: {total} bytes at {int(places[first])} of {self.size}",
            )
            lanes = np.flatnonzero(~wrong) if lanes is None else lanes[~wrong]
            places = places[~wrong]
        return lanes, places + (self.base if lanes is None else self.base[lanes])

    def check_read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        if self.shadow is not None:
            self.shadow.read(lanes, places, total, index)

    def write(self, lanes: np.ndarray | None, places: np.ndarray, data: np.ndarray, index: int) -> None:
        """data: a row of elements for each access."""
        memory, at = rows(self.data, data), places >> shift(data)
        if self.shadow is None:
            memory[at] = data
            return
        total = data.itemsize * data.shape[1]
        changes = lambda: (memory[at] != data).any(1)  # noqa: E731
        self.shadow.check_overwrite(lanes, places, total, index, "write", changes)
        memory[at] = data
        self.shadow.mark_written(lanes, places, total)
        self.shadow.overwritten(lanes, places, index, changes())


class LocalSpace:
    """Local memory of every thread, `stride` bytes each."""

    def __init__(self, state: State, size: int) -> None:
        self.state, self.size = state, size
        self.stride = (size + 31) // 16 * 16
        self.data = np.full(state.lanes * self.stride, UNDEFINED, np.uint8)
        self.written = np.zeros(self.data.size, bool)
        self.base = np.arange(state.lanes) * self.stride

    def place(
        self, mask: Array, address: Array, offset: int, total: int, index: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        lanes, address = _of_lanes(self.state, mask, address)
        places = address.astype(np.int64) + offset
        if places.size and places[0] >= LOCAL_WINDOW:
            places = places - LOCAL_WINDOW
        wrong = (places < 0) | (places > self.size - total) | ((places & (total - 1)) != 0)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            self.state.report(
                "local access out of bounds or misaligned", index, f"{total} bytes at {places[first]} of {self.size}"
            )
            lanes = np.flatnonzero(~wrong) if lanes is None else lanes[~wrong]
            places = places[~wrong]
        return lanes, places + (self.base if lanes is None else self.base[lanes])

    def check_read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        if not self.written[places[:, None] + np.arange(total)].all():
            self.state.report("local bytes read that were never written", index, f"{total} bytes")

    def write(self, lanes: np.ndarray | None, places: np.ndarray, data: np.ndarray, index: int) -> None:
        rows(self.data, data)[places >> shift(data)] = data
        rows(self.written, data.view(np.uint8))[places >> shift(data)] = True

    def check_atomic(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None:
        raise EmulationError("atomic operation on local memory")
