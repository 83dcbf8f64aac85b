"""`keep_weights` notices every write to a parameter of any part of the model, even one that PyTorch does not count."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tiny_transformer import answers, batch, bits_of, tiny
from torch import Tensor, nn

from transformer_fast import extension, tensor_cache
from transformer_fast.tensor_cache import BLOCK, COLUMN, WHOLE, stamp_of

Parameters = list[nn.Parameter]


def of_each(write: Callable[[nn.Parameter, Tensor], object]) -> Callable[[Parameters, Parameters], None]:
    """Write to each parameter alone."""

    def write_all(mine: Parameters, theirs: Parameters) -> None:
        for parameter, other in zip(mine, theirs, strict=True):
            write(parameter, other.data)

    return write_all


WRITES: dict[str, Callable[[Parameters, Parameters], object]] = {
    "data": of_each(lambda p, other: p.data.copy_(other)),
    "average": of_each(lambda p, other: p.data.mul_(0.25).add_(other, alpha=0.75)),
    "foreach": lambda mine, theirs: torch._foreach_copy_([p.data for p in mine], [p.data for p in theirs]),
    "numpy": of_each(lambda p, other: p.numpy().__setitem__(..., other.numpy())),
    "other memory": of_each(lambda p, other: setattr(p, "data", other.clone())),
    "counted writes": of_each(lambda p, other: p.copy_(other)),
}


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"quantize": "int8"}], ids=str)
@pytest.mark.parametrize("part", ["", "encoder", "decoder", "out"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_seen(write: str, part: str, options: dict[str, object]) -> None:
    """The answers are those of a new model with the current weights."""
    if not extension.load() and "quantize" in options:
        pytest.skip("needs the C++ extension")
    model, other = tiny(1).requires_grad_(False), tiny(2).requires_grad_(False)
    kept = {"keep_weights": True, **options}
    before = [bits_of(answers(model, batch(), **kept)) for _ in range(2)]
    assert before[0] == before[1]
    WRITES[write](list(model.get_submodule(part).parameters()), list(other.get_submodule(part).parameters()))
    found = [bits_of(answers(model, batch(), **kept)) for _ in range(2)]
    assert found == [bits_of(answers(copy.deepcopy(model), batch(), **kept))] * 2
    assert found[0] != before[0]


def test_weights_that_are_trained_are_not_kept() -> None:
    with pytest.raises(ValueError, match=r"keep_weights=True needs parameters that do not require gradients"):
        answers(tiny(), batch(), keep_weights=True)


SMALL, LARGE, NARROW, WIDE, TALL = (40, 64), (64, 512), (300, 96), (256, 1984), (500, 768)


def test_both_sides_of_the_size_from_which_a_sample_is_read() -> None:
    assert SMALL[0] * SMALL[1] <= 2 * WHOLE < min(rows * columns for rows, columns in (LARGE, NARROW, WIDE, TALL))


def changed(weight: Tensor, write: Callable[[Tensor], object]) -> bool:
    before = stamp_of(weight)
    assert stamp_of(weight) == before
    write(weight.data)
    return stamp_of(weight) != before


@pytest.mark.parametrize("layout", ["plain", "transposed", "odd width", "odd offset"])
@pytest.mark.parametrize("shape", [SMALL, LARGE, NARROW, WIDE, TALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_stamps_see_rows_columns_and_orders(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    weight = torch.randn(rows, columns).to(dtype)
    if layout == "transposed":
        weight = torch.randn(columns, rows).to(dtype).t()
    elif layout == "odd width":
        weight = torch.randn(rows, columns + 1).to(dtype)
    elif layout == "odd offset":
        weight = torch.randn(rows * columns + 1).to(dtype)[1:].view(shape)
    whole: dict[str, Callable[[Tensor], object]] = {
        "scaled": lambda w: w.mul_(1.5),
        "negated": lambda w: w.neg_(),
        "moved a little": lambda w: w.mul_(1.01),
        "rows reversed": lambda w: w.copy_(w.flip(0)),
        "columns reversed": lambda w: w.copy_(w.flip(1)),
        "two halves swapped": lambda w: w.copy_(w.roll(columns // 2, 1)),
        "heads swapped": lambda w: w.copy_(w.roll(8, 0)),
    }
    assert [name for name, write in whole.items() if not changed(weight, write)] == []
    lines = {0: rows, 1: columns}
    across = 0 if layout == "transposed" else 1  # the lines that lie across memory
    if lines[1 - across] < COLUMN and layout in ("transposed", "odd width", "odd offset"):
        del lines[across]  # too short
    for dim, count in lines.items():
        assert [n for n in range(count) if not changed(weight, lambda w, d=dim, n=n: w.select(d, n).add_(1))] == []


SIGNS: dict[str, Callable[[Tensor], object]] = {
    "column 0": lambda w: w[:, 0].neg_(),
    "column 1": lambda w: w[:, 1].neg_(),
    "odd columns": lambda w: w[:, 1::2].neg_(),
    "even columns": lambda w: w[:, ::2].neg_(),
    "fourth columns": lambda w: w[:, 3::4].neg_(),
    "pairs of columns": lambda w: (w[:, ::4].neg_(), w[:, 1::4].neg_()),
    "two rows": lambda w: w[:2].neg_(),
    "odd rows": lambda w: w[1::2].neg_(),
    "all": lambda w: w.neg_(),
}


@pytest.mark.parametrize("values", ["random", "equal"])
@pytest.mark.parametrize("shape", [(2, 8), (4, 8), (16, 32), (32, 16), (256, 64), (512, 512), (2**17, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_stamps_see_signs(dtype: torch.dtype, shape: tuple[int, int], values: str) -> None:
    """A sign is a single bit of an integer, so in a plain sum an even number of changes cancels."""
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype) if values == "random" else torch.ones(shape, dtype=dtype)
    assert [name for name, write in SIGNS.items() if not changed(weight, write)] == []


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 9, 12, 15, 17, 31, 33])
def test_stamps_see_the_first_and_the_last_rows_of_narrow_weights(width: int) -> None:
    rows = 9001
    weight = torch.randn(rows, width)
    ends = [*range(9), *range(rows - 9, rows)]
    assert [row for row in ends if not changed(weight, lambda w, row=row: w[row].add_(1))] == []


def test_stamps_see_every_value_that_is_read() -> None:
    small, large = torch.randn(SMALL), torch.randn(LARGE)
    ids = torch.randperm(small.numel())[:200].tolist()
    assert all(changed(small, lambda w, n=n: w.view(-1)[n].add_(1)) for n in ids)
    blocks = [2 * COLUMN * n + offset for n in range(9) for offset in range(2 * BLOCK)]
    assert all(changed(large, lambda w, n=n: w.view(-1)[n].add_(1)) for n in blocks)
    assert not changed(large, lambda w: w.view(-1)[2 * BLOCK].add_(1)), "what the documentation says is not seen"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 9), (30, 7), (64, 65), (300, 800), (2, 20_000), (1000, 64)])
def test_the_stamp_in_cpp_is_the_defined_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    for view in (weight, weight.t(), weight[1:], weight[:, 1:], weight[::2]):
        assert stamp_of(view) == tensor_cache._stamp_of(view)
