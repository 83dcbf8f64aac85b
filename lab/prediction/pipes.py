"""Needs of an instruction on a multiprocessor: its pipe, for how long, and what it waits for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from tools.sass import Instruction

from .machine import H100, Machine

PIPES = ("issue", "tensor", "fp32", "multiply", "alu", "mufu", "uniform", "shared")
"""fp32: either of two pipes, of which "multiply" is the one that multiplies integers too. shared: shared memory, the
first-level cache and shuffles, a fourth of which is a sub-partition's."""

_FP32 = {"FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"}
_ALU = {
    *(
        "LOP3",
        "PLOP3",
        "LOP",
        "SHF",
        "PRMT",
        "LEA",
        "BMSK",
        "SGXT",
        "MOV",
        "SEL",
        "FSEL",
        "P2R",
        "R2P",
        "VOTE",
        "VOTEU",
    ),
    *("IADD", "IADD3", "VIADD", "ISCADD", "IABS", "ISETP", "FSETP", "HSETP2", "HSET2", "IMNMX", "VIMNMX", "FMNMX"),
    *("CS2R", "F2FP", "FCHK"),
}
_MUFU = {"MUFU", "POPC", "FLO", "I2F", "F2I", "I2FP", "F2F", "BREV"}
_SHARED = {"LDS", "LDSM", "STS", "STSM"}
_GLOBAL = {"LDG", "STG", "LDGSTS"}
_LOCAL = {"LDL", "STL"}
_CONSTANT = {"LDC", "S2R", "S2UR"}


class Kind(Enum):
    """Kind of an instruction that the replay treats specially, besides its pipe and barriers."""

    PLAIN = auto()
    COPY = auto()
    COMMIT_COPIES = auto()
    WAIT_FOR_COPIES = auto()
    PRODUCT = auto()
    WAIT_FOR_PRODUCTS = auto()
    DELAY = auto()
    BARRIER = auto()


@dataclass(frozen=True)
class Operation:
    """Instruction in the form that the replay takes.

    Args:
        kind: see :class:`Kind`.
        pipe: index in :data:`PIPES`.
        cost: cycles that it keeps its pipe.
        latency: cycles from its turn to its result, beyond the cost; for a delay or barrier, until the warp goes on.
        stall, write_barrier, read_barrier, waits: see :class:`tools.sass.Instruction`; barrier 6 for none.
        count: how many groups may be outstanding after a wait; whether a product ends its group (1).
        operand_cost: cycles of a product in shared memory.
        memory: cycles until what a copy asked for has come.
    """

    kind: Kind
    pipe: int
    cost: float
    latency: float
    stall: int
    write_barrier: int = 6
    read_barrier: int = 6
    waits: tuple[int, ...] = ()
    count: int = 0
    operand_cost: float = 0.0
    memory: float = 0.0


def pipe_of(instruction: Instruction) -> str:
    """Return the pipe, one of :data:`PIPES`; "issue" if an instruction needs no other pipe."""
    name = instruction.name
    if instruction.is_tensor:
        return "tensor"
    if name in _FP32:
        return "fp32"
    if name == "IMAD":
        return "multiply"
    if name in _MUFU:
        return "mufu"
    if name in _ALU:
        return "alu"
    if name in _SHARED or name in _GLOBAL or name in _LOCAL or name == "SHFL":
        return "shared"
    if name == "R2UR" or (name.startswith("U") and not name.startswith("UTMA")):
        return "uniform"
    return "issue"


def bytes_of(instruction: Instruction) -> int:
    """Bytes that the 32 lanes of a load or store move."""
    modifiers = instruction.opcode.split(".")
    if instruction.name in ("LDSM", "STSM"):
        return 128 * next((int(m) for m in modifiers if m in ("2", "4")), 1)
    return 32 * (16 if "128" in modifiers else 8 if "64" in modifiers else 4)


def columns_of(instruction: Instruction) -> int:
    """N of a wgmma of 64 x N."""
    match = re.search(r"\.64x(\d+)x\d+", instruction.opcode)
    if match is None:
        raise ValueError(f"{instruction.opcode} at {instruction.address:#x} has no shape 64xNxK")
    return int(match[1])


def operand_bytes(instruction: Instruction) -> int:
    """Bytes of shared memory that a wgmma reads: its second operand, and its first where that is not in registers."""
    first_in_shared = instruction.operands.split(",")[1].strip().startswith("gdesc")
    return (2048 if first_in_shared else 0) + 32 * columns_of(instruction)


def cost_of(instruction: Instruction, machine: Machine = H100) -> float:
    """Cycles that the instruction of one warp keeps its pipe of a sub-partition."""
    pipe, name = pipe_of(instruction), instruction.name
    if pipe == "tensor":
        if name == "HGMMA":
            return columns_of(instruction) * machine.tensor
        return machine.mma_sync * (2 if "TF32" in instruction.opcode else 1)
    if pipe == "multiply":
        wide = ".WIDE" in instruction.opcode or ".HI" in instruction.opcode
        return machine.wide_multiply if wide else machine.integer_multiply
    if name == "SHFL":
        return machine.shuffle
    if pipe == "shared":
        return 4 * bytes_of(instruction) / machine.shared_width
    return {"fp32": machine.fp32, "alu": machine.alu, "mufu": machine.mufu, "uniform": machine.uniform}.get(pipe, 0.0)


def operation(instruction: Instruction, machine: Machine = H100) -> Operation:
    """Convert an instruction to an Operation."""
    name, pipe, cost = instruction.name, pipe_of(instruction), cost_of(instruction, machine)
    kind, latency, count, operand_cost, memory = Kind.PLAIN, 0.0, 0, 0.0, 0.0
    if name == "HGMMA":
        kind, count = Kind.PRODUCT, int("gsb0" in instruction.operands)
        operand_cost = operand_bytes(instruction) / machine.shared_width
    elif pipe == "tensor":
        latency = machine.mma_sync_latency
    elif pipe == "mufu":
        latency = machine.mufu_latency
    elif pipe == "uniform":
        latency = machine.uniform_latency
    elif name in _SHARED or name in _LOCAL:
        latency = machine.shared_latency
    elif name == "SHFL":
        latency = machine.shuffle_latency
    elif name == "LDGSTS":
        kind, latency = Kind.COPY, machine.copy_issue_latency
        memory = machine.memory_latency if bytes_of(instruction) > 256 else machine.cached_latency
    elif name in _GLOBAL:
        latency = machine.memory_latency if bytes_of(instruction) > 256 else machine.cached_latency
    elif name in _CONSTANT:
        latency = machine.constant_latency
    elif name == "LDGDEPBAR":
        kind = Kind.COMMIT_COPIES
    elif name == "DEPBAR" and (match := re.search(r"SB0,\s*0x(\w+)", instruction.operands)):
        kind, count = Kind.WAIT_FOR_COPIES, int(match[1], 16)
    elif name == "WARPGROUP" and (match := re.search(r"gsb0,\s*0x(\w+)", instruction.operands)):
        kind, count = Kind.WAIT_FOR_PRODUCTS, int(match[1], 16)
    elif name in ("WARPGROUP", "MEMBAR", "BRA"):
        kind = Kind.DELAY
        latency = {"WARPGROUP": machine.wgmma_arrive, "MEMBAR": machine.fence_latency}.get(name, machine.branch_latency)
    elif name == "BAR":
        kind, latency = Kind.BARRIER, machine.barrier_latency
    elif name == "SYNCS":
        latency = machine.mbarrier_latency
    return Operation(
        kind,
        PIPES.index(pipe),
        cost,
        latency,
        max(1, instruction.stall),
        6 if instruction.write_barrier is None else instruction.write_barrier,
        6 if instruction.read_barrier is None else instruction.read_barrier,
        instruction.waits,
        count,
        operand_cost,
        memory,
    )


def program_end(machine: Machine = H100) -> Operation:
    """End all warps of a program, and begin those of the next one."""
    return Operation(Kind.BARRIER, 0, 0.0, machine.start, 1)


def counts(path: Iterable[Instruction]) -> dict[str, int]:
    """Instructions of one warp by pipe; "issue" counts all of them."""
    found = Counter({"issue": 0})
    for instruction in path:
        found["issue"] += 1
        if (pipe := pipe_of(instruction)) != "issue":
            found[pipe] += 1
    return {pipe: found[pipe] for pipe in PIPES}


def cycles(path: list[Instruction], warps: int, machine: Machine = H100) -> dict[str, float]:
    """Least cycles of each pipe for one walk of a program's `warps` warps along a path, with nothing waiting."""
    of_warp = dict.fromkeys(PIPES, 0.0)
    for instruction in path:
        of_warp["issue"] += machine.issue
        pipe = pipe_of(instruction)
        if pipe != "issue":
            of_warp[pipe] += cost_of(instruction, machine)
        if instruction.name == "HGMMA":  # one read of shared memory for the four warps of a group
            of_warp["shared"] += operand_bytes(instruction) / machine.shared_width
    # An fp32 instruction may go to the pipe that multiplies integers: the two together have these cycles.
    of_warp["fp32"] = max(of_warp["multiply"], (of_warp["multiply"] + of_warp["fp32"]) / 2)
    return {pipe: cycles * warps / 4 for pipe, cycles in of_warp.items()}


def flops(path: Iterable[Instruction], warps: int) -> float:
    """Floating-point operations of the products of a program's `warps` warps along a path."""
    total = 0.0
    for instruction in path:
        if instruction.name == "HGMMA":
            match = re.search(r"\.64x(\d+)x(\d+)", instruction.opcode)
            total += 2 * 64 * int(match[1]) * int(match[2]) / 4
        elif instruction.name == "HMMA":
            match = re.search(r"\.16(8)(8|16)", instruction.opcode)
            total += 2 * 16 * int(match[1]) * int(match[2]) if match else 0
    return total * warps
