"""Products with a kept copy of a weight, in each layout, are as exact as F.linear."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_fast import extension
from transformer_fast.testing import assert_as_exact_as_eager

pytestmark = pytest.mark.skipif(not extension.load(), reason="needs the extension")
LAYOUTS = {"this package's": 1000, "oneDNN's": 0}
"""The most rows for this package's layout."""
ROWS = (1, 2, 11, 12, 13, 25, 64)
SIZES = ((1, 1), (2, 3), (7, 33), (64, 31), (96, 64), (515, 70))


def kept(layout: str) -> Any:
    rows = LAYOUTS[layout]
    return extension.module().KeptWeight(native_rows=rows, narrow_rows=rows, blocked_rows=1000)


def check(layout: str, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> None:
    found = kept(layout).linear(x, weight, bias)
    if found is None:  # oneDNN has no such product here, or this package has none for bfloat16
        narrow = extension.build_info()["instruction_set"] == "avx512_bf16"
        assert layout == "oneDNN's" or (weight.dtype == torch.bfloat16 and not narrow)
        return
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_exact_as_eager(found, F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sizes(dtype: torch.dtype) -> None:
    """This package's layout; the errors of oneDNN's sums are its own."""
    torch.manual_seed(0)
    for rows, (inputs, outputs) in itertools.product(ROWS, SIZES):
        weight = nn.Parameter(torch.randn(outputs, inputs).to(dtype))
        bias = torch.randn(outputs).to(dtype) if rows % 2 else None
        check("this package's", torch.randn(rows, inputs).to(dtype), weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_strides(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 33).to(dtype).t())
    x, bias = torch.randn(40, 5, 3).to(dtype).permute(1, 2, 0), torch.randn(66).to(dtype)[::2]
    check(layout, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_row_that_is_not_finite_is_alone(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(33, 70).to(dtype)), torch.randn(14, 70).to(dtype)
    x[3, 5], x[9, 69] = float("nan"), float("inf")
    found = kept(layout).linear(x, weight, None)
    finite = torch.ones(14, dtype=torch.bool)
    finite[[3, 9]] = False
    if found is not None:
        assert not found[~finite].isfinite().any() and found[finite].isfinite().all()
