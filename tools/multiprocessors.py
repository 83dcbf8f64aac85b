"""Multiprocessors by compute capability: what they hold, and how many programs fit on one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor, which its programs share: bytes of shared memory, warps, registers and programs
    (CUDA C++ programming guide, limits by compute capability)."""

    shared: int
    warps: int = 64
    registers: int = 65536
    programs: int = 32

    def occupancy(self, registers: int, shared: int, warps: int) -> tuple[int, float, str]:
        """Return (number of programs that fit, share of the warps that they fill, limiting resource) for programs of
        `warps` warps with this many registers per thread and bytes of shared memory."""
        a_warp = -(-registers * 32 // 256) * 256  # registers are given out 256 to a warp
        a_program = -(-(shared + 1024) // 128) * 128  # 1 KB is the system's own, in every program
        fits = {
            "registers": self.registers // (a_warp * warps),
            "shared memory": self.shared // a_program,
            "warps": self.warps // warps,
            "programs": self.programs,
        }
        scarce = min(fits, key=fits.__getitem__)
        return fits[scarce], fits[scarce] * warps / self.warps, scarce


MULTIPROCESSORS = {80: Multiprocessor(164 * 1024), 90: Multiprocessor(228 * 1024), 100: Multiprocessor(228 * 1024)}
"""By compute capability."""
