"""Which lane and register holds which element of the operands of mma, ldmatrix and stmatrix.

Source: the figures of the PTX ISA document, sections "Matrix Fragments for mma" and "ldmatrix". Lane l has group g = l // 4
and place t = l % 4 in its group. A register of 32 bits holds `packed` elements (two of 16 bits, four of 8 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

LANES = np.arange(32)
GROUP, PLACE = LANES // 4, LANES % 4


@dataclass(frozen=True)
class Fragments:
    """Maps of one shape of mma. Each has the shape of its matrix and holds lane * elements a lane + element.

    accumulator_order: the inverse, for each element of each lane the place in the flattened matrix.
    """

    a: np.ndarray
    b: np.ndarray
    accumulator: np.ndarray
    accumulator_order: np.ndarray


@cache
def fragments(m: int, n: int, k: int, packed: int) -> Fragments:
    """Of mma.mMnNkK with `packed` elements of A and B a register: m16n8 of any k, and m8n8k4 (f64)."""
    a = _place_rows(m, k, packed)
    b = _place_rows(n, k, packed).T
    accumulator = np.zeros((m, n), np.intp)
    elements = m * n // 32
    for element in range(elements):
        accumulator[GROUP + 8 * (element // 2), 2 * PLACE + element % 2] = LANES * elements + element
    return Fragments(a, b, accumulator, np.argsort(accumulator.ravel()))


def _place_rows(rows: int, k: int, packed: int) -> np.ndarray:
    """Of a matrix whose rows run along k: eight rows by 4 * packed columns a register, first down, then right."""
    place = np.zeros((rows, k), np.intp)
    down = rows // 8
    elements = rows * k // 32
    for element in range(elements):
        register, within = divmod(element, packed)
        row = GROUP + 8 * (register % down)
        column = packed * PLACE + within + 4 * packed * (register // down)
        place[row, column] = LANES * elements + element
    return place
