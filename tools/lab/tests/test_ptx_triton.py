"""Triton kernels compiled for sm_80 in the emulator: they compute what they shall, and a fault in one is seen."""

from __future__ import annotations

import os
import re

import pytest
import torch
import triton
import triton.language as tl
from lab.tests.ptx_by_hand import Report

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not compiled", allow_module_level=True)

from lab.ptx_emulator.triton_driver import emulated

ORDERS = ["lockstep", "serial", "reverse"]


@triton.jit
def add_kernel(x, y, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside) + tl.load(y + place, mask=inside), mask=inside)


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + column, mask=column < columns, other=-float("inf"))
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * columns + column, power / tl.sum(power, 0), mask=column < columns)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None], other=0.0)
        right = tl.load(b + (start + k)[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)
        sums = tl.dot(left, right, sums)
    tl.store(c + m[:, None] * N + n[None, :], sums, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def count_kernel(x, counts, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    tl.atomic_add(counts + tl.load(x + place, mask=inside), 1.0, mask=inside)


def add(x, y):
    out = torch.full_like(x, torch.nan)
    add_kernel[(triton.cdiv(len(x), 256),)](x, y, out, len(x), BLOCK=256)
    return out


def softmax(x):
    out = torch.full_like(x, torch.nan)
    softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=512)
    return out


def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), torch.nan)
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    matmul_kernel[grid](a, b, out, m, n, k, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_stages=3)
    return out


@pytest.fixture
def product():
    return torch.randn(100, 128).half(), torch.randn(128, 96).half()


@pytest.mark.parametrize("order", ORDERS)
def test_elementwise_and_rows(order):
    x, y, rows = torch.randn(1000), torch.randn(1000), torch.randn(7, 300)
    with emulated(order=order) as report:
        assert torch.equal(add(x, y), x + y)
        torch.testing.assert_close(softmax(rows), rows.softmax(1), atol=1e-7, rtol=1e-5)
    assert report.launches == 2
    assert not report.findings, str(report)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_with_asynchronous_copies(dtype, order, product):
    a, b = (x.to(dtype) for x in product)  # numbers of fp16 have a TF32 form
    with emulated(order=order) as report:
        out = matmul(a, b)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-5)
    assert not report.findings, str(report)
    kind = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "tf32"}[dtype]
    assert any(name.startswith("mma.") and kind in name.split(".") for name in report.instructions)
    assert report.instructions["cp.async.commit_group"]


def test_atomic_sums():
    x = torch.randint(0, 10, (1000,), dtype=torch.int32)
    counts = torch.zeros(10)
    with emulated() as report:
        count_kernel[(4,)](x, counts, 1000, BLOCK=256)
    assert torch.equal(counts, torch.bincount(x, minlength=10).float())
    assert not report.findings, str(report)


def without(pattern: str, which: int):
    """A change of a PTX text that removes one match of a pattern."""

    def mutate(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[which]
        return ptx[: found.start()] + ptx[found.end() :]

    return mutate


FAULTS = {
    "barrier of the reduction": (softmax, r"bar\.sync\s+0;", 0, "shared race"),
    "last barrier of the reduction": (softmax, r"bar\.sync\s+0;", -1, "shared race"),
    "guard of the loads": (softmax, r"@%p\d+ (?=ld\.global)", -1, "out of bounds"),
    "guard of the stores": (softmax, r"@%p\d+ (?=st\.global)", -1, "out of bounds"),
    "wait in the loop": (matmul, r"cp\.async\.wait_group\s+\d+;", 1, "in flight"),
    "barrier in the loop": (matmul, r"bar\.sync\s+0;", 1, "shared race"),
    "commit of a group": (matmul, r"cp\.async\.commit_group\s*;", 1, "in flight"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_compiled_kernel_is_reported(name, product):
    function, pattern, which, kind = FAULTS[name]
    arguments = product if function is matmul else (torch.randn(3, 300),)
    with emulated(mutate=without(pattern, which)) as report:
        function(*arguments)
    assert any(kind in found for found in report.kinds()), report.kinds()
    with emulated() as report:
        function(*arguments)
    assert not report.findings, str(report)


def test_a_tensor_that_is_too_short_is_reported():
    with emulated() as report:
        add_kernel[(1,)](torch.zeros(256), torch.zeros(255), torch.zeros(256), 256, BLOCK=256)
    (finding,) = report
    assert finding.kind == "global access out of bounds"
    assert "of the 1020 of y" in finding.detail
    assert finding.location.startswith("test_ptx_triton.py:")


def test_launches_are_counted_by_block_and_line():
    with emulated(report=Report(launches=1)) as report:
        add(torch.zeros(1000), torch.zeros(1000))
    assert report.launches == 2
    assert report.instructions["ret"] == 4 * 4  # programs, warps
    assert sum(report.lines.values()) == sum(report.instructions.values())
    assert {name for name, _ in report.lines} == {"add_kernel"}


def test_outside_the_block_triton_is_as_before():
    from triton.runtime import driver

    before = driver._active
    with emulated(), pytest.raises(ValueError, match="stop"):
        assert driver._active is not before
        raise ValueError("stop")
    assert driver._active is before
    with pytest.raises(ValueError, match="order"), emulated(order="sideways"):
        add(torch.zeros(8), torch.zeros(8))
