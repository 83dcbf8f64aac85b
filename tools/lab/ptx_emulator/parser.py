"""PTX text -> kernels: instructions, registers, labels, parameters, variables.

Follows the grammar of the PTX ISA document as far as compilers write it: directives, statements, nested blocks with
their own registers and labels. Vectors of operands are kept as text; the code generator knows what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .functions import closing_brace, with_calls_inlined
from .kernel import WIDTHS, Instruction, Kernel, Parameter, Variable, split_operands
from .report import EmulationError


def without_comments(text: str) -> str:
    """The same text with comments blanked out; every character keeps its line."""
    text = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def parse(ptx: str) -> dict[str, Kernel]:
    """Every .entry of a module, by name.

    Raises:
        EmulationError: the text has no entry, or a statement that is not understood.
    """
    locations = _locations(ptx)
    text = with_calls_inlined(without_comments(ptx))
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*(\()?", text))
    bodies = []
    for found in entries:
        kernel = Kernel(found.group(1))
        end = found.end()
        if found.group(2):
            end = text.index(")", end)
            kernel.parameters = [_parameter(p) for p in split_operands(text[found.end() : end])]
            end += 1
        start = text.index("{", end)
        directives = text[end:start]
        required = re.search(r"\.reqntid\s+([\d,\s]+)", directives)
        if required:
            kernel.threads = 1
            for size in required.group(1).split(","):
                kernel.threads *= int(size)
        stop = closing_brace(text, start)
        bodies.append((kernel, start + 1, stop))
    if not bodies:
        raise EmulationError("the PTX text has no .entry")
    outside, at = [], 0
    for found, (_, _, stop) in zip(entries, bodies, strict=True):
        outside.append(text[at : found.start()])
        at = stop
    outside.append(text[at:].split(".section")[0])
    shared_by_all = {v.name: v for part in outside for v in _variables(part)}
    for kernel, start, stop in bodies:
        kernel.variables = dict(shared_by_all)
        _Body(kernel, locations).read(text, start, stop)
    return {kernel.name: kernel for kernel, _, _ in bodies}


def _locations(ptx: str) -> list[str]:
    """Source location of each line of the PTX text (from 1), by its .loc directives."""
    here, lines = "", [""]
    for line in ptx.split("\n"):
        if ".loc" in line and line.lstrip().startswith(".loc"):
            named = re.search(r"//\s*(\S+)", line)
            here = named.group(1) if named else line.strip()
        elif ".entry" in line:
            here = ""
        lines.append(here)
    return lines


def _parameter(text: str) -> Parameter:
    found = re.match(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(.*)$", text, re.S)
    if not found:
        raise EmulationError(f"parameter not understood: {text}")
    size = WIDTHS[found.group(2)] // 8
    align = int(found.group(1) or size)
    name = found.group(3).split()[-1]
    array = re.match(r"([\w$]+)\[(\d+)\]$", name)
    return Parameter(array.group(1), size * int(array.group(2)), align) if array else Parameter(name, size, align)


_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"(?:\.v([24])\s+)?\.(\w+)\s+([\w$]+)((?:\s*\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


def _variables(text: str) -> Iterator[Variable]:
    for statement in text.split(";"):
        found = _VARIABLE.search(statement.strip())
        if found:
            yield _variable(found)


def _variable(found: re.Match[str]) -> Variable:
    space, align, vector, kind, name, dimensions, values = found.groups()
    element = WIDTHS[kind] // 8
    size = element * int(vector or 1)
    for count in re.findall(r"\[\s*(\d*)\s*\]", dimensions):
        size *= int(count or 0)
    data = None
    if space in ("global", "const"):
        data = bytes(size)
        if values and not re.search(r"[A-Za-z_$]{2}", values.replace("0x", "").replace("0X", "")):
            numbers = [int(number, 0) & (2 ** (8 * element) - 1) for number in re.findall(r"-?\w+", values)]
            data = b"".join(number.to_bytes(element, "little") for number in numbers).ljust(size, b"\0")
    return Variable(name, space, size, int(align or element), data)


class _Body:
    """Reads the statements of one kernel."""

    def __init__(self, kernel: Kernel, locations: list[str]) -> None:
        self.kernel = kernel
        self.locations = locations
        self.scopes: list[dict[str, str]] = [{}]
        self.jumps: list[tuple[int, list[dict[str, str]]]] = []

    def read(self, text: str, start: int, stop: int) -> None:
        at, line, counted = start, text.count("\n", 0, start) + 1, start
        label = re.compile(r"([\w$%]+)\s*:(?!:)")
        directive = re.compile(r"\.(loc|pragma|file)\b")
        blank = re.compile(r"\s*")
        while True:
            at = blank.match(text, at).end()  # type: ignore[union-attr]
            if at >= stop:
                break
            line, counted = line + text.count("\n", counted, at), at
            character = text[at]
            if character == "{":
                self.scopes.append({})
                at += 1
            elif character == "}":
                self.scopes.pop()
                at += 1
            elif character == ";":
                at += 1
            elif found := label.match(text, at):
                name = found.group(1)
                unique = name if len(self.scopes) == 1 else f"{name}@{len(self.kernel.labels)}"
                self.scopes[-1][":" + name] = unique
                self.kernel.labels[unique] = len(self.kernel.instructions)
                at = found.end()
            elif (found := directive.match(text, at)) and found.group(1) != "pragma":
                at = text.index("\n", at)
            else:
                end = text.index(";", at)
                self.statement(text[at:end].strip(), line)
                at = end + 1
        self.resolve_labels()

    def statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif found := _VARIABLE.match(text):
            variable = _variable(found)
            self.kernel.variables[variable.name] = variable
        elif not text.startswith((".pragma", ".param", ".branchtargets", ".callprototype")):
            self.instruction(text, line)

    def declare(self, text: str) -> None:
        found = re.match(r"\.reg\s*(?:\.v[24]\s*)?\.(\w+)\s+(.*)$", text, re.S)
        if not found or found.group(1) not in WIDTHS:
            raise EmulationError(f"declaration not understood: {text}")
        width = WIDTHS[found.group(1)]
        for name in split_operands(found.group(2)):
            numbered = re.match(r"(.*)<(\d+)>$", name)
            names = [f"{numbered.group(1)}{n}" for n in range(int(numbered.group(2)))] if numbered else [name]
            for plain in names:
                unique = plain
                if len(self.scopes) > 1:
                    unique = f"{plain}@{len(self.kernel.widths)}"
                    self.scopes[-1][plain] = unique
                self.kernel.registers[unique] = len(self.kernel.widths)
                self.kernel.widths.append(width)

    def instruction(self, text: str, line: int) -> None:
        found = re.match(r"(?:@(!?)([\w$%]+)\s+)?([\w.:]+)\s*(.*)$", text, re.S)
        if not found:
            raise EmulationError(f"line {line}: not understood: {text}")
        negation, predicate, opcode, rest = found.groups()
        index = len(self.kernel.instructions)
        if len(self.scopes) > 1 and any(self.scopes[1:]):
            rest = re.sub(r"[\w$%]+", lambda name: self.unique(name.group()), rest)
            predicate = self.unique(predicate) if predicate else predicate
        name = tuple(opcode.split("."))
        self.kernel.instructions.append(
            Instruction(
                name,
                split_operands(rest),
                predicate,
                bool(negation),
                " ".join(text.split()),
                self.locations[line],
                line,
                index,
            )
        )
        if name[0] == "bra":
            self.jumps.append((index, list(self.scopes)))

    def unique(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def resolve_labels(self) -> None:
        """A jump's label is that of the innermost block around it which has one of this name."""
        for index, scopes in self.jumps:
            jump = self.kernel.instructions[index]
            name = jump.operands[0]
            unique = next((scope[":" + name] for scope in reversed(scopes) if ":" + name in scope), None)
            if unique is None:
                raise EmulationError(f"line {jump.line}: no label {name}")
            if unique != name:
                self.kernel.instructions[index] = Instruction(
                    jump.opcode, (unique,), jump.predicate, jump.negated, jump.text, jump.location, jump.line, index
                )
