"""wgmma in tools/lab/ptx_emulator: hand-written kernels, right and clean; with one fault, reported."""

from __future__ import annotations

import re

import pytest
from lab.ptx_emulator import EmulationError
from lab.tests.ptx_wgmma_by_hand import B_AT, IMAGE, Product

UNFENCED = "registers of a wgmma were accessed before it without wgmma.fence in between"
NO_PROXY_FENCE = "wgmma reads shared bytes that threads wrote, without fence.proxy.async in between"
ACCESSED = "accumulator of a wgmma in flight is accessed"


CASES = [
    *(Product(16, "bf16", mode, mode, a, b) for mode in range(4) for a in (False, True) for b in (False, True)),
    *(Product(n, "bf16", 1, 2 + b, False, b, in_registers=True) for n in (8, 40, 128, 256) for b in (False, True)),
    *(Product(32, "tf32", mode, mode, in_registers=a) for mode in range(4) for a in (False, True)),
    Product(64, "f16", scale=0),
    Product(64, "f16", scale_a=-1),
    Product(96, "f16", 0, 3, in_registers=True, scale_a=-1, scale=0),
]  # fmt: skip


@pytest.mark.parametrize("product", CASES, ids=str)
def test_products(product):
    report, error = product.run()
    assert error < 1e-6
    assert not report.findings and not report.notes


@pytest.mark.parametrize("order", ["serial", "reverse"])
def test_warps_one_after_another(order):
    report, error = Product(64, in_registers=True, transposed_b=True).run(order=order)
    assert error < 1e-6 and not report.findings


WGMMA = re.compile(r"    wgmma\.mma_async.*\n")
FAULTS = {
    "no wgmma.fence": ("    wgmma.fence.sync.aligned;\n", "", {UNFENCED}),
    "registers after wgmma.fence": (WGMMA, r"    mov.b32 %f1, 0f3F000000;\n\g<0>", {UNFENCED}),
    "first factor after wgmma.fence": (WGMMA, r"    mov.b32 %a1, %a2;\n\g<0>", {UNFENCED}),
    "no proxy fence": ("    fence.proxy.async.shared::cta;\n", "", {NO_PROXY_FENCE}),
    "proxy fence of another kind": ("fence.proxy.async.shared::cta", "fence.acq_rel.gpu", {NO_PROXY_FENCE}),
    "proxy fence before a write": (
        "    // before the fence\n    fence.proxy.async.shared::cta;\n",
        f"    fence.proxy.async.shared::cta;\n    st.shared.v4.b32 [%r2+{B_AT}], {{%r10, %r11, %r12, %r13}};\n",
        {NO_PROXY_FENCE},
    ),
    "no commit": ("    wgmma.commit_group.sync.aligned;\n", "", {ACCESSED, "wgmma never waited for"}),
    "no wait": ("    wgmma.wait_group.sync.aligned 0;\n", "", {ACCESSED, "wgmma never waited for"}),
    "wait for another group": ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1", {ACCESSED}),
    "accumulator read in flight": ("    // in flight\n", "    st.global.b32 [%rd8], %f0;\n", {ACCESSED}),
    "accumulator written in flight": ("    // in flight\n", "    mov.b32 %f0, %r1;\n", {ACCESSED}),
    "first factor written in flight": (
        "    // in flight\n", "    mov.b32 %a0, %r1;\n", {"first factor of a wgmma in flight is overwritten"}
    ),
    "shared memory written in flight": (
        "    // in flight\n",
        f"    bar.sync 0;\n    st.shared.b32 [%r2+{B_AT}], %r1;\n",
        {"shared write to bytes that a wgmma in flight reads"},
    ),
    "no barrier": ("    bar.sync 0;\n", "", {"shared race: wgmma reads bytes written without a barrier before it"}),
    "shared memory written right after": (
        "    // complete\n",
        f"    st.shared.b32 [%r2+{B_AT}], %r1;\n",
        {"shared race: write after another warp's read without a barrier"},
    ),
    "less is copied": (
        f"    st.shared.v4.b32 [%r2+{B_AT}], {{%r10, %r11, %r12, %r13}};\n",
        "",
        {"shared bytes read that were never written"},
    ),
    "copy in flight": (
        "    // before the product\n",
        f"    add.s32 %r4, %r2, {B_AT};\n    cp.async.cg.shared.global [%r4], [%rd6], 16;\n    bar.sync 0;\n",
        {"shared read of bytes with a cp.async in flight", "cp.async never waited for"},
    ),
    "a warp leaves": (
        "    // before the product\n",
        "    setp.lt.u32 %p2, %r1, 32;\n    @%p2 ret;\n",
        {"the warps of a warpgroup executed different wgmma instructions"},
    ),
    "lanes leave": (
        "    // before the product\n",
        "    setp.lt.u32 %p2, %r1, 5;\n    @%p2 ret;\n",
        {"a warp is not complete at a .sync instruction"},
    ),
    "descriptors differ": (
        "    // before the product\n",
        "    cvt.u64.u32 %rd9, %r1;\n    add.s64 %rd5, %rd5, %rd9;\n",
        {"threads of a warpgroup give a wgmma different matrix descriptors"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault):
    old, new, kinds = FAULTS[fault]
    product = Product(64, in_registers=True, transposed_b=True)
    ptx, count = re.subn(old if isinstance(old, re.Pattern) else re.escape(old), new, product.ptx(), count=1)
    assert count == 1
    report, _ = product.run(ptx)
    assert kinds <= report.kinds()


def test_what_is_in_flight_is_no_number():
    """Without its wait a product is not delivered."""
    product = Product(64, in_registers=True)
    _, error = product.run(product.ptx().replace("    wgmma.wait_group.sync.aligned 0;\n", ""))
    assert not error < 1


def test_misaligned_descriptor():
    product = Product()
    a, b = product.descriptors
    report, _ = product.run(descriptors=(a, b + (128 >> 4)))
    assert report.kinds() == {"matrix descriptor misaligned to its swizzle"}


def test_descriptor_beyond_shared_memory():
    product = Product()
    a, b = product.descriptors
    report, _ = product.run(descriptors=(a, b + (IMAGE - B_AT >> 4)))
    assert "wgmma reads beyond the end of shared memory" in report.kinds()


def test_a_proxy_fence_of_the_readers_after_the_barrier():
    """Either side of the barrier will do, but a fence of the writers after it will not do for readers without one."""
    fence, barrier = "    fence.proxy.async.shared::cta;\n", "    bar.sync 0;\n"
    product = Product(transposed_b=True)
    report, error = product.run(product.ptx().replace(fence + barrier, barrier + fence))
    assert not report.findings and error < 1e-6


def test_copies_without_a_proxy_fence_are_a_note():
    product = Product(in_registers=True)
    ptx = re.sub(
        r"    ld\.global\.v4\.b32 \{%r10.*, \[(.*)\];\n    st\.shared\.v4\.b32 \[%r2\+(\d+)\].*\n",
        r"    add.s32 %r4, %r2, \2;\n    cp.async.cg.shared.global [%r4], [\1], 16;\n",
        product.ptx(),
    )
    arrived = "    cp.async.commit_group;\n    cp.async.wait_group 0;\n    // before the fence\n"
    ptx = ptx.replace("    // before the fence\n", arrived)
    report, error = product.run(ptx)
    assert error < 1e-6 and not report.findings and not report.notes
    report, error = product.run(ptx.replace("    fence.proxy.async.shared::cta;\n", ""))
    assert error < 1e-6 and not report.findings
    assert {note.kind for note in report.notes} == {NO_PROXY_FENCE.replace("threads", "cp.async")}


def test_groups_complete_in_order():
    """Two products in two groups: wait_group 1 delivers the first and leaves the second."""
    product = Product(16, in_registers=True)
    ptx = product.ptx().replace("%f<8>", "%f<16>")
    multiply = WGMMA.search(ptx).group()
    commit, wait = "    wgmma.commit_group.sync.aligned;\n", "    wgmma.wait_group.sync.aligned 0;\n"
    again = re.sub(r"%f(\d)", lambda found: f"%f{int(found[1]) + 8}", multiply).replace("%p1", "0")
    ptx = ptx.replace(multiply + commit, multiply + commit + again + commit)
    report, error = product.run(ptx.replace(wait, wait.replace("0", "1")).replace("    ret;", wait + "    ret;"))
    assert error < 1e-6 and not report.findings
    report, _ = product.run(ptx.replace(wait, wait.replace("0", "2")).replace("    ret;", wait + "    ret;"))
    assert report.kinds() == {ACCESSED}


def test_a_chain_accumulates():
    """Products of the same shape into the same registers need no fence and no wait between them."""
    product = Product(16, scale_a=1, in_registers=True)
    multiply = WGMMA.search(product.ptx()).group()
    undone = multiply.replace("%p1, 1, 1", "1, -1, 1")
    report, error = product.run(product.ptx().replace(multiply, multiply + undone + multiply))
    assert error < 1e-6 and not report.findings
    other = multiply.replace("m64n16k16", "m64n8k16").replace("%f4, %f5, %f6, %f7}", "%f3}").replace("%f3, %f3", "%f3")
    report, _ = product.run(product.ptx().replace(multiply, multiply + other))
    assert UNFENCED in report.kinds()


@pytest.mark.parametrize(
    "instruction",
    [
        "mbarrier.init.shared::cta.b64 [%r2], 1",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r1, %r1}], [%r2]",
        "mapa.shared::cluster.u32 %r4, %r2, %r1",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f0, %f1, %f2, %f3}, %rd4, %rd5, 1, 1, 1",
    ],
)
def test_what_is_not_emulated_is_named(instruction):
    product = Product()
    ptx = product.ptx().replace("    // in flight\n", f"    {instruction};\n")
    with pytest.raises(EmulationError, match=re.escape(instruction.split()[0])):
        product.run(ptx)


def test_a_path_around_the_fence():
    """Paths are followed whether or not they are taken: here no thread jumps."""
    product = Product(in_registers=True)
    fence = "    wgmma.fence.sync.aligned;\n"
    around = f"    setp.eq.u32 %p2, %r1, 1000;\n    @%p2 bra AROUND;\n{fence}AROUND:\n"
    report, error = product.run(product.ptx().replace(fence, around))
    assert report.kinds() == {UNFENCED} and error < 1e-6
    report, error = product.run(product.ptx().replace(fence, around + fence))
    assert not report.findings and error < 1e-6


def test_a_program_is_a_cluster_of_its_own():
    """Read the special registers of clusters, and run setmaxnreg, which asks for registers that nobody counts."""
    product = Product()
    start = "    mov.b32 %f0, 0f3F000000;\n"
    computed = (
        "    setmaxnreg.inc.sync.aligned.u32 232;\n    mov.u32 %r4, %cluster_nctaid.x;\n"
        "    mov.u32 %r6, %cluster_ctarank;\n    add.u32 %r4, %r4, %r6;\n    cvt.rn.f32.u32 %f0, %r4;\n"
        "    mul.f32 %f0, %f0, 0f3F000000;\n"
    )
    report, error = product.run(product.ptx().replace(start, computed))
    assert error < 1e-6 and not report.findings
