"""The operands of an executed wgmma: from the registers of warps, and from shared memory by matrix descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arithmetic import Array
from .machine import Machine
from .wgmma_layout import Shape, decode_descriptors, misaligned_descriptors, operand_chunks, operand_from_chunks
from .wgmma_shadow import CHUNK


@dataclass(frozen=True)
class Mma:
    """Fields of a wgmma.mma_async, besides its operands.

    Args:
        index: index of the instruction.
        shape: its shape and types.
        accumulators: numbers of its accumulator's registers.
        first_factor: numbers of its first factor's registers, none if that lies in shared memory.
        transposed: True per factor if the first or second factor is transposed (imm-trans-a, imm-trans-b).
        negate: exactly one of imm-scale-a and imm-scale-b is -1.
        unfenced: names of its registers that were accessed before it without wgmma.fence.
    """

    index: int
    shape: Shape
    accumulators: tuple[int, ...]
    first_factor: tuple[int, ...]
    transposed: tuple[bool, bool]
    negate: bool
    unfenced: tuple[str, ...] = ()


def of_warps(registers: Sequence[Array], warps: np.ndarray) -> np.ndarray:
    """uint32 (n, 32, registers)."""
    out = np.empty((len(warps), 32, len(registers)), np.uint32)
    for place, register in enumerate(registers):
        out[:, :, place] = register if register.ndim == 0 else register.reshape(-1, 32)[warps]
    return out


def operand(
    machine: Machine, mma: Mma, warps: np.ndarray, leaders: np.ndarray, members: np.ndarray, descriptors: Array,
    rows: int, transposed: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Each warpgroup's operand in shared memory; what its descriptors get wrong is reported.

    Args:
        warps: the warps that execute the wgmma, as numbers in the machine; (n,).
        leaders: for each of g warpgroups, the place of its first warp in `warps`.
        members: for each warp, the place of its warpgroup in `leaders`.
        descriptors: matrix descriptors of all lanes.
        rows, transposed: as for `operand_addresses`.

    Returns:
        Bits (g, rows, K), and the numbers of the 16-byte chunks that they come from, (g, any).
    """
    shape = mma.shape
    bits = machine.full(descriptors).reshape(-1, 32)[warps]
    leading = bits[leaders, 0]
    if (bits != leading[members][:, None]).any():
        kind = "threads of a warpgroup give a wgmma different matrix descriptors"
        machine.report(kind, mma.index, machine.thread_name(int(warps[0]) * 32))
    different, which = np.unique(leading, return_inverse=True)
    if misaligned_descriptors(decode_descriptors(different)).any():
        detail = " ".join(f"0x{int(descriptor):016x}" for descriptor in different[:2])
        machine.report("matrix descriptor misaligned to its swizzle", mma.index, detail)
    addresses = np.stack(
        [operand_chunks(int(d), rows, shape.depth, shape.element_bytes, transposed) for d in different]
    )
    beyond = addresses > machine.shared.size - CHUNK
    if beyond.any():
        detail = f"byte {int(addresses.max())} of {machine.shared.size}"
        machine.report("wgmma reads beyond the end of shared memory", mma.index, detail)
        addresses = np.where(beyond, 0, addresses)
    base = machine.shared.base[warps[leaders] * 32]
    chunks = (addresses[which] + base[:, None, None]) // CHUNK
    memory = machine.shared.data.view(np.uint16 if shape.element_bytes == 2 else np.uint32)
    contents = memory.reshape(-1, CHUNK // shape.element_bytes)[chunks]
    return operand_from_chunks(contents, transposed), chunks.reshape(len(leaders), -1)
