"""Emitters of loads, stores, atomic operations and asynchronous copies."""

from __future__ import annotations

import numpy as np

from . import accesses, async_copy
from .codegen import DTYPES, NUMPY_KIND, Code, emits
from .codegen_values import unknown
from .kernel import WIDTHS, Instruction

SPACES = {
    "global": "M.memory",
    "const": "M.memory",
    "shared": "M.shared",
    "shared::cta": "M.shared",
    "local": "M.local",
}


def space_of(i: Instruction) -> str | None:
    """The memory that an instruction names; None for a generic address."""
    return next((name.split("::")[0] for name in i.opcode if name.split("::")[0] in SPACES), None)


@emits("ld", "ldu")
def load(code: Code, i: Instruction) -> None:
    targets, type_ = code.vector(i.operands[0]), i.type
    if "param" in i.opcode:
        return load_parameter(code, i)
    size = WIDTHS[type_] // 8
    widths = [code.kernel.widths[code.kernel.registers[name]] for name in targets if name != "_"]
    width = max(widths, default=8 * size)
    kind = DTYPES[("i" if type_[0] == "s" and width > 8 * size else "u") + str(width // 8)]
    old = "None"
    mask = code.mask(i)
    if i.predicate is not None:
        before = [code.bits(name, f"b{width}") if name != "_" else "M.undefined(4)" for name in targets]
        old = f"({', '.join(before)},)"
    space = space_of(i)
    address, offset = code.address(i.operands[1], space or "generic")
    arguments = (mask, address, offset, size, code.constant(kind), old, len(targets), i.index)
    if space is None:
        call = code.call(accesses.load_generic, *arguments)
    else:
        call = f"{code.constant(accesses.load)}({SPACES[space]}, {', '.join(map(str, arguments))})"
    _bind_loaded(code, targets, call, width)


def _bind_loaded(code: Code, targets: tuple[str, ...], call: str, width: int) -> None:
    """The registers that a load returns; it has kept the lanes that do not load."""
    names = []
    for target in targets:
        number = code.kernel.registers.get(target)
        names.append("_" if number is None else f"r{number}")
        if number is not None:
            code.kinds[number] = f"u{width // 8}"
    code.line(f"{', '.join(names)}, = {call}")


def load_parameter(code: Code, i: Instruction) -> None:
    inner = i.operands[1].strip()[1:-1]
    name, _, offset = (part.strip() for part in inner.partition("+"))
    if not any(parameter.name == name for parameter in code.kernel.parameters):
        raise unknown(i)
    size = WIDTHS[i.type] // 8
    for place, target in enumerate(code.vector(i.operands[0])):
        expression = f"M.parameter({name!r}, {int(offset or '0', 0) + place * size}, {size})"
        kind = NUMPY_KIND[i.type]
        signed = kind[0] == "i"
        code.assign(
            i, target, f"{expression}.view({kind})" if signed else expression, i.type if signed else f"b{8 * size}"
        )


@emits("st")
def store(code: Code, i: Instruction) -> None:
    if "param" in i.opcode:  # the arguments of a call
        return
    values, type_ = code.vector(i.operands[1]), i.type
    space = space_of(i)
    address, offset = code.address(i.operands[0], space or "generic")
    bits = [code.bits(value, f"b{max(WIDTHS[type_], 8)}") for value in values]
    arguments = (code.mask(i), address, offset, WIDTHS[type_] // 8, f"({', '.join(bits)},)", i.index)
    if space is None:
        code.line(code.call(accesses.store_generic, *arguments))
    else:
        code.line(f"{code.constant(accesses.store)}({SPACES[space]}, {', '.join(map(str, arguments))})")


@emits("atom", "red")
def atomic(code: Code, i: Instruction) -> None:
    operation = next((name for name in i.opcode if name in accesses.ATOMIC), None)
    type_, space = i.type, space_of(i)
    if operation is None or type_ not in WIDTHS or type_ in ("f16x2", "bf16x2", "bf16"):
        raise unknown(i)
    operands = list(i.operands)
    target = operands.pop(0) if i.opcode[0] == "atom" else None
    address, offset = code.address(operands[0], space or "generic")
    values = ", ".join(code.bits(value, f"b{WIDTHS[type_]}") for value in operands[1:])
    kind = code.constant(DTYPES[NUMPY_KIND[type_]])
    where = SPACES.get(space or "global")
    arguments = f"{where}, {code.mask(i)}, {address}, {offset}, {operation!r}, {kind}, ({values},), {i.index}"
    call = f"{code.constant(accesses.atomic)}({arguments})"
    if target is None:
        code.line(call)
    else:
        code.assign(i, target, call, f"b{WIDTHS[type_]}")


@emits("cp")
def asynchronous_copy(code: Code, i: Instruction) -> None:
    if i.opcode[1] != "async" or "bulk" in i.opcode or "mbarrier" in i.opcode:
        raise unknown(i)
    mask = code.mask(i)
    if "commit_group" in i.opcode:
        code.line(code.call(async_copy.commit, mask))
    elif "wait_group" in i.opcode:
        code.line(code.call(async_copy.wait, mask, int(i.operands[0], 0)))
    elif "wait_all" in i.opcode:
        code.line(code.call(async_copy.wait, mask, None))
    else:
        target, target_offset = code.address(i.operands[0], "shared")
        source, source_offset = code.address(i.operands[1], "global")
        size = int(i.operands[2], 0)
        given = code.bits(i.operands[3], "u32") if len(i.operands) > 3 else "None"
        arguments = (mask, target, target_offset, source, source_offset, size, given, i.index)
        code.line(code.call(async_copy.start, *arguments))


@emits("membar", "fence", "prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "griddepcontrol")
def nothing(code: Code, i: Instruction) -> None:
    """Orders or hints: one machine sees every access at once."""


@emits("createpolicy")
def cache_policy(code: Code, i: Instruction) -> None:
    code.assign(i, i.operands[0], code.constant(np.uint64(0)), "b64")
