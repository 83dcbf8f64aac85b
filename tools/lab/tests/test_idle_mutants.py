"""Faults of a kernel that change nothing, told from its jumps: kernels written by hand, for idle_mutants.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab.ptx_emulator import Argument, judge, mutants
from lab.ptx_emulator.idle_mutants import idle_mutants

HEAD = """
.visible .entry kernel(.param .u64 a, .param .u32 n)
{
	.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .f32 %f<9>;
"""
PRODUCT = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{}}}, %rd1, %rd2, 0, 1, 1, 0, 0;\n"
TEXTS = {
    "f": "\twgmma.fence.sync.aligned;\n",
    "c": "\twgmma.commit_group.sync.aligned;\n",
    "w": "\twgmma.wait_group.sync.aligned 0;\n",
    "W": "\twgmma.wait_group.sync.aligned 1;\n",
    "x": PRODUCT.format("%f1, %f2, %f3, %f4"),
    "y": PRODUCT.format("%f5, %f6, %f7, %f8"),
    "z": PRODUCT.format("%f1, %f2, %f3, %f4").replace("m64n8k16", "m64n8k8").replace("bf16.bf16", "tf32.tf32"),
    "u": "\tadd.f32 %f1, %f1, %f2;\n",
    "v": "\tmov.u32 %r3, 1;\n",
    "s": "\tst.shared.b32 [%r1], %r2;\n",
    "g": "\tst.global.b32 [%rd1], %r2;\n",
    "r": "\tld.shared.b32 %r2, [%r1];\n",
    "a": "\tcp.async.wait_group 0;\n",
    "p": "\tfence.proxy.async.shared::cta;\n",
    "b": "\tbar.sync 0;\n",
    "[": "$L__1:\n",
    "]": "\t@%p1 bra $L__1;\n",
    "(": "\t@%p2 bra $L__2;\n",
    ")": "$L__2:\n",
}
KINDS = {
    "f": "wgmma fence",
    "c": "wgmma commit",
    "w": "wgmma wait",
    "W": "wgmma wait",
    "p": "proxy fence",
    "b": "barrier",
}


def idle_places(kernel: str, which: str) -> list[bool]:
    """Per instruction of a letter, True if leaving it out changes nothing. The kernel is written in letters."""
    ptx = HEAD + "".join(TEXTS[letter] for letter in kernel) + "\tret;\n}\n"
    launch = mutants.RecordedLaunch(ptx, (1, 1, 1), 128, 0, ())
    own = [m for m in mutants.mutants(launch) if m.kind == KINDS[which] and m.argument is None]
    found = idle_mutants(launch, own, {})
    return [mutant in found for mutant in own if TEXTS[which].strip(" \t\n;") == mutant.instruction]


@pytest.mark.parametrize(
    ("kernel", "which", "idle"),
    [
        # A fence: another one before any product; or no register of one used since another one.
        ("fxcw", "f", [False]),
        ("ffxcw", "f", [True, True]),
        ("fxcwfycw", "f", [False, True]),
        ("fxcwufycw", "f", [False, False]),
        ("fxcwvfycw", "f", [False, True]),
        ("fxcwfzcw", "f", [False, False]),
        ("f[fxcwu]", "f", [True, False]),
        ("f[fxcwv]", "f", [True, True]),
        ("f(u)fxcw", "f", [True, False]),
        ("fxcwf", "f", [False, True]),
        # A commit: its products are waited for with the next group, in time.
        ("fxcw", "c", [False]),
        ("fxcycw", "c", [True, False]),
        ("fxcycWuw", "c", [False, False]),
        ("fxcwfycw", "c", [True, False]),
        ("fxcwufycw", "c", [False, False]),
        ("fxcwbfycw", "c", [False, False]),
        ("fxcwsfycw", "c", [False, False]),
        ("fxcw(fyc)w", "c", [False, False]),
        ("fxccw", "c", [True, True]),
        ("fxcwc", "c", [False, True]),
        # A wait: another one before anything needs what it waits for.
        ("fxcw", "w", [False]),
        ("fxcww", "w", [True, False]),
        ("fxcwuw", "w", [False, False]),
        ("fxcwvw", "w", [True, False]),
        ("fxcwsw", "w", [False, False]),
        ("fxcwaw", "w", [False, False]),
        ("fxcwbw", "w", [False, False]),
        ("fxcwzcw", "w", [False, False]),
        ("fxcwgw", "w", [True, False]),
        ("fxcwfycw", "w", [True, False]),
        ("fxcw(w)u", "w", [False, False]),
        ("fxcWw", "W", [True]),
        ("fxcwW", "w", [False]),
        # A proxy fence: another one before any product; or nothing written since another one.
        ("spfxcw", "p", [False]),
        ("psp", "p", [True, True]),
        ("spxsp", "p", [False, True]),
        ("spxrp", "p", [False, True]),
        ("spxpx", "p", [False, True]),
        ("spxapx", "p", [False, False]),
        ("sp[pxs]", "p", [True, False]),
        ("sp(px)x", "p", [False, True]),
        # A barrier without memory accesses between it and another barrier, the beginning, or the end.
        ("sbr", "b", [False]),
        ("sbbr", "b", [True, True]),
        ("bsbrb", "b", [True, False, True]),
        ("sbvbr", "b", [True, True]),
        ("sbgbr", "b", [False, False]),
        ("[sbr]", "b", [False]),
    ],
)
def test_what_a_neighbour_keeps_in_order(kernel, which, idle):
    assert idle_places(kernel, which) == idle


GUARDS = """
.visible .entry kernel(.param .u64 a, .param .u32 n)
{
	.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
	ld.param.u64 %rd1, [a];
	ld.param.u32 %r1, [n];
	mov.u32 %r2, %tid.x;
	setp.lt.u32 %p1, %r2, %r1;
	setp.lt.u32 %p2, %r2, 32;
	setp.gt.u32 %p3, %r2, 31;
	mul.wide.u32 %rd2, %r2, 4;
	add.u64 %rd3, %rd1, %rd2;
	@%p1 ld.global.b32 %r3, [%rd3];
	@%p2 ld.global.b32 %r4, [%rd1];
	@!%p3 ld.global.b32 %r5, [%rd1];
	@%p1 st.global.b32 [%rd3], %r2;
	@%p3 st.global.b32 [%rd3], %r2;
	ret;
}
"""


@pytest.mark.parametrize("count", [20, 32])
def test_guards_by_what_the_launch_did(count):
    """n threads of 32 load and store; the tensor has 40 elements, so its last is never touched."""
    tensor = torch.full((40,), -1, dtype=torch.int32)
    arguments = (Argument("a", "*i32", tensor), Argument("n", "i32", count))
    own = judge.Judge(mutants.RecordedLaunch(GUARDS, (1, 1, 1), 32, 0, arguments))
    found = {(mutant.kind, mutant.instruction.split(",")[0]): why for mutant, why in own.idle_mutants().items()}
    all_hold, none_holds = "the guard holds for every lane", "its guard keeps every lane out"
    expected = {
        ("guard", "@%p2 ld.global.b32 %r4"): all_hold,
        ("guard", "@!%p3 ld.global.b32 %r5"): all_hold,
        ("store", "@%p3 st.global.b32 [%rd3]"): none_holds,
        (mutants.SHORT, "a"): "its last element is not touched",
    }
    if count == 32:
        expected[("guard", "@%p1 ld.global.b32 %r3")] = expected[("guard", "@%p1 st.global.b32 [%rd3]")] = all_hold
    assert found == expected
    assert own.reach == {"a": 4 * count} and (tensor.numpy() == np.full(40, -1)).all()


def test_a_tensor_whose_last_element_is_touched():
    arguments = (Argument("a", "*i32", torch.zeros(20, dtype=torch.int32)), Argument("n", "i32", 20))
    own = judge.Judge(mutants.RecordedLaunch(GUARDS, (1, 1, 1), 32, 0, arguments))
    short = next(mutant for mutant in own.executed_mutants() if mutant.kind == mutants.SHORT)
    assert short not in own.idle_mutants() and own.verdict(short).seen
