"""Splits a kernel into basic blocks and makes a Python function of each.

A block's function reads the registers that it uses before it writes them from the list `registers`, and writes back,
for the lanes of its mask, those that some block reads in this way.
"""

from __future__ import annotations

import re

from . import codegen_arithmetic, codegen_memory, codegen_values, codegen_warp, codegen_wgmma  # noqa: F401 - emitters
from .codegen import EMITTERS, WITHOUT_TARGET, Code
from .kernel import WIDTHS, Instruction, Kernel
from .program import Block, Program, Step
from .report import EmulationError

_NAME = re.compile(r"[\w$%@.]+")


def ends_block(instruction: Instruction) -> Step | None:
    name = instruction.opcode[0]
    if name == "bra":
        return Step.BRANCH
    if name in ("ret", "exit", "trap"):
        return Step.EXIT
    if name in ("bar", "barrier") and "warp" not in instruction.opcode:
        return Step.BARRIER
    return None


def translate(kernel: Kernel) -> Program:
    """Raises EmulationError at an instruction that no emitter knows."""
    codegen_wgmma.prepare(kernel)
    blocks = _blocks(kernel)
    outside = _live_between_blocks(kernel, blocks)
    code = Code(kernel)
    if kernel.wgmma is not None:
        code.checks.append(codegen_wgmma.check_before)
    for number, block in enumerate(blocks):
        code.lines.append(f"def block{number}(M, R, m):")
        _translate_block(code, kernel, block, outside)
    # Functions of a kernel share one namespace: the constants, and what emitters call.
    exec(compile("\n".join(code.lines), f"<{kernel.name}>", "exec"), code.environment)
    for number, block in enumerate(blocks):
        block.function = code.environment[f"block{number}"]
    return Program(kernel, blocks, _narrowest(kernel, "shared"), _narrowest(kernel, "global"))


def _blocks(kernel: Kernel) -> list[Block]:
    instructions = kernel.instructions
    jumped_to = {kernel.labels[i.operands[0]] for i in instructions if i.opcode[0] == "bra"}
    after = {i.index + 1 for i in instructions if ends_block(i)}
    starts = sorted(at for at in {0} | jumped_to | after if at < len(instructions))
    number = {start: place for place, start in enumerate(starts)}
    blocks = [Block(a, b - 1) for a, b in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    for block in blocks:
        last = instructions[block.last]
        block.step = ends_block(last) or Step.NEXT
        if block.step is Step.BRANCH:
            block.target = number.get(kernel.labels[last.operands[0]], len(blocks))
    return blocks


def _mentions(kernel: Kernel, instruction: Instruction) -> list[int]:
    texts = (*instruction.operands, instruction.predicate or "")
    names = (name for text in texts for name in _NAME.findall(text))
    return [kernel.registers[name] for name in names if name in kernel.registers]


def _live_between_blocks(kernel: Kernel, blocks: list[Block]) -> set[int]:
    """Registers that some block may read before it has written them."""
    live: set[int] = set()
    for block in blocks:
        written: set[int] = set()
        for instruction in kernel.instructions[block.first : block.last + 1]:
            targets = _targets(kernel, instruction)
            mentioned = _mentions(kernel, instruction)
            # A target also counts as read where it is mentioned twice, or keeps its value in some lanes.
            read = [n for n in mentioned if n not in targets or mentioned.count(n) > 1 or instruction.predicate]
            live.update(n for n in read if n not in written)
            written.update(targets)
    return live


def _targets(kernel: Kernel, instruction: Instruction) -> set[int]:
    """Registers that an instruction writes."""
    if not instruction.operands or instruction.opcode[0] in WITHOUT_TARGET:
        return set()
    names = _NAME.findall(instruction.operands[0])
    return {kernel.registers[name] for name in names if name in kernel.registers}


def _translate_block(code: Code, kernel: Kernel, block: Block, outside: set[int]) -> None:
    code.kinds = {}
    instructions = kernel.instructions[block.first : block.last + 1]
    last_mention: dict[int, int] = {}
    for instruction in instructions:
        last_mention.update(dict.fromkeys(_mentions(kernel, instruction), instruction.index))
    written: set[int] = set()
    condition: str | None = None
    for instruction in instructions:
        if instruction.index == block.last and block.step is not Step.NEXT:
            if instruction.opcode[0] in ("bar", "barrier", "trap"):
                _emit(code, instruction)
            condition = code.predicate(instruction) if block.step is not Step.BARRIER else None
            continue
        _emit(code, instruction)
        written |= _targets(kernel, instruction)
        dead = [
            f"r{number}"
            for number in dict.fromkeys(_mentions(kernel, instruction))
            if last_mention[number] == instruction.index and number in code.kinds
            and not (number in written and number in outside)
        ]  # fmt: skip
        if dead:
            code.line(f"{' = '.join(dead)} = None")
    _write_back(code, sorted(written & outside))
    code.line(f"return {condition}")


def _emit(code: Code, instruction: Instruction) -> None:
    emitter = EMITTERS.get(instruction.opcode[0])
    if emitter is None:
        raise EmulationError(f"{code.kernel.name}, line {instruction.line}: no emitter for {instruction.text}")
    try:
        for check in code.checks:
            check(code, instruction)
        emitter(code, instruction)
    except (KeyError, IndexError, ValueError, StopIteration) as error:
        where = f"{code.kernel.name}, line {instruction.line}"
        raise EmulationError(f"{where}: this form is not known: {instruction.text} ({error!r})") from error


def _write_back(code: Code, registers: list[int]) -> None:
    if not registers:
        return
    bits = {}
    for number in registers:
        kind, width = code.kinds[number], code.kernel.widths[number]
        bits[number] = f"r{number}" if kind[0] in "u?" else f"r{number}.view(u{width // 8})"
    code.line("if m is None:")
    for number, expression in bits.items():
        code.line(f"    R[{number}] = {expression}")
    code.line("else:")
    for number, expression in bits.items():
        code.line(f"    R[{number}] = where(m, {expression}, R[{number}])")


def _narrowest(kernel: Kernel, space: str) -> int:
    """Bytes of the narrowest access to a space, at most 16."""
    sizes = [16]
    for instruction in kernel.instructions:
        name = instruction.opcode[0]
        named = {modifier.split("::")[0] for modifier in instruction.opcode} & SPACES
        if name in ("ld", "st", "atom", "red") and (not named or space in named):
            sizes.append(WIDTHS[instruction.type] // 8)
        elif name == "cp" and len(instruction.operands) >= 3 and instruction.operands[2][0].isdigit():
            sizes.append(int(instruction.operands[2], 0))
    return min(sizes)


SPACES = {"param", "global", "shared", "local", "const"}
