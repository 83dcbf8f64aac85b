"""Products that Triton compiles to wgmma: right and clean in tools/lab/ptx_emulator; without their fences, reported."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from lab.ptx_emulator import Report
from lab.ptx_emulator.triton_driver import emulated

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="needs Triton's compiler, not its interpreter")

TILE = 64


@triton.jit
def multiply_kernel(a, b, out, M, N, K, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    """Compute out = a @ b, or with CHAIN (a @ b) @ b, rounded in between: one program per tile, with a loop over K."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        x = tl.load(a + rows[:, None] * K + inner[None, :], mask=(rows[:, None] < M) & (inner[None, :] < K), other=0.0)
        y = tl.load(
            b + inner[:, None] * N + columns[None, :], mask=(inner[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total = tl.dot(x, y, total)
        if CHAIN:
            total = tl.dot(total.to(y.dtype), y)
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


def multiplied(
    dtype: torch.dtype, shape: tuple[int, int, int] = (128, 128, 192), warps: int = 4, chain: bool = False,
    stages: int = 3, mutate: Callable[[str], str] | None = None, **options: str,
) -> tuple[Report, float]:  # fmt: skip
    """The report of a product, and its largest error relative to the largest element."""
    M, N, K = shape
    a, b, out = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), torch.full((M, N), float("nan"))
    if dtype is torch.float32:  # what tf32 holds
        a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    with emulated(90, mutate, **options) as report:
        grid = (triton.cdiv(M, TILE), triton.cdiv(N, TILE))
        multiply_kernel[grid](a, b, out, M, N, K, BLOCK=TILE, CHAIN=chain, num_warps=warps, num_stages=stages)
    expected = a.double() @ b.double()
    if chain:
        expected = expected.to(dtype).double() @ b.double()
    return report, float((out - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("warps", [4, 8])
def test_a_product_in_a_loop(dtype, warps):
    report, error = multiplied(dtype, warps=warps)
    assert sum(count for name, count in report.instructions.items() if "mma_async" in name)
    assert error < 1e-6 and not report.findings


@pytest.mark.parametrize("order", ["serial", "reverse"])
def test_warps_one_after_another(order):
    report, error = multiplied(torch.bfloat16, (80, 70, 100), 8, order=order)
    assert error < 1e-6 and not report.findings


def test_the_first_factor_in_registers():
    """K of one tile: the sum is rounded to bf16 and multiplied again, from the registers it lies in."""
    register_factor = []

    def look(ptx: str) -> str:
        register_factor.append(re.search(r"mma_async\S+ \{[^}]*\}, \{", ptx) is not None)
        return ptx

    report, error = multiplied(torch.bfloat16, (64, 64, 64), chain=True, mutate=look)
    assert register_factor == [True]
    assert error < 2**-8 and not report.findings


REMOVED = {
    r"wgmma\.fence\.sync\.aligned;": "registers of a wgmma were accessed before it without wgmma.fence in between",
    r"wgmma\.wait_group\.sync\.aligned\s+0;": "accumulator of a wgmma in flight is accessed",
    r"wgmma\.commit_group\.sync\.aligned;": "accumulator of a wgmma in flight is accessed",
    r"fence\.proxy\.async\S*;": "wgmma reads shared bytes that threads wrote, without fence.proxy.async in between",
    r"bar\.sync\s+0;": "shared race: wgmma reads bytes written without a barrier before it",
}


@pytest.mark.parametrize("instruction", REMOVED)
def test_a_product_without(instruction):
    """Every instruction of a kind is removed: one alone may be covered by another. Without stages, no cp.async."""
    removed = []

    def remove(ptx: str) -> str:
        ptx, count = re.subn(instruction, "", ptx)
        removed.append(count)
        return ptx

    report, _ = multiplied(torch.bfloat16, (64, 64, 64), chain=True, stages=1, mutate=remove)
    assert removed[0] >= 1
    assert REMOVED[instruction] in report.kinds()
