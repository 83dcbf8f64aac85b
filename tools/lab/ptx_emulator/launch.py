"""Runs a launch of a kernel given as PTX text, on tensors in host memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .blocks import translate
from .kernel import Kernel
from .machine import Machine
from .memory import Tensors
from .parser import parse
from .program import Program
from .report import EmulationError, Report
from .sanitizer import GlobalShadow

LANES_AT_ONCE = 4096
"""Approximate number of threads that run at once: enough for long numpy loops, few enough for registers to stay in
cache."""

ORDERS = ("lockstep", "serial", "reverse")


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    Args:
        name: name in findings.
        type: as Triton writes it: "*bf16" (any pointer begins with "*"), "i32", "u64", "fp32", ...
        value: a tensor (written in place) or None for a pointer, a number for the others; bytes for a struct.
    """

    name: str
    type: str
    value: Any


@lru_cache(maxsize=256)
def _parsed(ptx: str) -> dict[str, Kernel]:
    return parse(ptx)


@lru_cache(maxsize=256)
def _translated(ptx: str, entry: str) -> Program:
    return translate(_parsed(ptx)[entry])


def launch(
    ptx: str,
    grid: tuple[int, int, int],
    threads: int | tuple[int, int, int],
    shared: int,
    arguments: list[Argument],
    *,
    entry: str | None = None,
    sanitize: bool = True,
    order: str = "lockstep",
    report: Report | None = None,
    memory: Sequence[tuple[str, Any]] = (),
) -> Report:
    """Runs every program of the grid; tensors are written in place.

    Args:
        ptx: the text of a module.
        grid: number of CTAs by axis.
        threads: number of threads per CTA, a multiple of 32; or per axis.
        shared: bytes of dynamic shared memory; the kernel's own variables come on top.
        arguments: in the order of the kernel's parameters. Pointers that come after the last are null.
        entry: name of the kernel; may be left out if the module has one.
        sanitize: check races and reads of shared bytes that were never written. Bounds are checked always.
        order: "lockstep" (all warps together, block by block), "serial" (each warp as far as it can, the first first)
            or "reverse" (the last first).
        report: to add to; a new one by default.
        memory: further tensors with their names, to which structs among the arguments may point: words of a struct that
            are addresses in them, or in tensors among the arguments, become addresses of the device.

    Returns:
        The report.

    Raises:
        EmulationError: the kernel cannot be translated, or cannot run on. What it wrote until then is in the tensors.
        ValueError: arguments, threads or order do not fit.
    """
    report = Report() if report is None else report
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    kernels = _parsed(ptx)
    if entry is None:
        if len(kernels) != 1:
            raise ValueError(f"say which entry: {', '.join(kernels)}")
        entry = next(iter(kernels))
    if entry not in kernels:
        raise ValueError(f"no entry {entry}; there is {', '.join(kernels)}")
    program = _translated(ptx, entry)
    kernel = program.kernel
    block = (threads, 1, 1) if isinstance(threads, int) else threads
    count = block[0] * block[1] * block[2]
    if count % 32 or not count:
        raise ValueError(f"{count} threads are not whole warps")
    if kernel.threads not in (None, count):
        raise ValueError(f"{entry} is compiled for {kernel.threads} threads, not {count}")
    variables = [v for v in kernel.variables.values() if v.space in ("global", "const")]
    given = [(a.name, a.value) for a in arguments if hasattr(a.value, "untyped_storage")]
    tensors = Tensors([*given, *memory], variables)
    parameters = _parameters(kernel, arguments, tensors)
    shadow = GlobalShadow(tensors.data.size, program.global_granule, tensors.describe) if sanitize else None
    executed = np.zeros(len(program.blocks), np.int64)
    ctas = grid[0] * grid[1] * grid[2]
    at_once = max(1, LANES_AT_ONCE // count)
    size = shared + kernel.static_size("shared")
    try:
        with np.errstate(all="ignore"):
            for first in range(0, ctas, at_once):
                machine = Machine(
                    program, first, min(at_once, ctas - first), grid, block, size, parameters, tensors, shadow, report,
                    order,
                )  # fmt: skip
                machine.run()
                executed += machine.executed
    finally:
        tensors.write_back()
    _count(report, program, executed)
    if shadow is not None:
        for name, start, size in tensors.regions:
            report.reach[name] = max(report.reach.get(name, 0), shadow.reach(start, size))
    return report


def _parameters(kernel: Kernel, arguments: list[Argument], tensors: Tensors) -> dict[str, bytes]:
    parameters = {}
    if len(arguments) > len(kernel.parameters):
        raise ValueError(f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(arguments)}")
    for place, parameter in enumerate(kernel.parameters):
        data = bytes(parameter.size) if place >= len(arguments) else _bytes(arguments[place], parameter.size, tensors)
        if len(data) != parameter.size:
            argument = arguments[place]
            raise ValueError(
                f"{kernel.name}: {argument.name} of type {argument.type} has {len(data)} bytes, "
                f"its parameter {parameter.size}"
            )
        parameters[parameter.name] = data
    return parameters


def _bytes(argument: Argument, size: int, tensors: Tensors) -> bytes:
    """Bytes of an argument in the parameter space."""
    value, kind = argument.value, argument.type
    if isinstance(value, bytes):
        return tensors.with_device_addresses(value).ljust(size, b"\0")
    if kind.startswith("*"):
        if value is not None and not hasattr(value, "untyped_storage"):
            raise ValueError(f"{argument.name} must be a tensor or None, not {type(value).__name__}")
        return (0 if value is None else tensors.address(value)).to_bytes(8, "little")
    found = re.fullmatch(r"(fp|f|i|u|b)(\d+)", kind)
    if found is None:
        raise ValueError(f"{argument.name}: the type {kind} is not known")
    bits = int(found[2])
    if found[1] in ("fp", "f"):
        floats: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}
        return floats[bits](value).tobytes()
    return (int(value) & (2**bits - 1)).to_bytes(max(bits // 8, 1), "little")


def _count(report: Report, program: Program, executed: np.ndarray) -> None:
    report.launches += 1
    kernel = program.kernel
    for number in np.flatnonzero(executed):
        block, times = program.blocks[number], int(executed[number])
        for instruction in kernel.instructions[block.first : block.last + 1]:
            report.instructions[".".join(instruction.opcode)] += times
            report.lines[kernel.name, instruction.line] += times


__all__ = ["Argument", "EmulationError", "launch"]
