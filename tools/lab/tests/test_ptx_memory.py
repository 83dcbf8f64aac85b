"""Memory, matrices and modules in tools/lab/ptx_emulator: kernels in PTX written by hand, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab.ptx_emulator import Argument, launch
from lab.tests.ptx_by_hand import HEADER, entry, execute

LANES = torch.arange(32, dtype=torch.int32)


def clean(*arguments, **options):
    report = execute(*arguments, **options)
    assert not report.findings, str(report)
    return report


def test_vectors_and_narrow_types():
    source = torch.randint(-128, 128, (32, 4), dtype=torch.int8)
    swapped, summed = torch.zeros_like(source), torch.zeros(32, dtype=torch.int32)
    clean(
        """add.s64 %rd10, %rd0, %rd9; add.s64 %rd11, %rd1, %rd9; add.s64 %rd12, %rd2, %rd9;
        ld.global.v4.b8 {%h1, %h2, %h3, %h4}, [%rd10]; st.global.v4.b8 [%rd11], {%h4, %h3, %h2, %h1};
        ld.global.s8 %r1, [%rd10 + 1]; ld.global.u8 %r2, [%rd10 + 2]; add.s32 %r1, %r1, %r2;
        st.global.b32 [%rd12], %r1;""",
        source, swapped, summed,
    )  # fmt: skip
    assert torch.equal(swapped, source.flip(1))
    assert torch.equal(summed, source[:, 1].int() + source[:, 2].view(torch.uint8).int())


def test_a_predicated_load_keeps_the_register_elsewhere():
    out = torch.zeros(32, dtype=torch.int32)
    body = """add.s64 %rd10, %rd0, %rd9; add.s64 %rd11, %rd1, %rd9; setp.lt.u32 %p1, %r0, 5; mov.b32 %r1, -1;
        @%p1 ld.global.b32 { %r1 }, [ %rd10 + 0 ]; st.global.b32 [%rd11], %r1;"""
    clean(body, LANES[:5] + 50, out)
    assert torch.equal(out, torch.where(LANES < 5, LANES + 50, -1))


def test_a_loop_runs_as_often_as_each_thread_says():
    out = torch.zeros(64, dtype=torch.int32)
    body = """mov.b32 %r1, 0; mov.b32 %r2, 0;
        again: setp.ge.u32 %p1, %r2, %r0; @%p1 bra end; add.s32 %r2, %r2, 1; add.s32 %r1, %r1, %r2; bra.uni again;
        end: add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r1;"""
    for order in ("lockstep", "serial", "reverse"):
        report = clean(body, out.zero_(), threads=64, order=order)
        threads = torch.arange(64, dtype=torch.int32)
        assert torch.equal(out, threads * (threads + 1) // 2)
    # Lockstep: warps run together; of the loop body the first runs 31 rounds, the second 63, and each a test more.
    report = clean(body, out, threads=64)
    assert report.instructions["bra.uni"] == 31 + 63
    assert report.instructions["setp.ge.u32"] == 32 + 64


def test_names_of_an_inner_block_are_its_own():
    out = torch.zeros(32, dtype=torch.int32)
    inner = """{ .reg .pred done; .reg .b32 %r1; mov.b32 %r1, NUMBER;
        again: add.s32 %r1, %r1, 1; setp.ge.s32 done, %r1, 5; @!done bra again; add.s32 %r2, %r2, %r1; }"""
    body = "mov.b32 %r1, 100; mov.b32 %r2, 0;" + inner.replace("NUMBER", "1") + inner.replace("NUMBER", "8")
    clean(body + "add.s64 %rd10, %rd0, %rd9; add.s32 %r2, %r2, %r1; st.global.b32 [%rd10], %r2;", out)
    assert (out == 100 + 5 + 9).all()


def test_static_dynamic_and_constant_variables():
    out = torch.zeros(64, dtype=torch.int32)
    declarations = """.extern .shared .align 16 .b8 dynamic[];
        .const .align 4 .b32 table[4] = {10, 20, 30, -40};"""
    body = """.shared .align 8 .b8 first[64]; .shared .align 4 .f32 second[2][32];
        mov.u32 %r1, second; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2; and.b32 %r3, %r0, 3;
        mad.wide.u32 %rd10, %r3, 4, table; ld.const.b32 %r4, [%rd10];
        mov.u32 %r5, dynamic; add.s32 %r5, %r5, %r2; st.shared.b32 [%r1], %r4; st.shared.b32 [%r5], %r0;
        setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.b32 [first + 60], %r0; ld.const.b32 %r8, [table+4]; bar.sync 0;
        ld.shared.b32 %r6, [%r1]; ld.shared.b32 %r7, [%r5]; mad.lo.s32 %r6, %r7, 1000, %r6; add.s32 %r6, %r6, %r8;
        add.s64 %rd11, %rd0, %rd9; st.global.b32 [%rd11], %r6;"""
    clean(body, out, threads=64, shared=256, declarations=declarations)
    threads = torch.arange(64)
    assert out.tolist() == (threads * 1000 + torch.tensor([10, 20, 30, -40])[threads % 4] + 20).tolist()


def test_generic_addresses():
    out = torch.zeros(32, dtype=torch.int32)
    body = """.local .align 8 .b8 depot[8]; .shared .align 4 .b8 words[128];
        mov.u64 %rd10, depot; cvta.local.u64 %rd10, %rd10; st.b32 [%rd10 + 4], %r0; ld.b32 %r1, [%rd10 + 4];
        mov.u64 %rd11, words; cvta.shared.u64 %rd11, %rd11; add.s64 %rd11, %rd11, %rd9; st.b32 [%rd11], %r1;
        setp.lt.u32 %p1, %r0, 9; selp.b64 %rd12, %rd10, %rd11, %p1; @%p1 sub.s64 %rd12, %rd12, -4; ld.b32 %r2, [%rd12];
        cvta.to.shared.u64 %rd13, %rd11; ld.shared.b32 %r3, [%rd13]; mad.lo.s32 %r2, %r3, 100, %r2;
        cvta.to.global.u64 %rd14, %rd0; add.s64 %rd14, %rd14, %rd9; st.b32 [%rd14], %r2;"""
    clean(body, out)
    assert torch.equal(out, LANES * 101)


ATOMIC = {
    "red.global.add.f32 [%rd0], %r1;": ("f32", 0.0, lambda: 528.0),
    "atom.global.gpu.acq_rel.add.u32 %r2, [%rd0], 3;": ("s32", 5, lambda: 5 + 96),
    "red.global.max.s32 [%rd0], %r0;": ("s32", -7, lambda: 31),
    "red.global.min.u32 [%rd0], %r0;": ("s32", 9, lambda: 0),
    "red.global.or.b32 [%rd0], %r0;": ("s32", 64, lambda: 95),
    "red.global.xor.b32 [%rd0], %r0;": ("s32", 64, lambda: 64),
    "atom.global.exch.b32 %r2, [%rd0], %r0;": ("s32", 64, lambda: 31),
    "atom.global.cas.b32 %r2, [%rd0], %r0, 17;": ("s32", 5, lambda: 17),
    "atom.global.inc.u32 %r2, [%rd0], 9;": ("s32", 0, lambda: 32 % 10),
}


@pytest.mark.parametrize("instruction", ATOMIC)
def test_atomic_operations(instruction):
    kind, start, expected = ATOMIC[instruction]
    memory = torch.tensor([start], dtype=torch.float32 if kind == "f32" else torch.int32)
    clean(f"add.s32 %r1, %r0, 1; cvt.rn.f32.s32 %r1, %r1; {instruction}", memory)
    assert memory.item() == expected()


def test_an_atomic_operation_gives_each_thread_its_turn():
    counter, places = torch.zeros(1, dtype=torch.int32), torch.full((4, 64), -1, dtype=torch.int32)
    body = """mov.u32 %r3, %ctaid.x; mad.wide.u32 %rd10, %r3, 256, %rd1; add.s64 %rd10, %rd10, %rd9;
        setp.ne.u32 %p1, %r0, 5; @%p1 atom.global.add.u32 %r2, [%rd0], 1; @%p1 st.global.b32 [%rd10], %r2;"""
    clean(body, counter, places, threads=64, grid=4)
    assert counter.item() == 4 * 63
    assert sorted(places.flatten().tolist()) == [-1] * 4 + list(range(252))


def matrices(kind: str, m: int, n: int, k: int):
    """A, B and C as tensors, and what mma shall give."""
    if kind in ("s8", "u8"):
        low, high, of = (-128, 128, torch.int8) if kind == "s8" else (0, 256, torch.uint8)
        a, b = torch.randint(low, high, (m, k)).to(of), torch.randint(low, high, (k, n)).to(of)
        c = torch.randint(-1000, 1000, (m, n), dtype=torch.int32)
        return a, b, c, a.int() @ b.int() + c
    of = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "f64": torch.float64}[kind]
    a, b = torch.randn(m, k).to(of), torch.randn(k, n).to(of)
    c = torch.randn(m, n, dtype=torch.float64 if kind == "f64" else torch.float32)
    if kind == "tf32":  # numbers that have a TF32 form
        a, b = (x.view(torch.int32).bitwise_and(-8192).view(torch.float32) for x in (a, b))
    return a, b, c, (a.double() @ b.double() + c.double()).to(c.dtype)


SHAPES = [
    ("f16", 16, 8, 16), ("bf16", 16, 8, 16), ("f16", 16, 8, 8), ("bf16", 16, 8, 8), ("tf32", 16, 8, 8),
    ("tf32", 16, 8, 4), ("s8", 16, 8, 32), ("u8", 16, 8, 16), ("f64", 8, 8, 4),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_matrices(shape):
    """Operands are loaded element by element, as the figures of the ISA document place them."""
    kind, m, n, k = shape
    a, b, c, expected = matrices(kind, m, n, k)
    size, packed = a.element_size(), max(1, 4 // a.element_size())
    width = max(32, 8 * size)
    group, place = np.arange(32) // 4, np.arange(32) % 4

    def registers(matrix: torch.Tensor, rows: int) -> torch.Tensor:
        """(32, registers): of a matrix whose rows run along k."""
        columns = []
        for number in range(rows * k // 32 // packed):
            row = group + 8 * (number % (rows // 8))
            first = packed * place + 4 * packed * (number // (rows // 8))
            columns.append(matrix[row[:, None], first[:, None] + np.arange(packed)])
        return torch.stack(columns, 1).contiguous().view(torch.int64 if width == 64 else torch.int32).reshape(32, -1)

    of_a, of_b = registers(a, m), registers(b.T.contiguous(), n)
    of_c = torch.stack([c[group + 8 * (e // 2), 2 * place + e % 2] for e in range(m * n // 32)], 1).contiguous()
    bytes_ = width // 8
    r, body = ("%rd" if width == 64 else "%r"), ""
    names = []
    for pointer, operand, first in ((0, of_a, 15), (1, of_b, 19), (2, of_c, 21)):
        count = operand.shape[1]
        names.append([f"{r}{first + number}" for number in range(count)])
        body += f"mad.wide.u32 %rd10, %r0, {count * bytes_}, %rd{pointer};"
        body += "".join(f"ld.global.b{width} {x}, [%rd10 + {p * bytes_}];" for p, x in enumerate(names[-1]))
    accumulator = {"s8": "s32", "u8": "s32", "f64": "f64"}.get(kind, "f32")
    vectors = [f"{{{', '.join(x)}}}" for x in names]
    body += f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{accumulator}.{kind}.{kind}.{accumulator} "
    body += f"{vectors[2]}, {vectors[0]}, {vectors[1]}, {vectors[2]};"
    body += "".join(f"st.global.b{width} [%rd10 + {p * bytes_}], {x};" for p, x in enumerate(names[2]))
    clean(body, of_a, of_b, of_c)
    result = torch.empty_like(expected)
    for element in range(of_c.shape[1]):
        result[group + 8 * (element // 2), 2 * place + element % 2] = of_c[:, element]
    assert torch.equal(result, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_move_between_shared_memory_and_registers(transposed):
    """stmatrix undoes ldmatrix; between the two, lane l holds elements 2 l and 2 l + 1 of each matrix."""
    source = torch.randint(0, 2**15, (4, 8, 8), dtype=torch.int16)
    held, back = torch.zeros(32, 4, 2, dtype=torch.int16), torch.zeros_like(source)
    trans = ".trans" if transposed else ""
    body = f""".shared .align 16 .b8 tiles[1024]; mov.u32 %r1, tiles; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;
        mad.wide.u32 %rd10, %r0, 16, %rd0; mad.wide.u32 %rd11, %r0, 16, %rd1; mad.wide.u32 %rd12, %r0, 16, %rd2;
        ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd10]; st.shared.v4.b32 [%r1], {{%r3, %r4, %r5, %r6}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r3, %r4, %r5, %r6}}, [%r1];
        st.global.v4.b32 [%rd11], {{%r3, %r4, %r5, %r6}};
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1 + 512], {{%r3, %r4, %r5, %r6}};
        bar.warp.sync -1; ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r1 + 512];
        st.global.v4.b32 [%rd12], {{%r3, %r4, %r5, %r6}};"""
    clean(body, source, held, back)
    seen = source.mT if transposed else source
    assert torch.equal(held.permute(1, 0, 2).reshape(4, 8, 8), seen)
    assert torch.equal(back, source)


def test_a_copy_fills_with_zeros_what_it_does_not_get():
    source, out = torch.arange(1, 129, dtype=torch.int32), torch.full((128,), -1, dtype=torch.int32)
    body = """.shared .align 16 .b8 tiles[512]; mov.u32 %r1, tiles; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;
        mad.wide.u32 %rd10, %r0, 16, %rd0; mad.wide.u32 %rd11, %r0, 16, %rd1; and.b32 %r3, %r0, 1; shl.b32 %r3, %r3, 4;
        setp.eq.u32 %p1, %r0, 2; selp.b32 %r3, 8, %r3, %p1;
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd10 + 0 ], 0x10, %r3; cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1]; st.global.v4.b32 [%rd11], {%r4, %r5, %r6, %r7};"""
    clean(body, source, out)
    expected = source.view(32, 4) * (torch.arange(32) % 2)[:, None]
    expected[2, :2] = source[8:10]
    assert torch.equal(out.view(32, 4), expected)


def test_threads_in_two_dimensions_several_entries_and_a_struct():
    parameters = "(.param .u64 out, .param .align 8 .b8 shape[16], .param .f32 factor)"
    store = """ld.param.u64 %rd1, [out]; ld.param.v2.u32 {%r6, %r7}, [shape+8]; ld.param.f32 %r8, [factor];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %ntid.x; mov.u32 %r4, %ctaid.y;
        mad.lo.s32 %r1, %r2, %r3, %r1; mad.wide.u32 %rd2, %r1, 4, %rd1; mul.lo.s32 %r9, %r2, %r6;
        mad.lo.s32 %r9, %r4, %r7, %r9; cvt.rn.f32.u32 %r9, %r9; mul.f32 %r9, %r9, %r8;
        st.global.f32 [%rd2], %r9; ret;"""
    regs = "{ .reg .b32 %r<10>; .reg .b64 %rd<3>; "
    ptx = HEADER + entry("trap;", 0, name="other") + f".visible .entry mine{parameters} {regs} {store} }}"
    out = torch.full((64,), torch.nan)
    struct = np.array([1, 2, 10, 1000], np.int32).tobytes()
    arguments = [Argument("out", "*fp32", out), Argument("shape", "struct", struct), Argument("factor", "fp32", 0.5)]
    report = launch(ptx, (1, 1, 1), (8, 8, 1), 0, arguments, entry="mine")
    assert not report.findings and report.launches == 1
    assert torch.equal(out, (torch.arange(64) // 8 * 5).float())


def test_views_and_what_is_not_written_keep_their_bytes():
    base = torch.arange(100, dtype=torch.int32)
    clean("add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r0; ", base[7:])
    expected = torch.arange(100, dtype=torch.int32)
    expected[7:39] = LANES
    assert torch.equal(base, expected)
