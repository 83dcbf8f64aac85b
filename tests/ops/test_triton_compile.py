"""Every config of every Triton kernel, compiled for three GPU architectures on a machine that may have none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)

from hot_loops import NoHotLoopError, Spills, hot_loop, spills
from sass import parse
from triton_kernels import SHARED_LIMIT, cases, compile_launch

CASES = list(cases())


def spill_limit(name: str) -> int:
    """Bytes a thread may spill: none, but in attention of fp32 or of heads above 128, and in the backward of norms of
    more than 8192 columns, whose fp32 sums of the weight gradients fill half of the registers, or two registers in that
    of 8192 fp32 columns. And outside the hot loop of attention, where fewer registers let another program hide what the
    first waits for."""
    head = re.search(r"attention (\S+) (\S+) d(\d+)", name)
    if head is not None and (head[2] == "float32" or int(head[3]) > 128):
        return 2048
    if head is not None and head[1] in ("forward", "grad_q", "grad_kv", "grad_bias"):
        return 256
    if name.endswith("norm backward 1x8192 torch.float32"):
        return 8
    return 256 if re.search(r"norm backward .* slices of [34] blocks$", name) else 0


def kernel_of(launch: Any) -> str:
    return launch.kernel.fn.__name__


def rows() -> Iterator[Any]:
    """Every case; the short list has each kernel once, for sm_90."""
    seen = set()
    for arch, launch in CASES:
        first = arch == 90 and kernel_of(launch) not in seen
        if first:
            seen.add(kernel_of(launch))
        marks = () if first else pytest.mark.slow("a kernel is compiled for sm_90 once")
        yield pytest.param(arch, launch, marks=marks, id=f"sm_{arch} {launch.name}")


@pytest.mark.parametrize(("arch", "launch"), list(rows()))
def test_compiles_within_the_machine(arch, launch, record_property):
    compiled = compile_launch(launch, arch)
    record_property("compiled", json.dumps(asdict(compiled)))
    assert compiled.shared <= SHARED_LIMIT[arch], f"{compiled.shared} bytes of shared memory"
    assert compiled.spill_bytes <= spill_limit(compiled.name), f"{compiled.spill_bytes} spilled"
    if re.search(r"attention (forward|grad_q|grad_kv|grad_bias) b?float16 d(32|64|128)\b", compiled.name):
        assert not compiled.hot_spills, f"{compiled.hot_spills} accesses to spilled values in the hot loop"
    if arch == 90 and compiled.rows_of_16_bit_dot >= 64:
        assert compiled.wgmma > 0, "a 16-bit matrix product that does not use the tensor core's wgmma"
    elif arch == 90 and compiled.rows_of_16_bit_dot > 0:
        assert "decode" in compiled.name, "only decoding has too few rows for a wgmma"
        assert compiled.mma_sync > 0, "a 16-bit matrix product that does not use the tensor core"


def test_names_tell_the_cases_apart():
    names = [(arch, launch.name) for arch, launch in CASES]
    assert len(names) == len(set(names))


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x00000a0000017a02 */
        /*0010*/                   STL [R1], R4 ;                        /* 0x0000000401007387 */
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;  /* 0x00e0000008187df0 */
        /*0030*/               @P0 BRA 0x50 ;                            /* 0x0000000000100947 */
        /*0040*/                   {in_loop} ;                           /* 0x0000000100027983 */
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR4], R56 ;  /* 0x00e0000004387df0 */
        /*0060*/              @!P1 BRA 0x20 ;                            /* 0xffffffb000009947 */
        /*0070*/                   LDL R4, [R1] ;                        /* 0x0000000001047983 */
        /*0080*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24 ;  /* 0x00e0000008187df0 */
        /*0090*/                   LDL R5, [R1+0x4] ;                    /* 0x0000040001057983 */
        /*00a0*/               @P2 BRA 0x80 ;                            /* 0xffffffd000002947 */
        /*00b0*/                   EXIT ;                                /* 0x000000000000794d */
        /*00c0*/                   BRA 0xc0 ;                            /* 0xfffffff000007947 */
"""


def with_control_codes(listing: str) -> str:
    """The listing with the second half of every instruction."""
    return re.sub(r"(?m)(\S)$", r"\1\n                    /* 0x000fe20000000000 */", listing)


@pytest.mark.parametrize(("in_loop", "hot"), [("FADD R2, R2, R3", 0), ("LDL R2, [R1]", 1), ("@P3 STL.64 [R1], R2", 1)])
def test_spills_of_the_hot_loop_are_told_from_others(in_loop, hot):
    code = parse(with_control_codes(LISTING.format(in_loop=in_loop)))
    assert [i.address for i in hot_loop(code)] == [0x20, 0x30, 0x40, 0x50, 0x60]
    assert spills(code) == Spills(hot=hot, elsewhere=3)


def test_a_kernel_without_a_hot_loop_is_said_to_have_none():
    code = parse(with_control_codes("        /*0000*/   STL [R1], R4 ;   /* 0x0000000401007387 */"))
    with pytest.raises(NoHotLoopError, match="no loop"):
        spills(code)
    with pytest.raises(ValueError, match="not a listing"):
        parse("nothing")
