"""Lane and register of each element of the operands of mma.

Source: the figures of the PTX ISA document, section "Matrix Fragments for mma". Lane l has group g = l // 4 and place
t = l % 4 in its group. A register holds `packed` elements (two of 16 bits, four of 8 bits). Therefore a matrix is the
registers of its warp with their axes in another order, and that is how the functions here make one from the other.
"""

from __future__ import annotations

import numpy as np


def rows_from_registers(values: np.ndarray, rows: int, packed: int) -> np.ndarray:
    """A, or B transposed, whose rows run along k.

    A register covers eight rows and 4 * packed columns; the registers go first down, then right.

    Args:
        values: elements of shape (registers, warps, 32 * packed), as they lie in the registers.

    Returns:
        Shape (warps, rows, k).
    """
    registers, warps, _ = values.shape
    down = rows // 8
    parts = values.reshape(registers // down, down, warps, 8, 4, packed)
    # (right, down, warp, g, t, within) -> (warp, down, g, right, t, within)
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(warps, rows, -1)


def accumulator_from_registers(values: np.ndarray, rows: int, packed: int) -> np.ndarray:
    """C: each eight rows, lane (g, t) holds columns 2 t and 2 t + 1 of row g.

    Args:
        values: elements of shape (registers, warps, 32 * packed).

    Returns:
        Shape (warps, rows, 8).
    """
    _, warps, _ = values.shape
    parts = values.reshape(rows // 8, 2 // packed, warps, 8, 4, packed)
    # (down, half, warp, g, t, within) -> (warp, down, g, t, half, within)
    return parts.transpose(2, 0, 3, 4, 1, 5).reshape(warps, rows, 8)


def registers_from_accumulator(matrix: np.ndarray, packed: int) -> np.ndarray:
    """The opposite: shape (registers, warps, 32 * packed)."""
    warps, rows, _ = matrix.shape
    parts = matrix.reshape(warps, rows // 8, 8, 4, 2 // packed, packed)
    return parts.transpose(1, 4, 0, 2, 3, 5).reshape(rows // 8 * (2 // packed), warps, 32 * packed)
