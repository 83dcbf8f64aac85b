"""A kernel as the parser gives it: instructions, registers, labels, parameters, variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDTHS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
    "f32x2": 64,
}  # fmt: skip
"""Bits of each fundamental type."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        opcode: its name and modifiers, such as ("ld", "global", "b32"); "a::b" is one modifier.
        operands: the operands as written, registers under their unique names.
        predicate, negated: the guard @p or @!p, if any.
        text: the whole statement as written.
        location: the line of source that the nearest .loc names, or "".
        line: line of the PTX text, from 1.
        index: place in Kernel.instructions.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    location: str
    line: int
    index: int

    @property
    def type(self) -> str:
        return self.opcode[-1]


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Variable:
    """A variable in shared, local, global or const space. size 0: as large as the launch says (.extern .shared x[])."""

    name: str
    space: str
    size: int
    align: int
    data: bytes | None = None


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter] = field(default_factory=list)
    threads: int | None = None
    registers: dict[str, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    wgmma: Any = None  # what codegen_wgmma found out about its wgmma instructions

    def offsets(self, space: str) -> dict[str, int]:
        """Offsets of the variables of a space; those of unknown size come last, at one place."""
        at, places = 0, {}
        for variable in sorted((v for v in self.variables.values() if v.space == space), key=lambda v: v.size == 0):
            at = -(-at // variable.align) * variable.align
            places[variable.name] = at
            at += variable.size
        return places

    def static_size(self, space: str) -> int:
        offsets = self.offsets(space)
        return max((offsets[name] + self.variables[name].size for name in offsets), default=0)


def split_operands(text: str) -> tuple[str, ...]:
    """Split operands at the commas outside braces, brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)
