"""Kernels -> Python: each basic block becomes a function of (machine, registers, mask).

In a block a register is a Python variable, an array with one element a lane, or a numpy scalar for a value that is the
same in every lane. Registers that a block uses before it writes them live in the list `registers` between blocks, as
unsigned integers; a block writes them back for the lanes of its mask. Lanes outside the mask compute garbage, which
nobody reads; only accesses to memory and instructions of whole warps need the mask.

An instruction is translated by the emitter of the first part of its opcode. `emits("name")` registers one, so that
another module can add a family of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import arithmetic
from .arithmetic import UNSIGNED
from .kernel import WIDTHS, Instruction, Kernel, split_operands
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .report import EmulationError

Emitter = Callable[["Code", Instruction], None]
EMITTERS: dict[str, Emitter] = {}


def emits(*names: str) -> Callable[[Emitter], Emitter]:
    """Registers the translation of the instructions whose opcode begins with one of these names."""

    def register(emitter: Emitter) -> Emitter:
        EMITTERS.update(dict.fromkeys(names, emitter))
        return emitter

    return register


FLOATS = {"f32": "f4", "f64": "f8", "f16": "f2"}
NUMPY_KIND = {"pred": "?"} | {
    name: FLOATS.get(name, ("i" if name[0] == "s" else "u") + str(width // 8))
    for name, width in WIDTHS.items()
    if name != "pred"
}
"""numpy's type of the value of each type; bf16, tf32 and packed types stay bits."""
DTYPES = {kind: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}

SPECIAL = re.compile(
    r"%(n?(tid|ctaid|clusterid)\.[xyz]|cluster_n?ctaid\.[xyz]|cluster_n?ctarank|laneid|n?warpid|lanemask_(eq|l[te]|g[te]))$"
)
"""Special registers that a machine knows."""


WITHOUT_TARGET = {"st", "stmatrix", "cp", "bra", "ret", "exit", "trap", "bar", "barrier", "red", "membar", "fence",
                  "prefetch", "call", "nanosleep", "mbarrier"}  # fmt: skip
"""Opcodes whose first operand, if any, is read. Modules that add emitters may add to it."""


class Code:
    """Translates the instructions of one kernel. Emitters use its public methods."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.lines: list[str] = []
        self.environment: dict[str, Any] = {name: value for name, value in vars(arithmetic).items() if name[0] != "_"}
        self.environment |= DTYPES | {"np": np, "where": np.where}
        self.kinds: dict[int, str] = {}  # of the registers that are variables now, their numpy type
        self.checks: list[Emitter] = []  # called before the emitter of every instruction
        self._constants: dict[Any, str] = {}
        self._offsets = kernel.offsets("shared"), kernel.offsets("local")

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def constant(self, value: Any) -> str:
        """Return a name for a value in generated code."""
        key = (type(value), value)
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"k{len(self._constants)}"
            self.environment[name] = value
        return name

    def call(self, function: Callable[..., Any], *arguments: object) -> str:
        """Return the expression function(machine, arguments...); arguments that are not text are converted to text."""
        return f"{self.constant(function)}(M, {', '.join(str(argument) for argument in arguments)})"

    # ---- operands

    def is_register(self, operand: str) -> bool:
        return operand in self.kernel.registers

    def variable(self, operand: str) -> tuple[str, str, int]:
        """Return the variable of a register, its current numpy type, and the register's width."""
        number = self.kernel.registers[operand]
        width = self.kernel.widths[number]
        if number not in self.kinds:
            self.line(f"r{number} = R[{number}]")
            self.kinds[number] = "?" if width == 1 else f"u{width // 8}"
        return f"r{number}", self.kinds[number], width

    def bits(self, operand: str, type_: str) -> str:
        """The bits of an operand as an unsigned integer of the type's width, or a bool."""
        operand, width = operand.strip(), WIDTHS[type_]
        if operand.startswith("!"):
            return f"~{self.bits(operand[1:], type_)}"
        if self.is_register(operand):
            name, kind, own = self.variable(operand)
            if kind[0] not in "u?":
                name = f"{name}.view(u{own // 8})"
            if own == width or width == 1:
                return name
            if own < width:
                raise EmulationError(f"register {operand} is narrower than {type_}")
            return f"{name}.astype(u{width // 8})"
        if operand.startswith("%"):
            if not SPECIAL.match(operand):
                raise EmulationError(f"{self.kernel.name}: no register {operand}")
            special = f"M.special[{operand!r}]"
            return special if width == 32 else f"{special}.astype(u{width // 8})"
        if re.match(r"[A-Za-z_$]", operand):
            return self.address_of(operand, width)
        return self.constant(self.number(operand, type_))

    def number(self, operand: str, type_: str) -> Any:
        """An immediate operand as bits."""
        width = WIDTHS[type_]
        if re.match(r"0[fF][0-9a-fA-F]{8}$", operand):
            value = int(operand[2:], 16)
            if width == 64:
                value = int(np.float64(np.uint32(value).view(np.float32)).view(np.uint64))
        elif re.match(r"0[dD][0-9a-fA-F]{16}$", operand):
            value = int(operand[2:], 16)
            if width == 32:
                value = int(np.float32(np.uint64(value).view(np.float64)).view(np.uint32))
        elif re.match(r"-?\d+\.\d*([eE][-+]?\d+)?$", operand):
            return np.dtype(FLOATS[type_]).type(float(operand)).view(UNSIGNED[width])
        else:
            try:
                value = _integer(operand)
            except ValueError:
                raise EmulationError(f"operand not understood: {operand}") from None
        return np.bool_(value != 0) if width == 1 else UNSIGNED[width](value & (2**width - 1))

    def address_of(self, name: str, width: int) -> str:
        for offsets in self._offsets:
            if name in offsets:
                return self.constant(UNSIGNED[width](offsets[name]))
        if name in self.kernel.variables:
            return f"u{width // 8}.type(M.address({name!r}))"
        raise EmulationError(f"{self.kernel.name}: no variable {name}")

    def value(self, operand: str, type_: str) -> str:
        """An operand as a number of its type; bf16 as f32."""
        if type_ == "bf16":
            return f"bf16_to_f32({self.bits(operand, type_)})"
        kind = NUMPY_KIND[type_]
        if self.is_register(operand):
            name, now, _ = self.variable(operand)
            if now == kind:
                return name
        bits = self.bits(operand, type_)
        return bits if kind[0] in "u?" else f"{bits}.view({kind})"

    def address(self, operand: str, space: str) -> tuple[str, int]:
        """[register + number] -> expression of the register's bits, and the number."""
        inner = operand.strip()[1:-1].strip()
        found = re.match(r"(\S+?)\s*\+\s*(-?\w+)$", inner)
        base, offset = (found.group(1), _integer(found.group(2))) if found else (inner, 0)
        if re.match(r"-?\d", base):
            base, offset = "0", offset + _integer(base)
        if self.is_register(base):
            name, kind, width = self.variable(base)
            return (name if kind[0] == "u" else f"{name}.view(u{width // 8})"), offset
        return self.bits(base, "u64" if space != "shared" else "u32"), offset

    def vector(self, operand: str) -> tuple[str, ...]:
        """{a, b, c} -> its parts; a single operand is a vector of one."""
        return split_operands(operand.strip()[1:-1]) if operand.startswith("{") else (operand,)

    def predicate(self, instruction: Instruction) -> str | None:
        if instruction.predicate is None:
            return None
        return ("~" if instruction.negated else "") + self.bits(instruction.predicate, "pred")

    def mask(self, instruction: Instruction) -> str:
        """Expression of the lanes that execute the instruction."""
        predicate = self.predicate(instruction)
        return "m" if predicate is None else f"M.guarded(m, {predicate})"

    # ---- results

    def assign(self, instruction: Instruction, target: str, expression: str, type_: str) -> None:
        """Writes a value of a type to a register, extended to the register's width; bf16 comes as f32."""
        if target == "_":
            return
        if target not in self.kernel.registers:
            raise EmulationError(f"{instruction.text}: {target} is not a register")
        width = self.kernel.widths[self.kernel.registers[target]]
        kind = NUMPY_KIND[type_]
        if type_ == "bf16":
            expression, kind = f"f32_to_bf16({expression})", "u2"
        if kind != "?" and width > WIDTHS[type_]:
            wide = ("i" if kind[0] == "i" else "u") + str(width // 8)
            expression, kind = f"({expression}).astype({wide})", wide
        self.bind(instruction, target, expression, kind)

    def bind(self, instruction: Instruction, target: str, expression: str, kind: str) -> None:
        """Writes an expression of numpy type `kind` to a register, under the instruction's predicate."""
        number = self.kernel.registers[target]
        predicate = self.predicate(instruction)
        if predicate is not None:
            name, now, width = self.variable(target)
            if now != kind:
                if kind[0] not in "u?":
                    expression, kind = f"({expression}).view(u{width // 8})", f"u{width // 8}"
                if now[0] not in "u?":
                    name = f"{name}.view(u{width // 8})"
            expression = f"where({predicate}, {expression}, {name})"
        self.line(f"r{number} = {expression}")
        self.kinds[number] = kind

    def assign_all(self, instruction: Instruction, targets: Iterable[str], call: str, type_: str = "b32") -> None:
        """Several registers from a call that returns a sequence of their bits."""
        names = []
        targets = tuple(targets)
        for place in range(len(targets)):
            names.append(f"t{place}")
        self.line(f"{', '.join(names)}, = {call}")
        for target, name in zip(targets, names, strict=True):
            self.assign(instruction, target, name, type_)


def _integer(text: str) -> int:
    text = text.rstrip("Uu")
    octal = re.match(r"-?0[0-7]+$", text)
    return int(text, 8 if octal else 0)


def windowed(space: str) -> int:
    """First generic address of this space."""
    return {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
