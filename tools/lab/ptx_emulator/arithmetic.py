"""Arithmetic of PTX instructions, as pure functions.

Every function takes numpy arrays with one element a lane, or numpy scalars for values that are the same in all lanes,
and returns the same. Bits are unsigned integers of the register's width; floats are numpy floats, except bf16, which
numpy does not have: its values travel as float32.
Source: the section of each instruction in NVIDIA's PTX ISA document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import where

Array = Any  # numpy's arrays and scalars, which type checkers know as different types

UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
ROUND_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}
SMALLEST_NORMAL = np.float32(1.1754944e-38)

# ---- floats


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value: Array) -> Array:
    """Bits of the nearest bf16, ties to even."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return where(np.isnan(value), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f32_to_bf16_toward_zero(value: Array) -> Array:
    return where(np.isnan(value), np.uint16(0x7FFF), (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


def f32_to_f16_toward_zero(value: Array) -> Array:
    nearest = value.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float32)) > np.abs(value)
    return where(beyond, np.nextafter(nearest, np.float16(0)), nearest)


def f32_to_tf32(value: Array, mode: str) -> Array:
    """Bits of a float32 with 10 bits of mantissa. mode: "rna" (ties away from zero), "rn" (ties to even), "rz"."""
    bits = value.view(np.uint32)
    if mode == "rna":
        bits = where(np.isfinite(value), bits + np.uint32(0x1000), bits)
    elif mode == "rn":
        even = (bits >> np.uint32(13)) & np.uint32(1)
        bits = where(np.isfinite(value), bits + np.uint32(0xFFF) + even, bits)
    return where(np.isnan(value), np.uint32(0x7FFFFFFF), bits & np.uint32(0xFFFFE000))


def flush(value: Array) -> Array:
    """Apply .ftz: a subnormal float32 becomes zero with its sign."""
    return where(np.abs(value) < SMALLEST_NORMAL, np.copysign(np.float32(0), value), value)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, where the product is exact; the sum is rounded to float64 before float32."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def saturate(value: Array) -> Array:
    """Apply .sat: clamp to [0, 1], NaN to 0."""
    return where(np.isnan(value), value.dtype.type(0), np.clip(value, value.dtype.type(0), value.dtype.type(1)))


def relu(value: Array) -> Array:
    """Replace values below 0 by 0; NaN stays."""
    return where(value < 0, value.dtype.type(0), value)


def float_to_integer(value: Array, rounding: str, bits: int, signed: bool) -> Array:
    """Convert to an integer type; values out of range are clamped, NaN becomes 0."""
    kind = (SIGNED if signed else UNSIGNED)[bits]
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    rounded = ROUND_TO_INTEGER[rounding](value.astype(np.float64))
    inside = (rounded > float(low)) & (rounded < float(high))
    outside = where(rounded >= float(high), kind(high), where(rounded <= float(low), kind(low), kind(0)))
    return where(inside, where(inside, rounded, 0.0).astype(kind), outside)


def halves(bits: Array) -> tuple[Array, Array]:
    """Low and high 16 bits of 32."""
    return bits.astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def pack(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _f16_to_f32(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def _f32_to_f16(value: Array) -> Array:
    return value.astype(np.float16).view(np.uint16)


def on_f16x2(function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a function to the two f16 of each operand, in float32, rounded once."""
    low, high = zip(*map(halves, operands), strict=True)
    return pack(*(_f32_to_f16(function(*map(_f16_to_f32, half))) for half in (low, high)))


def on_bf16x2(function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a function to the two bf16 of each operand, in float32, rounded once."""
    low, high = zip(*map(halves, operands), strict=True)
    return pack(*(f32_to_bf16(function(*map(bf16_to_f32, half))) for half in (low, high)))


def on_f32x2(function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a function to the two f32 of each 64-bit operand."""
    shift = np.uint64(32)
    low = function(*(bits.astype(np.uint32).view(np.float32) for bits in operands))
    high = function(*((bits >> shift).astype(np.uint32).view(np.float32) for bits in operands))
    return low.view(np.uint32).astype(np.uint64) | (high.view(np.uint32).astype(np.uint64) << shift)


# ---- integers


def signed_divide(a: Array, b: Array) -> Array:
    """Divide, rounding toward zero; a division by zero gives -1."""
    divisor = where(b == 0, b.dtype.type(1), b)
    quotient = np.floor_divide(a, divisor)
    quotient = quotient + ((quotient < 0) & (quotient * divisor != a)).astype(a.dtype)
    return where(b == 0, a.dtype.type(-1), quotient)


def signed_remainder(a: Array, b: Array) -> Array:
    return a - signed_divide(a, b) * b


def unsigned_divide(a: Array, b: Array) -> Array:
    """Divide unsigned integers; a division by zero gives all ones."""
    return where(b == 0, ~a.dtype.type(0), a // where(b == 0, b.dtype.type(1), b))


def unsigned_remainder(a: Array, b: Array) -> Array:
    return a - unsigned_divide(a, b) * b


def multiply_high_u64(a: Array, b: Array) -> Array:
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & mask, a >> shift, b & mask, b >> shift
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    return a_high * b_high + (middle >> shift) + ((a_low * b_high + (middle & mask)) >> shift)


def multiply_high_s64(a: Array, b: Array) -> Array:
    """High half of the product of two signed 64-bit numbers, given as bits."""
    high = multiply_high_u64(a, b)
    negative_a = where(a.view(np.int64) < 0, b, np.uint64(0))
    negative_b = where(b.view(np.int64) < 0, a, np.uint64(0))
    return high - negative_a - negative_b


def shift_left(bits: Array, count: Array, width: int) -> Array:
    inside = count < np.uint32(width)
    kind = UNSIGNED[width]
    return where(inside, bits << where(inside, count, np.uint32(0)).astype(kind), kind(0))


def shift_right(bits: Array, count: Array, width: int, signed: bool) -> Array:
    if signed:
        shifted = bits.view(SIGNED[width]) >> np.minimum(count, np.uint32(width - 1)).astype(SIGNED[width])
        return shifted.view(UNSIGNED[width])
    inside = count < np.uint32(width)
    kind = UNSIGNED[width]
    return where(inside, bits >> where(inside, count, np.uint32(0)).astype(kind), kind(0))


def funnel_shift(low: Array, high: Array, count: Array, left: bool, clamp: bool) -> Array:
    count = np.minimum(count, np.uint32(32)) if clamp else count & np.uint32(31)
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    moved = both << count.astype(np.uint64) if left else both >> count.astype(np.uint64)
    return (moved >> np.uint64(32) if left else moved).astype(np.uint32)


def bit_field_extract(bits: Array, position: Array, length: Array, width: int, signed: bool) -> Array:
    kind = UNSIGNED[width]
    position, length = position & np.uint32(255), length & np.uint32(255)
    short = np.minimum(length, np.uint32(width - 1)).astype(kind)
    mask = where(length >= np.uint32(width), ~kind(0), (kind(1) << short) - kind(1))
    extracted = shift_right(bits, position, width, signed) & mask
    if signed:
        top = np.minimum(position + length - np.uint32(1), np.uint32(width - 1))
        negative = (shift_right(bits, top, width, False) & kind(1)) != 0
        extracted = where(negative, extracted | ~mask, extracted)
    return where(length == 0, kind(0), extracted)


def bit_field_insert(source: Array, target: Array, position: Array, length: Array, width: int) -> Array:
    kind = UNSIGNED[width]
    position, length = position & np.uint32(255), length & np.uint32(255)
    short = np.minimum(length, np.uint32(width - 1)).astype(kind)
    mask = where(length >= np.uint32(width), ~kind(0), (kind(1) << short) - kind(1))
    mask = shift_left(mask, position, width)
    return (target & ~mask) | (shift_left(source, position, width) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt: each of four nibbles of the selector picks one of eight bytes, or its sign eight times."""
    pool = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result: Array = np.uint32(0)
    for place in range(4):
        pick = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((pool >> ((pick & np.uint32(7)) << np.uint32(3)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
        sign = where((byte & np.uint32(128)) != 0, np.uint32(255), np.uint32(0))
        result = result | (where((pick & np.uint32(8)) != 0, sign, byte) << np.uint32(8 * place))
    return result


def permute_bytes_by(a: Array, b: Array, selector: int) -> Array:
    """prmt with a selector that is known beforehand."""
    result: Array = np.uint32(0)
    for place in range(4):
        pick = selector >> (4 * place) & 15
        source = b if pick & 4 else a
        byte = (source >> np.uint32(8 * (pick & 3))) & np.uint32(255)
        if pick & 8:
            byte = where((byte & np.uint32(128)) != 0, np.uint32(255), np.uint32(0))
        result = result | (byte << np.uint32(8 * place))
    return result


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: the function of three bits whose truth table is the number `table`."""
    result: Array = np.uint32(0)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return result


def count_leading_zeros(bits: Array, width: int) -> Array:
    exponent = np.frexp(bits.astype(np.float64))[1]
    if width == 64:  # a number of more than 53 bits may round up to the next power of two
        high = np.frexp((bits >> np.uint64(32)).astype(np.float64))[1]
        low = np.frexp((bits & np.uint64(0xFFFFFFFF)).astype(np.float64))[1]
        exponent = where(high > 0, high + 32, low)
    return (np.int32(width) - exponent).astype(np.uint32)


def reverse_bits(bits: Array, width: int) -> Array:
    kind = UNSIGNED[width]
    result = kind(0)
    for place in range(width):
        result = result | (((bits >> kind(place)) & kind(1)) << kind(width - 1 - place))
    return result


def find_leading(bits: Array, width: int, signed: bool) -> Array:
    """bfind: position of the highest bit that differs from the sign, or all ones."""
    if signed:
        bits = where(bits.view(SIGNED[width]) < 0, ~bits, bits)
    zeros = count_leading_zeros(bits, width)
    return where(bits == 0, np.uint32(0xFFFFFFFF), np.uint32(width - 1) - zeros)
