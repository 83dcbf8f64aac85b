"""Layouts of the operands of a wgmma: matrix descriptors, swizzles, and the registers of a warpgroup's lanes.

Pure functions on numpy arrays. Source: the sections on matrix descriptors, shared memory layouts and register fragments
of wgmma.mma_async in NVIDIA's PTX ISA document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any

WARPS = 4
"""Warps of a warpgroup."""

ROWS = 64
"""Rows of the first factor and of the accumulator, of every shape."""

SWIZZLE_BYTES = np.array([16, 128, 64, 32])
"""Length of a row of the swizzle's pattern, by the descriptor's mode; without a swizzle, that of one 16-byte chunk."""

PATTERN_ROWS = 8
"""Rows after which every swizzle's pattern repeats."""


@dataclass(frozen=True)
class Descriptors:
    """Fields of matrix descriptors, arrays of the same length; all but `mode` in bytes.

    Attributes:
        start: address of the first element in the program's shared memory.
        leading: leading dimension byte offset.
        stride: stride dimension byte offset.
        base_offset: row of the swizzle's pattern at which the pattern starts, where it does not start at a multiple of
            its size: a number from 0 to 7.
        mode: 0 no swizzle, 1, 2, 3: swizzles of 128, 64 and 32 bytes.
    """

    start: Array
    leading: Array
    stride: Array
    base_offset: Array
    mode: Array


def decode_descriptors(bits: Array) -> Descriptors:
    """Fields of 64-bit matrix descriptors.

    Args:
        bits: uint64.
    """

    def field(first: int, length: int) -> Array:
        return ((bits >> np.uint64(first)) & np.uint64(2**length - 1)).astype(np.int64)

    return Descriptors(
        start=field(0, 14) << 4,
        leading=field(16, 14) << 4,
        stride=field(32, 14) << 4,
        base_offset=field(49, 3),
        mode=field(62, 2),
    )


def misaligned_descriptors(descriptors: Descriptors) -> Array:
    """Operands that do not start with the first row of their swizzle's pattern, as counted with the base offset, or
    have a base offset without a swizzle. The addresses themselves are multiples of 16 by their encoding."""
    rows = np.array([8, 8, 4, 2])[descriptors.mode]
    first = np.where(descriptors.mode == 0, 0, descriptors.start >> 7)
    return (first - descriptors.base_offset) % rows != 0


def operand_addresses(
    descriptors: Descriptors, rows: int, depth: int, element_bytes: int, transposed: bool, by_chunk: bool = False
) -> Array:
    """Address of every element, or 16-byte chunk, of the operands that descriptors describe.

    An operand is given with its rows along M or N and its columns along K. A swizzle exchanges the 16-byte chunks of a
    row of its pattern: it XORs address bits 4 and up with the row's number, address bits 7 and up. The number counts
    from the start of the pattern, which the base offset moves.

    Args:
        descriptors: arrays of length n.
        rows: 64 for the first factor, N for the second.
        depth: K of the shape.
        element_bytes: 2 or 4.
        transposed: False if the elements of a row lie side by side ("K-major"), True if those of a column do.
        by_chunk: one address for each 16 / element_bytes elements that lie side by side.

    Returns:
        int64, in bytes from the start of the program's shared memory: (n, rows, depth), or by chunk with one of the
        last two dimensions shorter.
    """
    step = 16 // element_bytes if by_chunk else 1
    row = np.arange(0, rows, step if transposed else 1)[:, None]
    column = np.arange(0, depth, 1 if transposed else step)[None, :]
    along, across = (row * element_bytes, column) if transposed else (column * element_bytes, row)
    mode = descriptors.mode[:, None, None]
    pattern = SWIZZLE_BYTES[mode]
    chunks, groups = along // pattern, across // PATTERN_ROWS
    swapped = (mode == 0) & transposed
    leading, stride = descriptors.leading[:, None, None], descriptors.stride[:, None, None]
    linear = (
        descriptors.start[:, None, None]
        + along % pattern
        + across % PATTERN_ROWS * pattern
        + np.where(swapped, groups, chunks) * leading
        + np.where(swapped, chunks, groups) * stride
    )
    pattern_row = (linear >> 7) - descriptors.base_offset[:, None, None]
    return linear ^ ((pattern_row & (pattern // 16 - 1)) << 4)


@lru_cache(maxsize=4096)
def operand_chunks(bits: int, rows: int, depth: int, element_bytes: int, transposed: bool) -> Array:
    """The addresses of an operand's 16-byte chunks, for one descriptor; int64 (rows, depth), one of them shorter."""
    descriptors = decode_descriptors(np.array([bits], np.uint64))
    return operand_addresses(descriptors, rows, depth, element_bytes, transposed, by_chunk=True)[0]


def operand_from_chunks(chunks: Array, transposed: bool) -> Array:
    """(n, rows, K) from the contents of an operand's chunks, (n, rows, K) with one of the two shorter, and a last
    dimension of the elements of a chunk."""
    n, rows, columns, elements = chunks.shape
    if transposed:
        return chunks.swapaxes(2, 3).reshape(n, rows * elements, columns)
    return chunks.reshape(n, rows, columns * elements)


# ---- registers


@lru_cache(maxsize=64)
def accumulator_positions(columns: int) -> tuple[Array, Array]:
    """(row, column) in a warp's 16 rows of every element of an fp32 accumulator: each (32, columns / 2), by lane and
    register."""
    lane, register = np.meshgrid(np.arange(32), np.arange(columns // 2), indexing="ij")
    return lane // 4 + 8 * (register // 2 % 2), register // 4 * 8 + lane % 4 * 2 + register % 2


@lru_cache(maxsize=8)
def first_factor_positions(element_bytes: int) -> tuple[Array, Array]:
    """(row, column) in a warp's 16 rows of every element of a first factor in four registers: each (32, 8) for 16-bit
    elements, low half first, and (32, 4) for tf32; by lane and element."""
    lane, element = np.meshgrid(np.arange(32), np.arange(16 // element_bytes), indexing="ij")
    if element_bytes == 2:
        register = element // 2
        return lane // 4 + 8 * (register % 2), lane % 4 * 2 + element % 2 + 8 * (register // 2)
    return lane // 4 + 8 * (element % 2), lane % 4 + 4 * (element // 2)


def first_factor_from_registers(registers: Array, element_bytes: int) -> Array:
    """A warp's 16 rows of the first factor from its four registers.

    Args:
        registers: uint32 (n, 32, 4): by warp, lane and register.

    Returns:
        uint16 (n, 16, 16), or uint32 (n, 16, 8).
    """
    row, column = first_factor_positions(element_bytes)
    elements = np.ascontiguousarray(registers).view(np.uint16 if element_bytes == 2 else np.uint32)
    factor = np.empty((len(registers), 16, 32 // element_bytes), elements.dtype)
    factor[:, row, column] = elements
    return factor


def accumulator_from_registers(registers: Array) -> Array:
    """A warp's 16 rows of the accumulator: float32 (n, 16, N) from uint32 (n, 32, N / 2)."""
    row, column = accumulator_positions(2 * registers.shape[2])
    accumulator = np.empty((len(registers), 16, 2 * registers.shape[2]), np.float32)
    accumulator[:, row, column] = np.ascontiguousarray(registers).view(np.float32)
    return accumulator


def accumulator_to_registers(accumulator: Array) -> Array:
    """uint32 (n, 32, N / 2), by warp, lane and register, from float32 (n, 16, N)."""
    row, column = accumulator_positions(accumulator.shape[2])
    return np.ascontiguousarray(accumulator[:, row, column]).view(np.uint32)


# ---- the instruction


@dataclass(frozen=True)
class Shape:
    """Shape and type in the opcode of a wgmma.mma_async.

    Attributes:
        columns: N of the shape.
        depth: K of the shape.
        type: of both factors: "f16", "bf16" or "tf32".
    """

    columns: int
    depth: int
    type: str

    @property
    def element_bytes(self) -> int:
        return 4 if self.type == "tf32" else 2


def parse_shape(opcode: str) -> Shape:
    """The shape and types of an opcode such as wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16.

    Raises:
        ValueError: no such shape exists, or it is not emulated: accumulators of fp16, factors of 8 or 1 bit, sparse.
    """
    match = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32)\.(\w+)", opcode)
    if match is None or match[3] != match[4]:
        raise ValueError(f"{opcode} is not emulated: only fp32 accumulators and factors of f16, bf16 or tf32 are")
    shape = Shape(int(match[1]), int(match[2]), match[3])
    if shape.columns % 8 or not 8 <= shape.columns <= 256 or shape.depth * shape.element_bytes != 32:
        raise ValueError(f"no wgmma has the shape m64n{shape.columns}k{shape.depth} of {shape.type}")
    return shape


def factor_values(bits: Array, type: str) -> Array:
    """Convert the bits of a factor's elements to float64: uint16 for f16 and bf16, uint32 for tf32, whose low 13 bits
    the hardware does not read."""
    if type == "f16":
        return bits.view(np.float16).astype(np.float64)
    if type == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def product(first: Array, second: Array, accumulator: Array | None, type: str, negate: bool = False) -> Array:
    """first @ second^T + accumulator, summed in float64 and rounded once.

    The hardware's order of summation and its intermediate rounding are not documented; it may differ in the last bits.

    Args:
        first: (n, rows, K) bits.
        second: (n, N, K) bits.
        accumulator: float32 (n, rows, N), or None for zeros (scale-d false).
        negate: the factors' product counts negatively (one of imm-scale-a and imm-scale-b is -1).

    Returns:
        float32 (n, rows, N).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        result = np.matmul(factor_values(first, type), factor_values(second, type).swapaxes(1, 2))
        if negate:
            result = -result
        if accumulator is not None:
            result = result + accumulator
        return result.astype(np.float32)
