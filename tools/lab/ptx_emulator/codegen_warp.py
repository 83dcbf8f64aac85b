"""Emitters of instructions of whole warps and CTAs: shuffles, votes, matrices, barriers, traps."""

from __future__ import annotations

import re

from . import warp
from .codegen import Code, emits
from .codegen_values import unknown
from .kernel import Instruction
from .machine import Machine


def _two(operand: str) -> list[str]:
    """d|p -> its two targets."""
    return [name.strip() for name in operand.split("|")]


@emits("shfl")
def shuffle(code: Code, i: Instruction) -> None:
    if "sync" not in i.opcode:
        raise unknown(i)
    value, b, c = (code.bits(operand, "b32") for operand in i.operands[1:4])
    members = code.bits(i.operands[4], "b32")
    call = code.call(warp.shuffle, code.mask(i), repr(i.opcode[2]), value, b, c, members, i.index)
    _assign_two(code, i, call, "b32")


def _assign_two(code: Code, i: Instruction, call: str, type_: str) -> None:
    """A value and a predicate, of which the predicate may be missing."""
    targets = _two(i.operands[0])
    code.line(f"t, s = {call}")
    code.assign(i, targets[0], "t", type_)
    if len(targets) > 1:
        code.assign(i, targets[1], "s", "pred")


@emits("vote")
def vote(code: Code, i: Instruction) -> None:
    predicate, members = code.bits(i.operands[1], "pred"), code.bits(i.operands[2], "b32")
    call = code.call(warp.vote, code.mask(i), repr(i.opcode[2]), predicate, members, i.index)
    code.assign(i, i.operands[0], call, "b32" if i.opcode[2] == "ballot" else "pred")


@emits("match")
def match(code: Code, i: Instruction) -> None:
    value, members = code.bits(i.operands[1], i.type), code.bits(i.operands[2], "b32")
    call = code.call(warp.match, code.mask(i), repr(i.opcode[1]), value, members, i.index)
    _assign_two(code, i, call, "b32")


@emits("redux")
def reduce(code: Code, i: Instruction) -> None:
    if set(i.opcode) & {"abs", "NaN"}:
        raise unknown(i)
    value, members = code.value(i.operands[1], i.type), code.bits(i.operands[2], "b32")
    call = code.call(warp.reduce, code.mask(i), repr(i.opcode[2]), value, members, i.index)
    code.assign(i, i.operands[0], call, i.type)


@emits("elect")
def elect(code: Code, i: Instruction) -> None:
    members = code.bits(i.operands[1], "b32")
    _assign_two(code, i, code.call(warp.elect, code.mask(i), members, i.index), "b32")


@emits("activemask")
def active_mask(code: Code, i: Instruction) -> None:
    code.assign(i, i.operands[0], code.call(warp.active_mask, code.mask(i)), "b32")


@emits("ldmatrix")
def load_matrices(code: Code, i: Instruction) -> None:
    targets = code.vector(i.operands[0])
    if i.type != "b16" or "m8n8" not in i.opcode:
        raise unknown(i)
    address, offset = code.address(i.operands[1], "shared")
    call = code.call(
        warp.load_matrices, code.mask(i), address, offset, len(targets), "trans" in i.opcode, i.index
    )  # fmt: skip
    code.assign_all(i, targets, call)


@emits("stmatrix")
def store_matrices(code: Code, i: Instruction) -> None:
    if i.type != "b16" or "m8n8" not in i.opcode:
        raise unknown(i)
    address, offset = code.address(i.operands[0], "shared")
    values = ", ".join(code.bits(name, "b32") for name in code.vector(i.operands[1]))
    code.line(
        code.call(warp.store_matrices, code.mask(i), address, offset, f"({values},)", "trans" in i.opcode, i.index)
    )


@emits("mma")
def multiply_matrices(code: Code, i: Instruction) -> None:
    shape = next(found for name in i.opcode if (found := re.match(r"m(\d+)n(\d+)k(\d+)$", name)))
    d, a, b, c = i.opcode[-4:]
    size = int(shape[1]), int(shape[2]), int(shape[3])
    known = size[:2] == (16, 8) or (size == (8, 8, 4) and a == "f64")
    rest = set(i.opcode[1:-4]) - {"sync", "aligned", shape.group(), "row", "col"}
    if not known or "row" not in i.opcode or "col" not in i.opcode or rest:
        raise unknown(i)
    product = warp.MatrixProduct(*size, (d, a, b, c))
    width = "b64" if a == "f64" else "b32"
    operands = [
        f"({', '.join(code.bits(name, width) for name in code.vector(operand))},)" for operand in i.operands[1:]
    ]
    call = code.call(warp.multiply_matrices, code.mask(i), code.constant(product), *operands, i.index)
    code.assign_all(i, code.vector(i.operands[0]), call, width)


@emits("bar", "barrier")
def barrier(code: Code, i: Instruction) -> None:
    """Translate a barrier of a warp. At a barrier of a CTA the scheduler holds the lanes; only a barrier of all threads
    is supported."""
    if "warp" in i.opcode:
        code.line(code.call(warp.synchronise, code.mask(i), code.bits(i.operands[0], "b32"), i.index))
        return
    whole = len(i.operands) == 1 or i.operands[1] == str(code.kernel.threads)
    if i.predicate is not None or "sync" not in i.opcode or not i.operands[0].isdigit() or not whole:
        raise unknown(i)


@emits("trap")
def trap(code: Code, i: Instruction) -> None:
    code.line(code.call(_trapped, code.mask(i), i.index, "'trap reached'"))


@emits("call")
def call(code: Code, i: Instruction) -> None:
    kind = "device assertion failed" if "__assertfail" in i.operands else "call of an unknown function"
    code.line(code.call(_trapped, code.mask(i), i.index, repr(kind)))


def _trapped(machine: Machine, mask: object, index: int, kind: str) -> None:
    active = machine.active(mask)
    if active.any():
        machine.report(kind, index, machine.thread_name(int(active.argmax())))
