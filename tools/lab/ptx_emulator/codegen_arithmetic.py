"""Emitters of arithmetic: floating point, packed floats, integers, bits."""

from __future__ import annotations

from .codegen import Code, emits
from .codegen_values import FLOATING, LOGIC, PACKED, bits_of, unknown
from .kernel import WIDTHS, Instruction

# ---- floating point

UNARY = {
    "ex2": "np.exp2({})", "lg2": "np.log2({})", "sqrt": "np.sqrt({})", "tanh": "np.tanh({})", "sin": "np.sin({})",
    "cos": "np.cos({})", "rcp": "ONE / {}", "rsqrt": "ONE / np.sqrt({})", "neg": "-{}", "abs": "np.abs({})",
}  # fmt: skip
BINARY = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}"}


def floating(code: Code, i: Instruction) -> None:
    name, type_ = i.opcode[0], i.type
    if {"rz", "rm", "rp"} & set(i.opcode[1:]):
        raise unknown(i)
    # sub.rn.f32.bf16 and the like: the first operands are bf16 or f16, the last one and the result f32.
    mixed = type_ in ("bf16", "f16") and i.opcode[-2] == "f32"
    result = "f32" if mixed else type_
    sources = i.operands[1:]
    values = []
    for place, operand in enumerate(sources):
        of = "f32" if mixed and place == len(sources) - 1 else type_
        value = code.value(operand, of)
        if of == "f16":
            value = f"{value}.astype(f4)"
        values.append(f"flush({value})" if "ftz" in i.opcode and result == "f32" else value)
    if name in ("neg", "abs") and result != "bf16":
        expression = UNARY[name].format(values[0])
    elif name in UNARY:
        one = code.constant(
            code.number("1.0", "f64" if type_ == "f64" else "f32").view("f8" if type_ == "f64" else "f4")
        )
        expression = UNARY[name].replace("ONE", one).format(values[0])
    elif name in BINARY:
        expression = BINARY[name].format(*values)
    elif name in ("fma", "mad"):
        expression = "{} * {} + {}".format(*values) if type_ == "f64" else f"fma32({', '.join(values)})"
        expression = f"relu({expression})" if "relu" in i.opcode else expression
    elif name in ("min", "max"):
        function = f"np.{name}imum" if "NaN" in i.opcode else f"np.f{name}"
        expression = f"{function}({values[0]}, {values[1]})"
        for more in values[2:]:
            expression = f"{function}({expression}, {more})"
        if {"xorsign", "abs"} & set(i.opcode[1:]):
            raise unknown(i)
    else:
        raise unknown(i)
    if "sat" in i.opcode:
        expression = f"saturate({expression})"
    if "ftz" in i.opcode and result == "f32":
        expression = f"flush({expression})"
    if result == "f16":
        expression = f"({expression}).astype(f2)"
    code.assign(i, i.operands[0], expression, result)


PACKED_FUNCTIONS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
}


def packed(code: Code, i: Instruction) -> None:
    """Two floats in one register."""
    name, type_ = i.opcode[0], i.type
    if name in PACKED_FUNCTIONS:
        function = code.constant(PACKED_FUNCTIONS[name])
    elif name in ("min", "max"):
        function = f"np.{name}imum" if "NaN" in i.opcode else f"np.f{name}"
    elif name == "abs":
        function = "np.abs"
    elif name == "fma":
        function = "fma32"
    else:
        raise unknown(i)
    if {"sat", "rz", "rm", "rp"} & set(i.opcode):
        raise unknown(i)
    if "relu" in i.opcode:
        function = f"(lambda *x: relu({function}(*x)))"
    operands = ", ".join(code.bits(operand, bits_of(type_)) for operand in i.operands[1:])
    code.assign(i, i.operands[0], f"{PACKED[type_]}({function}, {operands})", bits_of(type_))


# ---- integers


@emits("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs")
@emits("ex2", "lg2", "sqrt", "rsqrt", "rcp", "tanh", "sin", "cos")
def arithmetic(code: Code, i: Instruction) -> None:
    if i.type in PACKED:
        packed(code, i)
    elif i.type in FLOATING:
        floating(code, i)
    else:
        integer(code, i)


def integer(code: Code, i: Instruction) -> None:
    name, type_, target = i.opcode[0], i.type, i.operands[0]
    plain, signed, width = bits_of(type_), type_[0] == "s", WIDTHS[type_]
    if "cc" in i.opcode:
        return with_carry(code, i)
    if name in ("mul", "mad"):
        return multiply(code, i)
    if "sat" in i.opcode:
        raise unknown(i)
    if name in ("add", "sub"):
        x, y = (code.bits(operand, plain) for operand in i.operands[1:])
        return code.assign(i, target, f"{x} {'+' if name == 'add' else '-'} {y}", plain)
    if name == "neg":
        zero = code.constant(code.number("0", plain))
        return code.assign(i, target, f"{zero} - {code.bits(i.operands[1], plain)}", plain)
    values = [code.value(operand, type_) for operand in i.operands[1:]]
    if name == "abs":
        expression = f"np.abs({values[0]})"
    elif name in ("min", "max"):
        expression = f"np.{name}imum({values[0]}, {values[1]})"
        expression = f"relu({expression})" if "relu" in i.opcode else expression
    elif name in ("div", "rem"):
        kind = "signed" if signed else "unsigned"
        expression = f"{kind}_{'divide' if name == 'div' else 'remainder'}({values[0]}, {values[1]})"
    else:
        raise unknown(i)
    assert width
    code.assign(i, target, expression, type_)


@emits("mul24", "mad24")
def multiply24(code: Code, i: Instruction) -> None:
    raise unknown(i)


def multiply(code: Code, i: Instruction) -> None:
    type_, mode, target = i.type, i.opcode[1], i.operands[0]
    plain, signed, width = bits_of(type_), type_[0] == "s", WIDTHS[type_]
    add = len(i.operands) == 4
    if mode == "lo":
        expression = f"{code.bits(i.operands[1], plain)} * {code.bits(i.operands[2], plain)}"
        result = plain
    elif mode == "wide":
        wide = f"{'i' if signed else 'u'}{width // 4}"
        x, y = (f"{code.value(operand, type_)}.astype({wide})" for operand in i.operands[1:3])
        expression, result = f"({x} * {y})" + (f".view(u{width // 4})" if signed else ""), f"b{2 * width}"
    elif mode == "hi" and width == 64:
        x, y = (code.bits(operand, plain) for operand in i.operands[1:3])
        expression, result = f"multiply_high_{'s' if signed else 'u'}64({x}, {y})", plain
    elif mode == "hi":
        wide = f"{'i' if signed else 'u'}{width // 4}"
        x, y = (f"{code.value(operand, type_)}.astype({wide})" for operand in i.operands[1:3])
        expression, result = f"(({x} * {y}) >> {wide}.type({width})).astype(u{width // 8})", plain
    else:
        raise unknown(i)
    if add:
        if "sat" in i.opcode:
            raise unknown(i)
        expression = f"{expression} + {code.bits(i.operands[3], result)}"
    code.assign(i, target, expression, result)


@emits("addc", "subc", "madc")
def with_carry(code: Code, i: Instruction) -> None:
    """Translate 32-bit arithmetic with a carry from, or for, another instruction of the same block."""
    name, target = i.opcode[0], i.operands[0]
    if WIDTHS[i.type] != 32 or i.predicate is not None:
        raise unknown(i)
    first, second, *third = (f"{code.bits(operand, 'b32')}.astype(u8)" for operand in i.operands[1:])
    if name.startswith("mad"):
        product = f"{first} * {second}"
        part = f"({product} >> u8.type(32))" if "hi" in i.opcode else f"({product} & u8.type(0xFFFFFFFF))"
        expression = f"{part} + {third[0]}"
    else:
        expression = f"{first} {'-' if name.startswith('sub') else '+'} {second}"
    if name.endswith("c"):
        expression += f" {'-' if name.startswith('sub') else '+'} carry"
    code.line(f"wide = {expression}")
    if "cc" in i.opcode:
        code.line("carry = wide >> u8.type(32) & u8.type(1)")
    code.assign(i, target, "wide.astype(u4)", "b32")


# ---- bits


@emits("and", "or", "xor", "not", "cnot")
def logic(code: Code, i: Instruction) -> None:
    type_ = bits_of(i.type)
    operands = [code.bits(operand, type_) for operand in i.operands[1:]]
    if i.opcode[0] == "cnot":
        one, zero = (code.constant(code.number(number, type_)) for number in "10")
        expression = f"where({operands[0]} == {zero}, {one}, {zero})"
    elif i.opcode[0] == "not":
        expression = f"~{operands[0]}"
    else:
        expression = f"{operands[0]} {LOGIC[i.opcode[0]]} {operands[1]}"
    code.assign(i, i.operands[0], expression, type_)


@emits("shl", "shr", "shf", "bfe", "bfi", "prmt", "lop3", "popc", "clz", "brev", "bfind")
def bit_operation(code: Code, i: Instruction) -> None:
    name, type_ = i.opcode[0], bits_of(i.type)
    width, signed = WIDTHS[i.type], i.type[0] == "s"
    target, first, *rest = i.operands
    result, x = type_, code.bits(first, type_)
    counts = [code.bits(operand, "u32") for operand in rest] if name in ("shl", "shr", "shf", "bfe", "prmt") else []
    if name in ("shl", "shr") and not code.is_register(rest[0]) and 0 <= int(rest[0], 0) < width:
        count = code.constant(code.number(rest[0], type_))
        if signed and name == "shr":
            count = code.constant(code.number(rest[0], type_).view(f"i{width // 8}"))
            expression, result = f"{code.value(first, i.type)} >> {count}", i.type
        else:
            expression = f"{x} {'<<' if name == 'shl' else '>>'} {count}"
    elif name == "shl":
        expression = f"shift_left({x}, {counts[0]}, {width})"
    elif name == "shr":
        expression = f"shift_right({x}, {counts[0]}, {width}, {signed})"
    elif name == "shf":
        expression = f"funnel_shift({x}, {counts[0]}, {counts[1]}, {i.opcode[1] == 'l'}, {i.opcode[2] == 'clamp'})"
    elif name == "bfe":
        expression = f"bit_field_extract({x}, {counts[0]}, {counts[1]}, {width}, {signed})"
    elif name == "bfi":
        y, position, length = code.bits(rest[0], type_), code.bits(rest[1], "u32"), code.bits(rest[2], "u32")
        expression = f"bit_field_insert({x}, {y}, {position}, {length}, {width})"
    elif name == "prmt":
        if len(i.opcode) != 2:
            raise unknown(i)
        if code.is_register(rest[1]):
            expression = f"permute_bytes({x}, {counts[0]}, {counts[1]})"
        else:
            expression = f"permute_bytes_by({x}, {counts[0]}, {int(rest[1].rstrip('U'), 0)})"
    elif name == "lop3":
        table = int(rest[-1], 0)
        y, z = (code.bits(operand, type_) for operand in rest[:2])
        expression = f"logic3({x}, {y}, {z}, {table})"
    elif name == "popc":
        expression, result = f"np.bitwise_count({x}).astype(u4)", "b32"
    elif name == "clz":
        expression, result = f"count_leading_zeros({x}, {width})", "b32"
    elif name == "brev":
        expression = f"reverse_bits({x}, {width})"
    elif name == "bfind" and len(i.opcode) == 2:
        expression, result = f"find_leading({x}, {width}, {signed})", "b32"
    else:
        raise unknown(i)
    code.assign(i, target, expression, result)
