"""Results of each family of PTX instructions in tools/lab/ptx_emulator, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab.tests.ptx_by_hand import execute


def compute(instructions: str, *inputs: np.ndarray) -> np.ndarray:
    """%r10 of each lane after the instructions; the inputs are 32 words each, in %r1, %r2, ..."""
    tensors = [torch.from_numpy(np.ascontiguousarray(x).view(np.int32).copy()) for x in inputs]
    out = torch.zeros(32, dtype=torch.int32)
    body = [f"add.s64 %rd10, %rd{n}, %rd9; ld.global.b32 %r{n + 1}, [%rd10];" for n in range(len(inputs))]
    body += [instructions, f"add.s64 %rd10, %rd{len(inputs)}, %rd9; st.global.b32 [%rd10], %r10;"]
    report = execute("\n".join(body), *tensors, out)
    assert not report.findings, str(report)
    return out.numpy().view(np.uint32)


RANDOM = np.random.default_rng(0)
A, B = (RANDOM.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(2))
C = (A % 40).astype(np.uint32)
SA, SB = A.view(np.int32), B.view(np.int32)
X, Y, Z = (RANDOM.normal(0, 100, 32).astype(np.float32) for _ in range(3))
X[:4], Y[:4] = [np.nan, 1, -np.inf, 0], [1, np.nan, 2, -0.0]
EACH = range(32)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def wide(values: np.ndarray) -> list[int]:
    return [int(value) for value in values]


def words(values: list[int]) -> np.ndarray:
    return np.array([value & 0xFFFFFFFF for value in values], np.uint32)


def field(value: int, at: int, length: int, signed: bool) -> int:
    """bfe by its definition in the ISA document, bit by bit."""
    top = min(at + length - 1, 31)
    sign = (value >> top & 1) if signed and length else 0
    return sum((value >> (at + k) & 1 if k < length and at + k <= 31 else sign) << k for k in range(32))


def nibbles(a: int, b: int, selector: int) -> int:
    pool = a | b << 32
    result = 0
    for place in range(4):
        pick = selector >> 4 * place & 15
        byte = pool >> 8 * (pick & 7) & 255
        result |= ((255 if byte & 128 else 0) if pick & 8 else byte) << 8 * place
    return result


INTEGER = {
    "add.s32 %r10, %r1, %r2;": A + B,
    "sub.s32 %r10, %r1, %r2;": A - B,
    "mul.lo.s32 %r10, %r1, %r2;": A * B,
    "mul.hi.u32 %r10, %r1, %r2;": words([a * b >> 32 for a, b in zip(wide(A), wide(B))]),
    "mul.hi.s32 %r10, %r1, %r2;": words([a * b >> 32 for a, b in zip(wide(SA), wide(SB))]),
    "mad.lo.s32 %r10, %r1, %r2, %r1;": A * B + A,
    "div.s32 %r10, %r1, %r3;": words([int(a / c) if c else -1 for a, c in zip(wide(SA), wide(C))]),
    "rem.s32 %r10, %r1, %r3;": words([a - int(a / c) * c if c else a for a, c in zip(wide(SA), wide(C))]),
    "div.u32 %r10, %r1, %r3;": words([a // c if c else -1 for a, c in zip(wide(A), wide(C))]),
    "min.s32 %r10, %r1, %r2;": bits(np.minimum(SA, SB)),
    "max.u32 %r10, %r1, %r2;": np.maximum(A, B),
    "neg.s32 %r10, %r1;": 0 - A,
    "abs.s32 %r10, %r1;": bits(np.abs(SA)),
    "and.b32 %r10, %r1, %r2;": A & B,
    "not.b32 %r10, %r1;": ~A,
    "shl.b32 %r10, %r1, %r3;": words([a << c for a, c in zip(wide(A), wide(C))]),
    "shr.u32 %r10, %r1, %r3;": words([a >> c for a, c in zip(wide(A), wide(C))]),
    "shr.s32 %r10, %r1, %r3;": words([a >> c for a, c in zip(wide(SA), wide(C))]),
    "shr.s32 %r10, %r1, 7;": bits(SA >> 7),
    "shf.l.wrap.b32 %r10, %r1, %r2, %r3;":
        words([(b << 32 | a) << c % 32 >> 32 for a, b, c in zip(wide(A), wide(B), wide(C))]),
    "shf.r.clamp.b32 %r10, %r1, %r2, %r3;":
        words([(b << 32 | a) >> min(c, 32) for a, b, c in zip(wide(A), wide(B), wide(C))]),
    "bfe.u32 %r10, %r1, %r3, 9;": words([field(a, c, 9, False) for a, c in zip(wide(A), wide(C))]),
    "bfe.s32 %r10, %r1, %r3, 9;": words([field(a, c, 9, True) for a, c in zip(wide(A), wide(C))]),
    "bfi.b32 %r10, %r1, %r2, 5, 9;": (B & ~np.uint32(511 << 5)) | ((A & np.uint32(511)) << np.uint32(5)),
    "prmt.b32 %r10, %r1, %r2, %r3;": words([nibbles(a, b, c) for a, b, c in zip(wide(A), wide(B), wide(C))]),
    "prmt.b32 %r10, %r1, %r2, 0x9e41;": words([nibbles(a, b, 0x9E41) for a, b in zip(wide(A), wide(B))]),
    "lop3.b32 %r10, %r1, %r2, %r3, 0xca;": (A & B) | (~A & C),
    "popc.b32 %r10, %r1;": words([a.bit_count() for a in wide(A)]),
    "clz.b32 %r10, %r3;": words([32 - c.bit_length() for c in wide(C)]),
    "brev.b32 %r10, %r1;": words([int(f"{a:032b}"[::-1], 2) for a in wide(A)]),
    "bfind.s32 %r10, %r1;": words([(a if a >= 0 else ~a).bit_length() - 1 for a in wide(SA)]),
    "setp.lt.s32 %p1|%p2, %r1, %r2; selp.b32 %r10, 1, 0, %p1; @%p2 mov.b32 %r10, 7;":
        words([1 if a < b else 7 for a, b in zip(wide(SA), wide(SB))]),
    "setp.ne.and.u32 %p1, %r1, %r2, %p0; mov.b32 %r10, 3; @!%p1 mov.b32 %r10, 5;": words([5] * 32),
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r10, {%h2, %h1};": (A << np.uint32(16)) | (A >> np.uint32(16)),
    "cvt.s64.s32 %rd5, %r1; shr.u64 %rd5, %rd5, 16; cvt.u32.u64 %r10, %rd5;": words([a >> 16 for a in wide(SA)]),
    "cvt.s32.s8 %r10, %r1;": bits(SA << 24 >> 24),
    "mul.wide.s32 %rd5, %r1, %r2; shr.s64 %rd5, %rd5, 20; cvt.u32.u64 %r10, %rd5;":
        words([a * b >> 20 for a, b in zip(wide(SA), wide(SB))]),
    "cvt.u64.u32 %rd5, %r1; mul.lo.s64 %rd5, %rd5, %rd5; mul.hi.u64 %rd5, %rd5, %rd5; cvt.u32.u64 %r10, %rd5;":
        words([a**4 % 2**128 >> 64 for a in wide(A)]),
}  # fmt: skip


@pytest.mark.parametrize("instruction", INTEGER)
def test_integers(instruction):
    assert (compute(instruction, A, B, C) == INTEGER[instruction]).all()


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bf16 and back, by torch."""
    return torch.from_numpy(values).bfloat16().float().numpy()


with np.errstate(all="ignore"):
    LOW, HIGH = np.trunc(np.float64(X)), np.rint(np.float64(X))
    FLOATING = {
        "add.f32 %r10, %r1, %r2;": X + Y,
        "sub.f32 %r10, %r1, %r2;": X - Y,
        "mul.f32 %r10, %r1, %r2;": X * Y,
        "div.full.f32 %r10, %r1, %r2;": X / Y,
        "fma.rn.f32 %r10, %r1, %r2, %r3;": (np.float64(X) * Y + Z).astype(np.float32),
        "max.f32 %r10, %r1, %r2;": np.fmax(X, Y),
        "max.NaN.f32 %r10, %r1, %r2;": np.maximum(X, Y),
        "min.f32 %r10, %r1, %r2;": np.fmin(X, Y),
        "neg.f32 %r10, %r1;": -X,
        "abs.f32 %r10, %r1;": np.abs(X),
        "sqrt.approx.f32 %r10, %r2;": np.sqrt(Y),
        "rcp.approx.f32 %r10, %r1;": np.float32(1) / X,
        "mul.f32 %r4, %r1, 0f3A000000; ex2.approx.ftz.f32 %r10, %r4;": np.exp2(X * np.float32(2**-11)),
        "lg2.approx.f32 %r10, %r3;": np.log2(Z),
        "mul.ftz.f32 %r10, %r3, 0f00000001;": np.copysign(np.float32(0), Z),
        "cvt.rn.bf16.f32 %h1, %r3; cvt.f32.bf16 %r10, %h1;": bf16(Z),
        "cvt.rn.bf16x2.f32 %r4, %r1, %r3; shl.b32 %r10, %r4, 16;": bf16(Z),
        "cvt.rn.f16.f32 %h1, %r3; cvt.f32.f16 %r10, %h1;": Z.astype(np.float16).astype(np.float32),
        "cvt.rz.f16.f32 %h1, 0f3F800FFF; cvt.f32.f16 %r10, %h1;": np.full(32, 1, np.float32),
        "cvt.rn.bf16x2.f32 %r4, %r3, %r3; fma.rn.bf16x2 %r5, %r4, %r4, %r4; shl.b32 %r10, %r5, 16;":
            bf16(bf16(Z) * bf16(Z) + bf16(Z)),
        "cvt.rn.f16x2.f32 %r4, %r3, %r3; mul.f16x2 %r5, %r4, %r4; mov.b32 {%h1, %h2}, %r5; cvt.f32.f16 %r10, %h1;":
            (Z.astype(np.float16) * Z.astype(np.float16)).astype(np.float32),
        "cvt.rna.tf32.f32 %r10, %r3;": ((bits(Z) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32),
        "cvt.rzi.s32.f32 %r4, %r1; cvt.rn.f32.s32 %r10, %r4;":
            np.nan_to_num(LOW, nan=0, neginf=-(2.0**31)).astype(np.float32),
        "cvt.rni.s32.f32 %r4, %r1; cvt.rn.f32.s32 %r10, %r4;":
            np.nan_to_num(HIGH, nan=0, neginf=-(2.0**31)).astype(np.float32),
        "cvt.f64.f32 %rd5, %r3; mul.f64 %rd5, %rd5, %rd5; cvt.rn.f32.f64 %r10, %rd5;":
            (np.float64(Z) ** 2).astype(np.float32),
        "setp.neu.f32 %p1, %r1, %r2; selp.f32 %r10, 0f3F800000, 0f00000000, %p1;": (X != Y).astype(np.float32),
        "setp.ne.f32 %p1, %r1, %r2; selp.f32 %r10, 0f3F800000, 0f00000000, %p1;":
            ((X < Y) | (X > Y)).astype(np.float32),
        "setp.geu.f32 %p1, %r1, %r2; selp.f32 %r10, 0f3F800000, 0f00000000, %p1;": (~(X < Y)).astype(np.float32),
        "setp.nan.f32 %p1, %r1, %r2; selp.f32 %r10, 0f3F800000, 0f00000000, %p1;": np.isnan(X + Y).astype(np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("instruction", FLOATING)
def test_floating_point(instruction):
    result = compute(instruction, X, Y, Z).view(np.float32)
    assert np.array_equal(result, FLOATING[instruction], equal_nan=True)


LANES = np.arange(32)
HIGHEST = words([max(wide(SA))] * 32)
WARP = {
    "shfl.sync.bfly.b32 %r10, %r1, 5, 31, -1;": A[LANES ^ 5],
    "shfl.sync.idx.b32 %r10, %r1, %r3, 31, -1;": A[C % 32],
    "shfl.sync.up.b32 %r10, %r1, 3, 0, -1;": A[np.where(LANES < 3, LANES, LANES - 3)],
    "shfl.sync.down.b32 %r10|%p1, %r1, 3, 31, -1; @!%p1 mov.b32 %r10, 9;":
        np.where(LANES > 28, 9, A[np.minimum(LANES + 3, 31)]),
    "shfl.sync.bfly.b32 %r10, %r1, 9, 0x181f, -1;": A[np.where((LANES ^ 9) <= LANES // 8 * 8 + 7, LANES ^ 9, LANES)],
    "redux.sync.max.s32 %r10, %r1, -1;": HIGHEST,
    "redux.sync.add.s32 %r10, %r1, -1;": words([sum(wide(A))] * 32),
    "setp.lt.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r10, %p1, -1;":
        words([sum((a < 0) << k for k, a in enumerate(wide(SA)))] * 32),
    "setp.lt.s32 %p1, %r1, 0; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;": words([1] * 32),
    "setp.lt.s32 %p1, %r1, 0; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;": words([0] * 32),
    "and.b32 %r4, %r3, 3; match.any.sync.b32 %r10, %r4, -1;":
        words([sum((c % 4 == d % 4) << k for k, d in enumerate(wide(C))) for c in wide(C)]),
    "elect.sync %r10|%p1, -1; @%p1 mov.b32 %r10, 5;": words([5] + [0] * 31),
}  # fmt: skip


@pytest.mark.parametrize("instruction", WARP)
def test_warps(instruction):
    assert (compute(instruction, A, B, C) == WARP[instruction]).all()
