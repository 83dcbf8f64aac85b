"""Calls of a PTX module's own functions: tools/lab/ptx_emulator/functions.py, and sums with a carry."""

from __future__ import annotations

import pytest
import torch
from lab.ptx_emulator import Argument, launch
from lab.ptx_emulator.functions import with_calls_inlined

PTX = """
.func  (.param .b32 func_retval0) next_odd
(
	.param .b32 next_odd_param_0
)
;
.visible .entry kernel(.param .u64 a)
{
	.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
	ld.param.u64 %rd1, [a];
	mov.u32 %r1, %tid.x;
	setp.lt.u32 %p1, %r1, 20;
	@!%p1 bra $L_end;
	{ // callseq 0, 0
	.param .b32 param0;
	st.param.b32 [param0+0], %r1;
	.param .b32 retval0;
	call.uni (retval0),
	next_odd,
	(
	param0
	);
	ld.param.b32 %r2, [retval0+0];
	} // callseq 0
	{ // callseq 1, 0
	.param .b32 param0;
	add.u32 %r3, %r2, 10;
	st.param.b32 [param0+0], %r3;
	.param .b32 retval0;
	call.uni (retval0), next_odd, (param0);
	ld.param.b32 %r4, [retval0+0];
	} // callseq 1
	mul.wide.u32 %rd2, %r1, 4;
	add.u64 %rd3, %rd1, %rd2;
	st.global.b32 [%rd3], %r4;
$L_end:
	ret;
}
.func  (.param .b32 func_retval0) next_odd(
	.param .b32 next_odd_param_0
)
{
	.reg .pred %p<2>; .reg .b32 %r<4>;
	ld.param.u32 %r1, [next_odd_param_0];
	and.b32 %r2, %r1, 1;
	setp.eq.u32 %p1, %r2, 1;
	@%p1 bra $L_end;
	add.u32 %r1, %r1, 1;
	st.param.b32 [func_retval0+0], %r1;
	ret;
$L_end:
	st.param.b32 [func_retval0+0], %r1;
	ret;
}
"""


def test_a_function_is_called_twice():
    """A function has registers and labels of its own, even with the names of the caller's; lanes take both branches."""
    out = torch.full((32,), -1, dtype=torch.int32)
    report = launch(PTX, (1, 1, 1), 32, 0, [Argument("a", "*i32", out)])
    odd = torch.arange(20) // 2 * 2 + 1
    assert not report.findings and torch.equal(out[:20], (odd + 10).int()) and (out[20:] == -1).all()


def test_results_of_two_sizes_have_their_own_memory():
    """Calls declare their parameters and results by the same names."""
    wide = PTX.replace(".param .b32 retval0;", ".param .align 8 .b8 retval0[16];", 1)
    inlined = with_calls_inlined(wide)
    assert ".local .align 8 .b8 retval0$call0[16]" in inlined and ".local .b32 retval0$call1;" in inlined
    assert ".param .b32 param0" not in inlined


def test_every_line_keeps_its_number():
    inlined = with_calls_inlined(PTX)
    assert inlined.count("\n") == PTX.count("\n") and "call" not in inlined.replace("callseq", "").replace("$call", "")
    place = [line.strip() for line in inlined.splitlines()].index("st.global.b32 [%rd3], %r4;")
    assert PTX.splitlines()[place].strip() == "st.global.b32 [%rd3], %r4;"


def test_a_function_that_is_not_there_is_left_as_it_is():
    text = PTX[: PTX.rindex(".func")]
    assert with_calls_inlined(text) == text


CARRIES = """
.visible .entry kernel(.param .u64 a, .param .u64 b, .param .u64 c)
{
	.reg .b32 %r<20>; .reg .b64 %rd<9>;
	ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd4, %r1, 8;
	add.u64 %rd1, %rd1, %rd4; add.u64 %rd2, %rd2, %rd4;
	mul.wide.u32 %rd5, %r1, 32;
	add.u64 %rd3, %rd3, %rd5;
	ld.global.v2.b32 {%r2, %r3}, [%rd1];
	ld.global.v2.b32 {%r4, %r5}, [%rd2];
	add.cc.u32 %r6, %r2, %r4;
	addc.u32 %r7, %r3, %r5;
	sub.cc.u32 %r8, %r2, %r4;
	subc.u32 %r9, %r3, %r5;
	mul.lo.u32 %r10, %r2, %r4;
	mul.hi.u32 %r11, %r2, %r4;
	mad.lo.cc.u32 %r11, %r2, %r5, %r11;
	madc.hi.u32 %r12, %r2, %r5, 0;
	mad.lo.cc.u32 %r11, %r3, %r4, %r11;
	madc.hi.cc.u32 %r12, %r3, %r4, %r12;
	addc.u32 %r13, 0, 0;
	mad.lo.cc.u32 %r12, %r3, %r5, %r12;
	madc.hi.u32 %r13, %r3, %r5, %r13;
	st.global.v4.b32 [%rd3], {%r6, %r7, %r8, %r9};
	st.global.v4.b32 [%rd3+16], {%r10, %r11, %r12, %r13};
	ret;
}
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_sums_and_products_of_two_words_carry(seed):
    """Against Python's integers: a + b and a - b in 64 bits, a * b in 128."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-(2**63), 2**63 - 1, (32,), generator=generator) for _ in range(2))
    a[0], b[0], a[1], b[1], b[2] = -1, -1, -1, 1, 0
    out = torch.zeros(32, 8, dtype=torch.int32)
    arguments = [Argument("a", "*i64", a), Argument("b", "*i64", b), Argument("c", "*i32", out)]
    assert not launch(CARRIES, (1, 1, 1), 32, 0, arguments).findings
    for x, y, words in zip(a.tolist(), b.tolist(), out.tolist(), strict=True):
        x, y = x % 2**64, y % 2**64
        numbers = [word % 2**32 for word in words]

        def joined(some):
            return sum(word << 32 * place for place, word in enumerate(some))

        assert joined(numbers[:2]) == (x + y) % 2**64 and joined(numbers[2:4]) == (x - y) % 2**64
        assert joined(numbers[4:]) == x * y
