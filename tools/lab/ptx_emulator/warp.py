"""Instructions of whole warps: shfl, vote, match, redux, elect, bar.warp.sync, ldmatrix, stmatrix, mma.

A mask is None for all lanes or a bool array. Results are given for all lanes; those of inactive lanes mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import Array, f32_to_tf32
from .fragments import accumulator_from_registers, registers_from_accumulator, rows_from_registers
from .machine import Machine
from .report import EmulationError

LANE_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def converged(machine: Machine, mask: Array, index: int, members: Array | None = None) -> np.ndarray | None:
    """The warps that execute a .sync instruction, None for all; lanes that it names and are elsewhere are reported.

    Args:
        members: bits of the lanes that take part; None for all 32.
    """
    if mask is None and (members is None or (np.ndim(members) == 0 and int(members) == 0xFFFFFFFF)):
        return None
    here = machine.active(mask).reshape(-1, 32)
    some = here.any(1)
    if members is None:
        missing = some & ~here.all(1)
    else:
        bits = (here * LANE_BITS).sum(1, dtype=np.uint32)[:, None]
        named = machine.full(members).reshape(-1, 32)
        missing = (here & (((named & ~bits) != 0) | ((named & LANE_BITS) == 0))).any(1)
    if missing.any():
        warp = int(np.flatnonzero(missing)[0])
        detail = f"warp of {machine.thread_name(32 * warp)}: {int(here[warp].sum())} of its lanes are here"
        machine.report("a warp is not complete at a .sync instruction", index, detail)
    return None if some.all() else np.asarray(some)


def shuffle(
    machine: Machine, mask: Array, mode: str, value: Array, b: Array, c: Array, members: Array, index: int
) -> tuple[Array, Array]:
    """Return the value of another lane, and True if that lane is in range; else the lane's own value, and False."""
    converged(machine, mask, index, members)
    if np.ndim(b) == 0 and np.ndim(c) == 0:
        key = (mode, int(b), int(c))
        known = machine.shuffles.get(key)
        if known is None:
            known = machine.shuffles[key] = _sources(machine, mode, b, c)
        source, inside = known
    else:
        source, inside = _sources(machine, mode, machine.full(b), machine.full(c))
    if mask is not None:
        inactive = mask & ~mask[source]
        if inactive.any():
            detail = machine.thread_name(int(np.flatnonzero(inactive)[0]))
            machine.report("shuffle from a lane that does not take part", index, detail)
    return (value if np.ndim(value) == 0 else value[source]), inside


def _sources(machine: Machine, mode: str, b: Array, c: Array) -> tuple[np.ndarray, np.ndarray]:
    lane = np.arange(machine.lanes) % 32
    by, clamp = np.int64(1) * (b & np.uint32(31)), np.int64(1) * (c & np.uint32(31))
    segment = np.int64(1) * ((c >> np.uint32(8)) & np.uint32(31))
    low, high = lane & segment, (lane & segment) | (clamp & ~segment)
    if mode == "up":
        source = lane - by
        inside = source >= high
    else:
        source = {"down": lane + by, "bfly": lane ^ by, "idx": low | (by & ~segment)}[mode]
        inside = source <= high
    source = np.where(inside, source, lane) + np.arange(machine.lanes) // 32 * 32
    return source, inside


def _taking_part(machine: Machine, mask: Array, members: Array) -> np.ndarray:
    return (machine.active(mask) & ((machine.full(members) & np.tile(LANE_BITS, machine.lanes // 32)) != 0)).reshape(
        -1, 32
    )


def vote(machine: Machine, mask: Array, mode: str, predicate: Array, members: Array, index: int) -> np.ndarray:
    converged(machine, mask, index, members)
    part = _taking_part(machine, mask, members)
    predicate = machine.full(predicate).reshape(-1, 32)
    if mode == "ballot":
        return np.repeat(((predicate & part) * LANE_BITS).sum(1, dtype=np.uint32), 32)
    every, some = (predicate | ~part).all(1), (predicate & part).any(1)
    return np.repeat({"all": every, "any": some, "uni": every | ~some}[mode], 32)


def match(machine: Machine, mask: Array, mode: str, value: Array, members: Array, index: int) -> tuple[Array, Array]:
    """Bits of the lanes with the same value, and whether all have it (mode "all": no bits unless they do)."""
    converged(machine, mask, index, members)
    part = _taking_part(machine, mask, members)
    value = machine.full(value).reshape(-1, 32)
    equal = (value[:, :, None] == value[:, None, :]) & part[:, None, :]
    bits = (equal * LANE_BITS).sum(2, dtype=np.uint32)
    whole = bits == (part * LANE_BITS).sum(1, dtype=np.uint32)[:, None]
    if mode == "all":
        bits = np.where(whole, bits, np.uint32(0))
    return bits.ravel(), whole.ravel()


def reduce(machine: Machine, mask: Array, mode: str, value: Array, members: Array, index: int) -> np.ndarray:
    """redux: value has the instruction's own type."""
    converged(machine, mask, index, members)
    value = machine.full(value).reshape(-1, 32)
    operation = {
        "add": np.add, "max": np.fmax, "min": np.fmin, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[mode]  # fmt: skip
    part = _taking_part(machine, mask, members)
    if not part.all():  # a lane that takes no part repeats one that does, or holds 0 where that would count twice
        some = part.argmax(1)
        instead = np.zeros_like(value[:, :1]) if mode in ("add", "xor") else np.take_along_axis(value, some[:, None], 1)
        value = np.where(part, value, instead)
    return np.repeat(operation.reduce(value, axis=1, dtype=value.dtype), 32)


def elect(machine: Machine, mask: Array, members: Array, index: int) -> tuple[Array, Array]:
    """The lowest lane that takes part, and who that is."""
    converged(machine, mask, index, members)
    leader = np.repeat(_taking_part(machine, mask, members).argmax(1), 32)
    return leader.astype(np.uint32), np.arange(machine.lanes) % 32 == leader


def active_mask(machine: Machine, mask: Array) -> np.ndarray:
    return np.repeat((machine.active(mask).reshape(-1, 32) * LANE_BITS).sum(1, dtype=np.uint32), 32)


def synchronise(machine: Machine, mask: Array, members: Array, index: int) -> None:
    """bar.warp.sync: what the lanes did before is seen by the others after."""
    converged(machine, mask, index, members)
    machine.begin_warp_epoch(machine.active(mask))


# ---- matrices


def _matrix_rows(
    machine: Machine, mask: Array, address: Array, offset: int, matrices: int, index: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray, int]:
    """The warps, and lanes and places of the rows: lane 8 * j + i has the address of row i of matrix j."""
    warps = converged(machine, mask, index)
    giving = np.zeros((machine.lanes // 32, 32), bool)
    giving[slice(None) if warps is None else warps, : 8 * matrices] = True
    lanes, places = machine.shared.place(giving.ravel(), address, offset, 16, index)
    count = machine.lanes // 32 if warps is None else int(warps.sum())
    if places.size != count * 8 * matrices:
        raise EmulationError(f"{machine.kernel.instructions[index].text}: a row's address cannot be read")
    return warps, lanes, places, count


def load_matrices(
    machine: Machine, mask: Array, address: Array, offset: int, matrices: int, transposed: bool, index: int
) -> list[np.ndarray]:
    """ldmatrix: a register for each 8x8 matrix of 16-bit elements."""
    warps, lanes, places, count = _matrix_rows(machine, mask, address, offset, matrices, index)
    machine.shared.check_read(lanes, places, 16, index)
    rows = machine.shared.data.view(np.uint64).reshape(-1, 2)[places >> 4]
    if transposed:
        elements = rows.view(np.uint16).reshape(count, matrices, 8, 8)
        pairs = np.ascontiguousarray(elements.swapaxes(2, 3)).view(np.uint32)
    else:
        pairs = rows.view(np.uint32)
    pairs = pairs.reshape(count, matrices, 32)  # lane 4 * g + t holds columns 2 t and 2 t + 1 of row g
    return [_of_all_warps(machine, pairs[:, j], warps) for j in range(matrices)]


def store_matrices(
    machine: Machine, mask: Array, address: Array, offset: int, values: Sequence[Array], transposed: bool, index: int
) -> None:
    """stmatrix, the opposite of ldmatrix."""
    matrices = len(values)
    warps, lanes, places, count = _matrix_rows(machine, mask, address, offset, matrices, index)
    pairs = np.stack([_of_warps(machine, value, warps) for value in values], 1)
    if transposed:
        elements = pairs.view(np.uint16).reshape(count, matrices, 8, 8).swapaxes(2, 3)
        pairs = np.ascontiguousarray(elements).view(np.uint32)
    rows = pairs.reshape(-1, 4)
    machine.shared.write(lanes, places, rows, index)


def _of_warps(machine: Machine, value: Array, warps: np.ndarray | None) -> np.ndarray:
    value = machine.full(value).reshape(-1, 32)
    return value if warps is None else value[warps]


def _of_all_warps(machine: Machine, value: np.ndarray, warps: np.ndarray | None) -> np.ndarray:
    if warps is None:
        return np.ascontiguousarray(value).reshape(-1)
    everywhere = np.empty((machine.lanes // 32, 32), value.dtype)
    everywhere[warps] = value
    return everywhere.reshape(-1)


@dataclass(frozen=True)
class MatrixProduct:
    """One shape and type of mma. types: types of D, A, B and C."""

    m: int
    n: int
    k: int
    types: tuple[str, str, str, str]

    @property
    def packed(self) -> int:
        """Elements of A and B in a register."""
        return {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4, "f64": 1}[self.types[1]]


def _elements(machine: Machine, registers: Sequence[Array], kind: str, warps: np.ndarray | None) -> np.ndarray:
    """Elements of shape (registers, warps, 32 * packed), as numbers that a product can take."""
    flat = np.empty((len(registers), machine.lanes), np.uint64 if kind == "f64" else np.uint32)
    for row, register in zip(flat, registers, strict=True):
        row[:] = register
    bits = flat.reshape(len(registers), -1, 32)
    if warps is not None:
        bits = bits[:, warps]
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "tf32":
        return f32_to_tf32(bits.view(np.float32), "rz").view(np.float32)
    return bits.view(NUMBERS[kind])


NUMBERS: dict[str, Any] = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "s32": np.int32,
    "s8": np.int8,
    "u8": np.uint8,
}


def multiply_matrices(
    machine: Machine, mask: Array, product: MatrixProduct, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array],
    index: int,
) -> list[np.ndarray]:  # fmt: skip
    """mma: D = A B + C of every warp. Sums are made in float64 (int64 for integers) and rounded once."""
    warps = converged(machine, mask, index)
    of_d, of_a, of_b, of_c = product.types
    wide = np.int64 if of_d == "s32" else np.float64
    left = rows_from_registers(_elements(machine, a, of_a, warps), product.m, product.packed).astype(wide)
    right = rows_from_registers(_elements(machine, b, of_b, warps), product.n, product.packed).astype(wide)
    halves = 2 if of_c == "f16" else 1
    sums = np.matmul(left, right.swapaxes(1, 2))
    sums += accumulator_from_registers(_elements(machine, c, of_c, warps), product.m, halves)
    registers = registers_from_accumulator(sums.astype(NUMBERS[of_d]), 2 if of_d == "f16" else 1)
    bits = registers.view(np.uint64 if of_d == "f64" else np.uint32)
    return [_of_all_warps(machine, register, warps) for register in bits]
