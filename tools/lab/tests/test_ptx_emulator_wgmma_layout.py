"""Layouts of wgmma's operands, against layouts written element by element from the PTX ISA document's tables."""

from __future__ import annotations

import numpy as np
import pytest
from lab.ptx_emulator.wgmma_layout import (
    Descriptors,
    accumulator_from_registers,
    accumulator_positions,
    accumulator_to_registers,
    decode_descriptors,
    first_factor_from_registers,
    misaligned_descriptors,
    operand_addresses,
    operand_chunks,
    operand_from_chunks,
    parse_shape,
    product,
)

PATTERN = {0: 16, 1: 128, 2: 64, 3: 32}


def descriptors(start: int = 0, leading: int = 0, stride: int = 0, base_offset: int = 0, mode: int = 0) -> Descriptors:
    return Descriptors(*(np.array([value]) for value in (start, leading, stride, base_offset, mode)))


def test_decodes_the_fields():
    bits = 0x1234 | 0x0155 << 16 | 0x2AAA << 32 | 5 << 49 | 2 << 62
    fields = decode_descriptors(np.array([bits], np.uint64))
    assert fields.start == 0x12340 and fields.leading == 0x1550 and fields.stride == 0x2AAA0
    assert fields.base_offset == 5 and fields.mode == 2


@pytest.mark.parametrize(
    ("mode", "phase_of_row"), [(1, lambda r: r % 8), (2, lambda r: r // 2 % 4), (3, lambda r: r // 4 % 2)]
)
def test_a_swizzle_exchanges_chunks_by_the_row(mode, phase_of_row):
    """K-major bf16: rows of the pattern's length; 16-byte chunk c of row r lies where chunk c XOR phase(r) would."""
    length = PATTERN[mode]
    stride = 8 * length
    for k_step in range(length // 32):
        at = operand_addresses(descriptors(start=2048 + 32 * k_step, stride=stride, mode=mode), 64, 16, 2, False)[0]
        for row in (0, 1, 2, 3, 5, 7, 8, 13, 63):
            for column in range(16):
                chunk, within = divmod(2 * column, 16)
                chunk = (chunk + 2 * k_step) ^ phase_of_row(row)
                assert at[row, column] == 2048 + row * length + 16 * chunk + within


def test_without_a_swizzle_rows_are_chunks():
    at = operand_addresses(descriptors(start=256, leading=1024, stride=128), 16, 16, 2, False)[0]
    for row in range(16):
        for column in range(16):
            assert at[row, column] == 256 + row // 8 * 128 + row % 8 * 16 + column // 8 * 1024 + column % 8 * 2


def test_transposed_without_a_swizzle():
    at = operand_addresses(descriptors(leading=4096, stride=128), 32, 16, 2, True)[0]
    for row in range(32):
        for column in range(16):
            assert at[row, column] == row // 8 * 128 + row % 8 * 2 + column // 8 * 4096 + column % 8 * 16


@pytest.mark.parametrize(
    ("mode", "phase_of_column"), [(1, lambda k: k % 8), (2, lambda k: k // 2 % 4), (3, lambda k: k // 4 % 2)]
)
def test_transposed_with_a_swizzle(mode, phase_of_column):
    length = PATTERN[mode]
    at = operand_addresses(descriptors(leading=8192, stride=8 * length, mode=mode), 128, 16, 2, True)[0]
    for row in range(0, 128, 3):
        for column in range(16):
            pattern, byte = divmod(2 * row, length)
            chunk, within = divmod(byte, 16)
            chunk ^= phase_of_column(column)
            assert at[row, column] == pattern * 8192 + column * length + 16 * chunk + within


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize(("element", "depth", "transposed"), [(2, 16, False), (2, 16, True), (4, 8, False)])
def test_every_element_has_its_own_bytes(mode, element, depth, transposed):
    pattern = PATTERN[mode]
    at = operand_addresses(descriptors(leading=8192, stride=8 * pattern, mode=mode), 64, depth, element, transposed)
    assert len(np.unique(at)) == 64 * depth
    assert (at % element == 0).all()
    bits = (8192 >> 4) << 16 | (8 * pattern >> 4) << 32 | mode << 62
    contents = np.arange(2**16 // element)  # at every address its number
    chunks = operand_chunks(bits, 64, depth, element, transposed)
    read = operand_from_chunks(contents.reshape(-1, 16 // element)[chunks[None] // 16], transposed)
    assert (read * element == at).all()


def test_the_base_offset_moves_the_pattern():
    """The pattern starts at 128 bytes past a multiple of 1,024: with base offset 1 the first row is not exchanged."""
    moved = operand_addresses(descriptors(start=1024 + 128, stride=1024, base_offset=1, mode=1), 8, 16, 2, False)[0]
    plain = operand_addresses(descriptors(start=1024, stride=1024, mode=1), 8, 16, 2, False)[0]
    assert moved[0, 0] == 1152 and (moved[0] - moved[0, 0] == plain[0] - plain[0, 0]).all()
    assert not misaligned_descriptors(descriptors(start=1152, base_offset=1, mode=1))[0]


def test_misaligned_descriptors_are_seen():
    for start, base_offset, mode, wrong in [
        (1024, 0, 1, False),
        (1024 + 96, 0, 1, False),  # the fourth step along K of a row of 128 bytes
        (1024 + 128, 0, 1, True),
        (1024 + 256, 0, 2, True),
        (1024 + 512, 0, 2, False),
        (1024 + 128, 0, 3, True),
        (1024 + 256, 0, 3, False),
        (16, 0, 0, False),
        (0, 1, 0, True),
    ]:
        assert misaligned_descriptors(descriptors(start, base_offset=base_offset, mode=mode))[0] == wrong


@pytest.mark.parametrize("columns", [8, 24, 64, 256])
def test_accumulator_fragments(columns):
    """Lane 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1 of every eight."""
    rows, places = accumulator_positions(columns)
    for lane in range(32):
        for register in range(columns // 2):
            assert rows[lane, register] == lane // 4 + (8 if register % 4 >= 2 else 0)
            assert places[lane, register] == 8 * (register // 4) + 2 * (lane % 4) + register % 2
    values = np.random.default_rng(0).standard_normal((3, 16, columns)).astype(np.float32)
    assert (accumulator_from_registers(accumulator_to_registers(values)) == values).all()


def test_first_factor_fragments():
    """Registers of lane 4 g + t: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); low half, lower column."""
    registers = np.arange(2 * 32 * 4, dtype=np.uint32).reshape(2, 32, 4)
    registers = registers * 2 | (registers * 2 + 1) << 16
    factor = first_factor_from_registers(registers, 2)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register, (row, column) in enumerate([(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]):
            for half in range(2):
                assert factor[1, row, column + half] == 2 * (128 + lane * 4 + register) + half
    tf32 = first_factor_from_registers(np.arange(128, dtype=np.uint32).reshape(1, 32, 4), 4)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register, (row, column) in enumerate([(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]):
            assert tf32[0, row, column] == lane * 4 + register


def test_product():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float16), rng.standard_normal((2, 24, 16)).astype(np.float16)
    c = rng.standard_normal((2, 16, 24)).astype(np.float32)
    exact = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64))
    bits = a.view(np.uint16), b.view(np.uint16)
    assert (product(*bits, None, "f16") == exact.astype(np.float32)).all()
    assert (product(*bits, c, "f16") == (exact + c).astype(np.float32)).all()
    assert (product(*bits, c, "f16", negate=True) == (c - exact).astype(np.float32)).all()
    one, below = np.array([[[0x3F800000] * 8]], np.uint32), np.array([[[0x3F801FFF] * 8]], np.uint32)
    assert product(one, below, None, "tf32") == 8  # the 13 bits below tf32's mantissa are not read


def test_shapes():
    shape = parse_shape("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16")
    assert (shape.columns, shape.depth, shape.type, shape.element_bytes) == (96, 16, "bf16", 2)
    assert parse_shape("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32").element_bytes == 4
    for wrong in ("m64n64k16.f16.f16.f16", "m64n64k32.f32.e4m3.e4m3", "m64n60k16.f32.f16.f16", "m64n64k8.f32.f16.f16"):
        with pytest.raises(ValueError, match=r"wgmma"):
            parse_shape("wgmma.mma_async.sync.aligned." + wrong)
