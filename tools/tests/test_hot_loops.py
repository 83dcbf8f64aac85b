"""The hot loop of a kernel is found in its machine code, and the spills in it."""

from __future__ import annotations

import re

import pytest

from tools.hot_loops import NoHotLoopError, Spills, hot_loop, is_serialised, spills
from tools.sass import parse

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


@pytest.mark.parametrize(("waits", "serialised"), [((), False), ((1,), False), ((0, 1), True)])
def test_products_that_wait_for_one_another_are_told(waits, serialised):
    ends = [match.end() for match in re.finditer(r"HGMMA[^;]*R(24|56)(?= ;)", LISTING)]
    listing = LISTING
    for place in sorted(waits, reverse=True):
        listing = f"{listing[: ends[place]]}, gsb0{listing[ends[place] :]}"
    assert listing.count("gsb0") == len(waits)
    assert is_serialised(parse(with_control_codes(listing.format(in_loop="FADD R2, R2, R3")))) is serialised


def test_a_kernel_without_a_hot_loop_is_said_to_have_none():
    code = parse(with_control_codes("        /*0000*/   STL [R1], R4 ;   /* 0x0000000401007387 */"))
    with pytest.raises(NoHotLoopError, match="no loop"):
        spills(code)
    with pytest.raises(ValueError, match="not a listing"):
        parse("nothing")
