"""The figures of docs/explained/sums.md about sums of 16-bit numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from op_calls import on_threads
from pages import ROOT
from torch import Tensor

import transformer_fast as tfast

ROWS, D, LOSSES, CLASSES = 1000, 64, 100_000, 5


def bias_gradient(norm: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.linspace(-1, 1, D).to(dtype).expand(ROWS, D).contiguous()
    weight, bias = torch.ones(D, dtype=dtype), torch.zeros(D, dtype=dtype, requires_grad=True)
    return torch.autograd.grad(norm(x, weight, bias), bias, torch.ones_like(x))[0]


def embedding_gradient(embed: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight, ids = torch.ones(2, D, dtype=dtype, requires_grad=True), torch.zeros(ROWS, dtype=torch.int64)
    return torch.autograd.grad(embed(ids, weight), weight, torch.ones(ROWS, D, dtype=dtype))[0][0]


def mean_loss(loss: Callable[..., Tensor], dtype: torch.dtype = torch.float16) -> Tensor:
    x, weight = torch.ones(LOSSES, 1, dtype=dtype), torch.zeros(CLASSES, 1, dtype=dtype)
    return loss(x, weight, torch.arange(LOSSES) % CLASSES).reshape(1)


FIGURES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gradient of LayerNorm's bias": (
        bias_gradient,
        lambda x, weight, bias: F.layer_norm(x, (D,), weight, bias),
        tfast.layer_norm,
    ),
    "gradient of an embedding's row": (embedding_gradient, F.embedding, tfast.embed),
    "mean of the cross entropy": (
        mean_loss,
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        lambda x, weight, target: tfast.linear_cross_entropy(x, weight, None, target),
    ),
}
"""Beginning of each row of the table: what is computed, by which function of torch, and by which of ours."""


def columns() -> dict[str, list[str]]:
    """Return the figures of the table's rows."""
    text = (ROOT / "docs/explained/sums.md").read_text().partition("## Sums of 16-bit numbers")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    found = {case: figures for case, *figures in cells}
    assert len(found) == len(FIGURES)
    return {name: next(found[case] for case in found if case.startswith(name)) for name in FIGURES}


def shown(result: Tensor, figure: str) -> str:
    """Return the one value of a result with the digits of a figure."""
    value = result.reshape(-1)[0].item()
    assert torch.equal(result.nan_to_num(), torch.full_like(result, value).nan_to_num())
    return f"{value:.{len(figure.partition('.')[2])}f}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_torch(name: str, threads: int) -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table has the figures of torch 2.13")
    compute, torchs, _ = FIGURES[name]
    figure = columns()[name][threads - 1]
    with on_threads(threads):
        assert shown(compute(torchs), figure) == figure


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", FIGURES)
def test_our_figures_and_the_exact_ones(name: str, threads: int) -> None:
    compute, torchs, fused = FIGURES[name]
    *_, ours, exact = columns()[name]
    with on_threads(threads):
        assert shown(compute(fused), ours) == ours
        assert shown(compute(torchs, torch.float64), exact) == exact
