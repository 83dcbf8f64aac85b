"""Translation of wgmma and of the fence between proxies.

A wgmma writes its registers when a wgmma.wait_group completes it. `prepare` therefore names these registers as operands
of the waits that may deliver them, and has every other instruction that may meet one in flight checked.
"""

from __future__ import annotations

from dataclasses import replace

from . import wgmma
from .codegen import Code, emits
from .kernel import Instruction, Kernel
from .wgmma_analysis import WgmmaAnalysis, accesses, analyse, is_mma
from .wgmma_layout import parse_shape
from .wgmma_operands import Mma


def prepare(kernel: Kernel) -> None:
    """Completes the operands of wgmma instructions: what a wait delivers, and that an accumulator is read."""
    if kernel.wgmma is not None or not any(map(is_mma, kernel.instructions)):
        return
    kernel.wgmma = analyse(kernel)
    by_number = {number: name for name, number in kernel.registers.items()}
    for place, instruction in enumerate(kernel.instructions):
        if is_mma(instruction):
            operands = (*instruction.operands, instruction.operands[0])
        elif instruction.opcode[:2] == ("wgmma", "wait_group"):
            delivered = _numbers(kernel.wgmma.delivered.get(instruction.index, 0))
            registers = "{" + ", ".join(by_number[number] for number in delivered) + "}"
            operands = (registers, instruction.operands[0], registers)
        else:
            continue
        kernel.instructions[place] = replace(instruction, operands=operands)


def _numbers(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


@emits("wgmma")
def _wgmma(code: Code, instruction: Instruction) -> None:
    if instruction.predicate is not None:
        raise ValueError("wgmma under a predicate")
    name = instruction.opcode[1]
    if name == "fence":
        code.line(code.call(wgmma.fence, "m", instruction.index))
    elif name == "commit_group":
        code.line(code.call(wgmma.commit, "m", instruction.index))
    elif name == "wait_group":
        _wait(code, instruction)
    elif name == "mma_async":
        _multiply(code, instruction)
    else:
        raise ValueError(name)


def _wait(code: Code, instruction: Instruction) -> None:
    registers = code.vector(instruction.operands[0])
    numbers = tuple(code.kernel.registers[register] for register in registers)
    bits = "".join(f"{code.bits(register, 'b32')}, " for register in registers)
    remaining = int(instruction.operands[1], 0)
    call = code.call(wgmma.wait, "m", instruction.index, remaining, code.constant(numbers), f"({bits})")
    if registers:
        code.assign_all(instruction, registers, call)
    else:
        code.line(call)


def _multiply(code: Code, instruction: Instruction) -> None:
    target, first, second, accumulate, *numbers, _ = instruction.operands
    shape = parse_shape(".".join(instruction.opcode))
    scale_first, scale_second, *transposed = (int(number, 0) for number in numbers)
    in_registers = first.startswith("{")
    if {scale_first, scale_second} - {1, -1}:
        raise ValueError("imm-scale-a, imm-scale-b")
    if len(transposed) != (0 if shape.type == "tf32" else 1 if in_registers else 2):
        raise ValueError("imm-trans-a, imm-trans-b")
    of_first, of_second = [False, False, *map(bool, transposed)][-2:]
    registers = code.kernel.registers
    factor = code.vector(first) if in_registers else ()
    unfenced = code.kernel.wgmma.unfenced.get(instruction.index, 0)
    names = {number: name for name, number in registers.items()} if unfenced else {}
    mma = Mma(
        index=instruction.index,
        shape=shape,
        accumulators=tuple(registers[register] for register in code.vector(target)),
        first_factor=tuple(registers[register] for register in factor),
        transposed=(of_first, of_second),
        negate=scale_first * scale_second < 0,
        unfenced=tuple(names[number] for number in _numbers(unfenced)),
    )
    if len(mma.accumulators) != shape.columns // 2 or (in_registers and len(factor) != 4):
        raise ValueError("number of registers")

    def tuple_of(operands: tuple[str, ...]) -> str:
        return "(" + "".join(f"{code.bits(operand, 'b32')}, " for operand in operands) + ")"

    left = tuple_of(factor) if in_registers else code.bits(first, "b64")
    call = code.call(
        wgmma.multiply, "m", code.constant(mma), tuple_of(code.vector(target)), left, code.bits(second, "b64"),
        code.bits(accumulate, "pred"),
    )  # fmt: skip
    code.assign_all(instruction, code.vector(target), call)


def check_before(code: Code, instruction: Instruction) -> None:
    """Emit the check of an instruction that may access registers of a wgmma in flight."""
    analysis: WgmmaAnalysis | None = code.kernel.wgmma
    if analysis is None or instruction.index not in analysis.suspects:
        return
    accessed, written = (frozenset(_numbers(mask)) for mask in accesses(code.kernel, instruction))
    code.line(
        code.call(
            wgmma.check_registers, code.mask(instruction), instruction.index, code.constant(accessed),
            code.constant(written),
        )
    )  # fmt: skip


@emits("fence")
def _fence(code: Code, instruction: Instruction) -> None:
    """Translate fences: only the proxy fence has an effect, because the emulator executes all other accesses in
    order."""
    if instruction.opcode[:3] == ("fence", "proxy", "async"):
        code.line(code.call(wgmma.proxy_fence, code.mask(instruction)))


@emits("setmaxnreg")
def _set_registers(code: Code, instruction: Instruction) -> None:
    """Registers are not counted."""
