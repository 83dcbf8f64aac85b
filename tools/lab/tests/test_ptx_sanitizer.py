"""The checks of the emulator: each sees a fault in a small kernel, and nothing in the same kernel without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab.ptx_emulator import Argument, EmulationError, launch
from lab.tests.ptx_by_hand import HEADER, entry, execute

SHARED = ".extern .shared .align 16 .b8 buffer[];"
OWN_WORD = "mov.u32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2;"  # %r1: a word of each thread
OTHER_WORD = "xor.b32 %r4, %r2, 128; mov.u32 %r3, buffer; add.s32 %r3, %r3, %r4;"  # %r3: that of the next warp's thread
NEXT_LANE = "xor.b32 %r4, %r2, 4; mov.u32 %r3, buffer; add.s32 %r3, %r3, %r4;"
SLOT = f"{OWN_WORD} mov.b32 %r5, 7; st.shared.b32 [%r1], %r5;"
COPY = "shl.b32 %r6, %r0, 4; mov.u32 %r7, buffer; add.s32 %r7, %r7, %r6; mad.wide.u32 %rd7, %r0, 16, %rd0;"
START = "cp.async.cg.shared.global [%r7 + 0], [%rd7 + 0], 0x10;"
ARRIVED = "cp.async.commit_group; cp.async.wait_group 0;"
READ_OTHER = "xor.b32 %r8, %r7, 512; ld.shared.b32 %r9, [%r8];"
READ_16 = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r7];"

# name: (kind of the finding, faulty body, right body); 64 threads, 1024 bytes of shared memory, a tensor of 1024 bytes
FAULTS = {
    "global out of bounds": (
        "global access out of bounds",
        "add.s64 %rd10, %rd0, %rd9; ld.global.b32 %r1, [%rd10 + 772];",
        "add.s64 %rd10, %rd0, %rd9; ld.global.b32 %r1, [%rd10 + 768];",
    ),
    "global before the start": (
        "global access out of bounds",
        "st.global.b32 [%rd0 + -4], %r0;",
        "setp.eq.u32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0 + 4], %r0;",
    ),
    "guard": (
        "global access out of bounds",
        "setp.lt.u32 %p1, %r0, 65; mad.wide.u32 %rd10, %r0, 32, %rd0; @%p1 ld.global.b32 %r1, [%rd10];",
        "setp.lt.u32 %p1, %r0, 32; mad.wide.u32 %rd10, %r0, 32, %rd0; @%p1 ld.global.b32 %r1, [%rd10];",
    ),
    "global misaligned": (
        "global access misaligned",
        "ld.global.v2.b32 {%r1, %r2}, [%rd0 + 4];",
        "ld.global.v2.b32 {%r1, %r2}, [%rd0 + 8];",
    ),
    "shared out of bounds": (
        "shared access out of bounds",
        f"{OWN_WORD} st.shared.b32 [%r1 + 772], %r0;",
        f"{OWN_WORD} st.shared.b32 [%r1 + 768], %r0;",
    ),
    "shared misaligned": (
        "shared access misaligned",
        f"{OWN_WORD} st.shared.b32 [%r1 + 2], %r0;",
        f"{OWN_WORD} st.shared.b32 [%r1 + 4], %r0;",
    ),
    "never written": (
        "shared bytes read that were never written",
        f"{SLOT} bar.sync 0; ld.shared.b32 %r6, [%r1 + 4];",
        f"{SLOT} bar.sync 0; ld.shared.b32 %r6, [%r1];",
    ),
    "read after write": (
        "shared race: read after another warp's write without a barrier",
        f"{SLOT} {OTHER_WORD} ld.shared.b32 %r6, [%r3];",
        f"{SLOT} {OTHER_WORD} bar.sync 0; ld.shared.b32 %r6, [%r3];",
    ),
    "write after read": (
        "shared race: write after another warp's read without a barrier",
        f"{SLOT} {OTHER_WORD} bar.sync 0; ld.shared.b32 %r6, [%r3]; st.shared.b32 [%r1], %r6;",
        f"{SLOT} {OTHER_WORD} bar.sync 0; ld.shared.b32 %r6, [%r3]; bar.sync 0; st.shared.b32 [%r1], %r6;",
    ),
    "write after write": (
        "shared race: write after another warp's write without a barrier",
        f"{OWN_WORD} st.shared.b32 [%r1], %r0; {OTHER_WORD} st.shared.b32 [%r3], %r0;",
        f"{OWN_WORD} st.shared.b32 [%r1], %r0; {OTHER_WORD} bar.sync 0; st.shared.b32 [%r3], %r0;",
    ),
    "one store, two values": (
        "shared race: two lanes of one store write different values",
        f"{OWN_WORD} mov.u32 %r3, buffer; st.shared.b32 [%r3], %r0;",
        f"{OWN_WORD} mov.u32 %r3, buffer; mov.b32 %r4, 1; st.shared.b32 [%r3], %r4;",
    ),
    "within a warp": (
        "shared race: read after another lane's write without bar.warp.sync",
        f"{SLOT} {NEXT_LANE} ld.shared.b32 %r6, [%r3];",
        f"{SLOT} {NEXT_LANE} bar.warp.sync -1; ld.shared.b32 %r6, [%r3];",
    ),
    "copy in flight read": (
        "shared read of bytes with a cp.async in flight",
        f"{COPY} {START} cp.async.commit_group; {READ_16} cp.async.wait_all;",
        f"{COPY} {START} {ARRIVED} {READ_16}",
    ),
    "copy of a later group in flight": (
        "shared read of bytes with a cp.async in flight",
        f"{COPY} {START} cp.async.commit_group; cp.async.wait_group 1; {READ_16} cp.async.wait_all;",
        f"{COPY} {START} cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; {READ_16}",
    ),
    "copy in flight overwritten": (
        "shared write to bytes with a cp.async in flight",
        f"{COPY} {START} cp.async.commit_group; st.shared.b32 [%r7], %r0; cp.async.wait_all;",
        f"{COPY} {START} cp.async.wait_all; st.shared.b32 [%r7], %r0;",
    ),
    "copy seen by another warp": (
        "shared race: read after another warp's write without a barrier",
        f"{COPY} {START} {ARRIVED} xor.b32 %r7, %r7, 512; {READ_16}",
        f"{COPY} {START} {ARRIVED} bar.sync 0; xor.b32 %r7, %r7, 512; {READ_16}",
    ),
    "copy over a read": (
        "shared race: cp.async after another warp's read without a barrier",
        f"{COPY} {START} {ARRIVED} bar.sync 0; {READ_OTHER} {START} {ARRIVED}",
        f"{COPY} {START} {ARRIVED} bar.sync 0; {READ_OTHER} bar.sync 0; {START} {ARRIVED}",
    ),
    "copy never waited for": (
        "cp.async never waited for",
        f"{COPY} {START} cp.async.commit_group;",
        f"{COPY} {START} {ARRIVED}",
    ),
    "incomplete warp": (
        "a warp is not complete at a .sync instruction",
        "setp.lt.u32 %p1, %r0, 40; @!%p1 bra after; shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; after:",
        "setp.lt.u32 %p1, %r0, 32; @!%p1 bra after; shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; after:",
    ),
    "barrier after an exit": (
        "barrier after threads of the CTA have exited",
        "setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0;",
        "setp.lt.u32 %p1, %r0, 32; bar.sync 0; @%p1 ret;",
    ),
    "different barriers": (
        "threads of a CTA wait at different barriers",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra other; bar.sync 0; bra.uni end; other: bar.sync 0; end:",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra other; other: bar.sync 0;",
    ),
    "warps race in global memory": (
        "global race: read after another warp's write without a barrier",
        "xor.b32 %r1, %r0, 32; mad.wide.u32 %rd10, %r1, 4, %rd0; add.s64 %rd11, %rd0, %rd9;"
        "st.global.b32 [%rd11], %r0; ld.global.b32 %r2, [%rd10];",
        "xor.b32 %r1, %r0, 32; mad.wide.u32 %rd10, %r1, 4, %rd0; add.s64 %rd11, %rd0, %rd9;"
        "st.global.b32 [%rd11], %r0; bar.sync 0; ld.global.b32 %r2, [%rd10];",
    ),
    "trap": ("trap reached", "setp.eq.u32 %p1, %r0, 40; @%p1 trap;", "setp.eq.u32 %p1, %r0, 64; @%p1 trap;"),
    "local memory": (
        "local bytes read that were never written",
        ".local .align 8 .b8 depot[16]; mov.u64 %rd10, depot; st.local.b32 [%rd10], %r0; ld.local.b64 %rd11, [%rd10];",
        ".local .align 8 .b8 depot[16]; mov.u64 %rd10, depot; st.local.b32 [%rd10], %r0; ld.local.b32 %r1, [%rd10];",
    ),
}  # fmt: skip


def findings(body: str, **options) -> set[str]:
    tensor = torch.arange(256, dtype=torch.int32)
    return execute(body, tensor, threads=64, shared=1024, declarations=SHARED, **options).kinds()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_and_its_absence_is_not(name):
    kind, faulty, right = FAULTS[name]
    assert findings(faulty) == {kind}
    for order in ("lockstep", "serial", "reverse"):
        assert not findings(right, order=order)


@pytest.mark.parametrize("order", ["serial", "reverse"])
@pytest.mark.parametrize("name", [name for name in FAULTS if "copy seen" not in name])
def test_faults_are_reported_in_every_order(name, order):
    kind, faulty, _ = FAULTS[name]
    found = findings(faulty, order=order)
    assert any("race" in other for other in found) if "race" in kind else kind in found


@pytest.mark.parametrize("verb", ["wrote", "read"])
def test_programs_must_not_write_what_others_access(verb):
    write = "mov.u32 %r1, %ctaid.x; mad.wide.u32 %rd10, %r1, OFFSET, %rd0; setp.eq.u32 %p1, %r0, 0;"
    write += "@%p1 st.global.b32 [%rd10], %r1;" if verb == "wrote" else "ld.global.b32 %r2, [%rd0]; bar.sync 0;"
    write += "" if verb == "wrote" else "@%p1 st.global.b32 [%rd10 + 4], %r1;"
    faulty, right = write.replace("OFFSET", "0" if verb == "wrote" else "-4"), write.replace("OFFSET", "8")
    faulty = faulty.replace("mad.wide.u32", "mad.wide.s32")
    for at_once in (True, False):
        grid = 2 if at_once else 130  # 130 programs: two machines of 64 programs, and a third
        tensor = torch.zeros(512, dtype=torch.int32)
        kinds = execute(faulty, tensor[8:], threads=64, grid=grid).kinds()
        assert kinds >= {f"global race: write of bytes that another CTA {verb}"}, kinds
        assert not execute(right, tensor[8:], threads=64, grid=grid).kinds()


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_sanitizer_only_what_cannot_be_done_is_reported(name):
    kind, faulty, _ = FAULTS[name]
    of_shadow = "race" in kind or kind.startswith("shared bytes") or "in flight" in kind
    assert findings(faulty, sanitize=False) == (set() if of_shadow else {kind})


def test_a_finding_says_where():
    report = execute(
        "add.s64 %rd10, %rd0, %rd9;\n.loc 1 7 0 // kernel.py:7:0\nld.global.b32 %r1, [%rd10 + 4];", torch.zeros(32)
    )
    (finding,) = report
    assert finding.kernel == "test" and finding.location == "kernel.py:7:0"
    assert finding.instruction == "ld.global.b32 %r1, [%rd10 + 4]"
    assert "thread 31 of CTA 0" in finding.detail and "byte 128 of the 128 of tensor 0" in finding.detail
    assert "kernel.py:7:0" in str(report)


def test_what_lies_out_of_bounds_is_neither_read_nor_written():
    inside, outside = torch.zeros(40, dtype=torch.int32), torch.full((4,), 5, dtype=torch.int32)
    body = "mad.wide.u32 %rd10, %r0, 4, %rd0; st.global.b32 [%rd10 + 64], %r0; ld.global.b32 %r1, [%rd10 + 64];"
    report = execute(body + "st.global.b32 [%rd10], %r1;", inside[:32].clone(), outside)
    assert report.kinds() == {"global access out of bounds"}
    assert (outside == 5).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("setp.lt.u32 %p1, %r0, 8; again: @%p1 bra again; bar.sync 0;", "no end after"),
        ("frobnicate.b32 %r1, %r2;", "frobnicate"),
        ("add.s32 %r1, %r99, 1;", "%r99"),
        ("bra nowhere;", "nowhere"),
        ("bar.sync 1, 32;", "not known"),
    ],
)
def test_what_cannot_run_on_is_an_error(body, message, monkeypatch):
    monkeypatch.setattr("lab.ptx_emulator.machine.BLOCK_LIMIT", 1000)
    with pytest.raises(EmulationError, match=message):
        execute(body, torch.zeros(32), threads=64)


def test_arguments_are_checked():
    ptx = HEADER + entry("") + entry("", name="other")
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="test, other"):
        launch(ptx, (1, 1, 1), 32, 0, [])
    with pytest.raises(ValueError, match="no entry missing"):
        launch(ptx, (1, 1, 1), 32, 0, [], entry="missing")
    with pytest.raises(ValueError, match="whole warps"):
        launch(ptx, (1, 1, 1), 40, 0, [], entry="test")
    with pytest.raises(ValueError, match="order"):
        launch(ptx, (1, 1, 1), 32, 0, [], entry="test", order="random")
    with pytest.raises(ValueError, match="takes 3 arguments"):
        launch(ptx, (1, 1, 1), 32, 0, [Argument("x", "*fp32", x)] * 4, entry="test")
    with pytest.raises(ValueError, match="has 4 bytes, its parameter 8"):
        launch(ptx, (1, 1, 1), 32, 0, [Argument("x", "i32", 4)], entry="test")
    with pytest.raises(ValueError, match="must be a tensor"):
        launch(ptx, (1, 1, 1), 32, 0, [Argument("x", "*fp32", np.zeros(3))], entry="test")
    with pytest.raises(ValueError, match="type bf16"):
        launch(ptx, (1, 1, 1), 32, 0, [Argument("x", "bf16", 4)], entry="test")
    with pytest.raises(EmulationError, match=r"no \.entry"):
        launch(HEADER, (1, 1, 1), 32, 0, [])
