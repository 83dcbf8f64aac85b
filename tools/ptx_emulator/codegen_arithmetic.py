"""Emitters of instructions on registers: moves, comparisons, conversions, floating point, integers, bits."""

from __future__ import annotations

from .codegen import NUMPY_KIND, WIDTHS, Code, emits, windowed
from .parser import Instruction
from .report import EmulationError

COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
LOGIC = {"and": "&", "or": "|", "xor": "^"}
PACKED = {"f16x2": "on_f16x2", "bf16x2": "on_bf16x2", "f32x2": "on_f32x2"}
FLOATING = {"f32", "f16", "bf16", "f64"}
ROUNDING_TO_INTEGER = {"rni", "rzi", "rmi", "rpi"}


def unknown(instruction: Instruction) -> EmulationError:
    return EmulationError(f"line {instruction.line}: this form is not known: {instruction.text}")


def bits_of(type_: str) -> str:
    """The untyped type of the same width."""
    return type_ if type_ == "pred" else f"b{WIDTHS[type_]}"


@emits("mov")
def move(code: Code, i: Instruction) -> None:
    target, source = i.operands
    width = WIDTHS[i.type]
    if target.startswith("{"):
        parts = code.vector(target)
        part = width // len(parts)
        code.line(f"t = {code.bits(source, i.type)}")
        for place, name in enumerate(parts):
            if name != "_":
                shift = code.number(str(part * place), i.type)
                code.bind(i, name, f"(t >> {code.constant(shift)}).astype(u{part // 8})", f"u{part // 8}")
    elif source.startswith("{"):
        parts = code.vector(source)
        part = width // len(parts)
        terms = []
        for place, name in enumerate(parts):
            shift = code.constant(code.number(str(part * place), f"b{width}"))
            terms.append(f"({code.bits(name, f'b{part}')}.astype(u{width // 8}) << {shift})")
        code.assign(i, target, " | ".join(terms), bits_of(i.type))
    else:
        code.assign(i, target, code.bits(source, bits_of(i.type)), bits_of(i.type))


@emits("cvta")
def convert_address(code: Code, i: Instruction) -> None:
    space = i.opcode[-2]
    target, source = i.operands
    base = code.constant(code.number(str(windowed(space)), i.type))
    sign = "-" if "to" in i.opcode else "+"
    expression = code.bits(source, i.type)
    code.assign(i, target, f"{expression} {sign} {base}" if windowed(space) else expression, i.type)


@emits("selp")
def select(code: Code, i: Instruction) -> None:
    target, a, b, predicate = i.operands
    type_ = bits_of(i.type)
    expression = f"where({code.bits(predicate, 'pred')}, {code.bits(a, type_)}, {code.bits(b, type_)})"
    code.assign(i, target, expression, type_)


@emits("slct")
def select_by_sign(code: Code, i: Instruction) -> None:
    target, a, b, sign = i.operands
    type_ = bits_of(i.opcode[-2])
    zero = code.constant(code.number("0", "s32").view("i4")) if i.type == "s32" else "0"
    expression = f"where({code.value(sign, i.type)} >= {zero}, {code.bits(a, type_)}, {code.bits(b, type_)})"
    code.assign(i, target, expression, type_)


def comparison(name: str, x: str, y: str, floating: bool) -> str:
    if floating:
        either_nan = f"(np.isnan({x}) | np.isnan({y}))"
        if name in ("nan", "num"):
            return either_nan if name == "nan" else f"~{either_nan}"
        if name == "ne":
            return f"({x} < {y}) | ({x} > {y})"
        if name == "neu":
            return f"{x} != {y}"
        if name[-1] == "u" and name[:-1] in COMPARE:
            return f"({x} {COMPARE[name[:-1]]} {y}) | {either_nan}"
    return f"{x} {COMPARE[name]} {y}"


@emits("setp")
def set_predicate(code: Code, i: Instruction) -> None:
    name, type_ = i.opcode[1], i.type
    targets = [target.strip() for target in i.operands[0].split("|")]
    if type_ in ("f16x2", "bf16x2"):
        value = "{}.view(f2)" if type_ == "f16x2" else "bf16_to_f32({})"
        code.line(f"t, s = halves({code.bits(i.operands[1], 'b32')}), halves({code.bits(i.operands[2], 'b32')})")
        for place, target in enumerate(targets):
            x, y = value.format(f"t[{place}]"), value.format(f"s[{place}]")
            code.assign(i, target, comparison(name, x, y, True), "pred")
        return
    floating = type_ in FLOATING
    x, y = code.value(i.operands[1], type_), code.value(i.operands[2], type_)
    if "ftz" in i.opcode:
        x, y = f"flush({x})", f"flush({y})"
    expression = comparison(name, x, y, floating)
    if len(targets) > 1:
        code.line(f"t = {expression}")
        expression = "t"
    negation = f"~({expression})"
    if i.opcode[2] in LOGIC:
        other = f" {LOGIC[i.opcode[2]]} {code.bits(i.operands[3], 'pred')}"
        expression, negation = f"({expression}){other}", f"{negation}{other}"
    code.assign(i, targets[0], expression, "pred")
    if len(targets) > 1:
        code.assign(i, targets[1], negation, "pred")


@emits("cvt")
def convert(code: Code, i: Instruction) -> None:
    modifiers, (to, of) = i.opcode[1:-2], i.opcode[-2:]
    target, source = i.operands[0], i.operands[1]
    if set(modifiers) - ROUNDING_TO_INTEGER - {"rn", "rz", "rna", "ftz", "sat", "relu"}:
        raise unknown(i)
    if to in ("bf16x2", "f16x2"):
        if of != "f32" or {"sat", "rna"} & set(modifiers):
            raise unknown(i)
        low, high = (_narrow(code, code.value(operand, of), to[:-2], i) for operand in (i.operands[2], source))
        code.assign(i, target, f"pack({low}, {high})", "b32")
    elif to == "tf32":
        mode = next(name for name in ("rna", "rn", "rz") if name in modifiers)
        code.assign(i, target, f"f32_to_tf32({code.value(source, of)}, {mode!r})", "b32")
    elif to in FLOATING:
        _convert_to_float(code, i, to, of)
    elif of in FLOATING:
        rounding = next(name for name in modifiers if name in ROUNDING_TO_INTEGER)
        value = code.value(source, of)
        value = f"flush({value})" if "ftz" in modifiers else value
        expression = f"float_to_integer({value}, {rounding!r}, {WIDTHS[to]}, {to[0] == 's'})"
        code.assign(i, target, expression, to)
    else:
        value = code.value(source, of)
        if "sat" in modifiers:
            raise unknown(i)
        expression = value if NUMPY_KIND[to] == NUMPY_KIND[of] else f"{value}.astype({NUMPY_KIND[to]})"
        code.assign(i, target, expression, to)


def _narrow(code: Code, value: str, to: str, i: Instruction) -> str:
    """f32 to the bits of a 16-bit float."""
    if "relu" in i.opcode:
        value = f"relu({value})"
    if "rz" in i.opcode:
        return f"f32_to_{to}_toward_zero({value})" + (".view(u2)" if to == "f16" else "")
    return f"f32_to_bf16({value})" if to == "bf16" else f"{value}.astype(f2).view(u2)"


def _convert_to_float(code: Code, i: Instruction, to: str, of: str) -> None:
    value = code.value(i.operands[1], of)
    rounding = next((name for name in i.opcode if name in ROUNDING_TO_INTEGER), None)
    if "ftz" in i.opcode and of == "f32":
        value = f"flush({value})"
    if of not in FLOATING:
        if "rn" not in i.opcode:
            raise unknown(i)
        value = f"{value}.astype({'f4' if to == 'bf16' else NUMPY_KIND[to]})"
    elif rounding:
        value = f"ROUND_TO_INTEGER[{rounding!r}]({value})"
    if "sat" in i.opcode:
        value = f"saturate({value})"
    if to in ("f16", "bf16") and of == "f32":
        code.assign(i, i.operands[0], _narrow(code, value, to, i), "b16")
    elif "rz" in i.opcode:
        raise unknown(i)
    elif to == "bf16":
        code.assign(i, i.operands[0], f"{value}.astype(f4)", to)
    else:
        code.assign(i, i.operands[0], f"{value}.astype({NUMPY_KIND[to]})", to)


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
    if name in ("mul", "mad"):
        return multiply(code, i)
    if "sat" in i.opcode or "cc" in i.opcode:
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
        if {"cc", "sat"} & set(i.opcode):
            raise unknown(i)
        expression = f"{expression} + {code.bits(i.operands[3], result)}"
    code.assign(i, target, expression, result)


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
