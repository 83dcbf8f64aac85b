"""Emitters of moves, selections, comparisons and conversions."""

from __future__ import annotations

from .codegen import NUMPY_KIND, Code, emits, windowed
from .kernel import WIDTHS, Instruction
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
