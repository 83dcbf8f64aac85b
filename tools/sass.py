"""SASS, the machine code of NVIDIA's GPUs, as `cuobjdump -sass` prints it: instructions with their control codes.

Every instruction is 16 bytes. The upper half holds scheduling control codes: the number of cycles before the same warp
may issue again, and the barriers, of six, that the instruction sets or waits for (Z. Jia et al., "Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking", 2018, section 2.1).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_FIRST_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND_LINE = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_PREDICATED = re.compile(r"(@!?U?P\w+)\s+(.*)")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
NO_BARRIER = 7


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        address: address of its first byte, from the kernel's start.
        opcode: with its modifiers, e.g. ``LDG.E.128``.
        operands: as printed.
        predicate: e.g. ``@!P0``; "" where it always runs.
        stall: cycles before the warp may issue its next instruction.
        write_barrier: barrier released when the result is written; None for none.
        read_barrier: barrier released when the operands have been read; None for none.
        waits: barriers that must be released before it issues.
    """

    address: int
    opcode: str
    operands: str
    predicate: str
    stall: int
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @cached_property
    def is_tensor(self) -> bool:
        """Return True for a matrix product of the tensor cores."""
        return self.name in ("HGMMA", "HMMA", "QGMMA", "IGMMA", "UTCHMMA")

    @cached_property
    def target(self) -> int | None:
        """Target of a branch; None for other instructions, and for branches to an address in a register."""
        match = _TARGET.search(self.operands) if self.name == "BRA" else None
        return int(match[1], 16) if match else None

    @cached_property
    def is_conditional(self) -> bool:
        """Return True if a branch or exit may be passed over: by its predicate, or by one among its operands."""
        return self.predicate not in ("", "@PT", "@UPT") or re.match(r"!?U?P\d", self.operands) is not None


def parse(text: str) -> list[Instruction]:
    """The instructions of the one kernel in a listing, in order.

    Raises:
        ValueError: there is no instruction, or one without its second half.
    """
    instructions: list[Instruction] = []
    first: re.Match[str] | None = None
    for line in text.splitlines():
        if match := _FIRST_LINE.match(line):
            if first is not None:
                raise ValueError(f"the instruction at {first[1]} lacks its control codes")
            first = match
        elif first is not None and (match := _SECOND_LINE.match(line)):
            instructions.append(_instruction(int(first[1], 16), first[2], int(match[1], 16)))
            first = None
    if not instructions or first is not None:
        raise ValueError("not a listing of `cuobjdump -sass` with both halves of every instruction")
    return instructions


def _instruction(address: int, text: str, upper: int) -> Instruction:
    predicate = ""
    if match := _PREDICATED.match(text):
        predicate, text = match[1], match[2]
    opcode, _, operands = text.partition(" ")
    write, read = upper >> 46 & 7, upper >> 49 & 7
    return Instruction(
        address,
        opcode,
        operands.strip(),
        predicate,
        stall=upper >> 41 & 15,
        write_barrier=None if write == NO_BARRIER else write,
        read_barrier=None if read == NO_BARRIER else read,
        waits=tuple(barrier for barrier in range(6) if upper >> 52 >> barrier & 1),
    )


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a compiled kernel."""
    return parse(cuobjdump("-sass", cubin))


def cuobjdump(option: str, cubin: bytes) -> str:
    """Output of the cuobjdump that Triton ships, for a compiled kernel."""
    from triton.backends.nvidia import compiler as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
