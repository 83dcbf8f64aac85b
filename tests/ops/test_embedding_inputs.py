"""What the embedding line refuses: ids outside the vocabulary, and inputs that do not fit, each by its name."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers import fixed_seed

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.ops.embedding import add_positional, embed, positional_table

pytestmark = pytest.mark.skipif(not extension.load(), reason=extension.status())


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad: int) -> None:
    ids = torch.zeros(2, 3, 4, dtype=torch.long)
    ids[1, 0, 2] = ids[1, 2, 3] = bad
    expected = rf"ids\[1, 0, 2\] is {bad}, but the vocabulary has 7 rows"
    with pytest.raises(IndexError, match=expected):
        embed(ids, torch.randn(7, 5))
    with pytest.raises(IndexError, match=expected):
        torch.ops.transformer_fast.embed_backward(torch.zeros(2, 3, 4, 5), ids, 7, 1.0, None, 0.0, None, True)


IDS, W, T = torch.zeros(2, 3, dtype=torch.long), torch.zeros(4, 6), torch.zeros(5, 6)
X = torch.zeros(2, 3, 6)
BAD_INPUT = {
    "ids no tensor": (lambda: embed([1, 2], W), TypeError, "ids must be a tensor, got list"),
    "ids float": (lambda: embed(IDS.float(), W), TypeError, "ids must be int64 or int32, got torch.float32"),
    "ids int16": (lambda: embed(IDS.short(), W), TypeError, "ids must be int64 or int32, got torch.int16"),
    "weight int": (lambda: embed(IDS, W.long()), TypeError, "weight must be a float tensor"),
    "weight 3-D": (lambda: embed(IDS, W[None]), ValueError, r"weight must be \(vocabulary, d\).*\(1, 4, 6\)"),
    "devices": (lambda: embed(IDS, W.to("meta")), ValueError, "weight is on meta but ids on cpu"),
    "table device": (lambda: embed(IDS, W, T.to("meta")), ValueError, "weight is on cpu but table on meta"),
    "table width": (lambda: embed(IDS, W, T[:, :5]), ValueError, r"d = 6 of weight, got shape \(5, 5\)"),
    "table 3-D": (lambda: embed(IDS, W, T[None]), ValueError, r"got shape \(1, 5, 6\)"),
    "table short": (
        lambda: embed(IDS, W, T, offset=3),
        ValueError,
        "offset 3 .* length 3 needs 6 positions, it has 5",
    ),
    "table dtype": (lambda: embed(IDS, W, T.half()), TypeError, "table must be float32 .*got torch.float16"),
    "table list": (lambda: embed(IDS, W, [1]), TypeError, "table must be a tensor, got list"),
    "offset": (lambda: embed(IDS, W, T, offset=-1), ValueError, "offset must be at least 0, got -1"),
    "offset float": (
        lambda: embed(IDS, W, T, offset=torch.zeros(2)),
        TypeError,
        "must be int64 or int32, got torch.float32",
    ),
    "offset shape": (
        lambda: embed(IDS, W, T, offset=torch.zeros(3, dtype=torch.long)),
        ValueError,
        r"one number for each sequence, \(2,\) for ids \(2, 3\), got shape \(3,\)",
    ),
    "offset device": (
        lambda: embed(IDS, W, T, offset=torch.zeros(2, dtype=torch.long, device="meta")),
        ValueError,
        "ids is on cpu but offset on meta",
    ),
    "offset past the table": (
        lambda: embed(IDS, W, T, offset=torch.tensor([2, 3])),
        IndexError,
        "offset 3 of sequence 1: positions 3 to 5 are not all in the table of 5",
    ),
    "offset before the table": (
        lambda: add_positional(X, T, torch.tensor([-1, 0])),
        IndexError,
        "offset -1 of sequence 0",
    ),
    "p": (lambda: embed(IDS, W, dropout_p=1.5), ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
    "p nan": (lambda: embed(IDS, W, dropout_p=float("nan")), ValueError, "dropout_p must lie"),
    "padding": (lambda: embed(IDS, W, padding_idx=4), ValueError, r"padding_idx must lie in \[-4, 4\).*got 4"),
    "x int": (lambda: add_positional(IDS, T), TypeError, "x must be a float tensor"),
    "x 1-D": (lambda: add_positional(X[0, 0], T), ValueError, r"x must be \(..., length, d\)"),
    "x list": (lambda: add_positional([1.0], T), TypeError, "x must be a tensor, got list"),
    "x table short": (lambda: add_positional(X, T, 4), ValueError, "offset 4 .* length 3 needs 7 positions, it has 5"),
    "x p": (lambda: add_positional(X, T, 0, -0.1), ValueError, "dropout_p must lie"),
    "length": (lambda: positional_table(-1, 4), ValueError, "length >= 0"),
    "d_model": (lambda: positional_table(4, 0), ValueError, "d_model >= 1"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gives_one_clear_error(name: str) -> None:
    call, error, message = BAD_INPUT[name]
    with pytest.raises(error, match=message):
        call()


def test_bad_direct_calls_of_the_native_ops_are_refused_too() -> None:
    native = torch.ops.transformer_fast
    with pytest.raises(ValueError, match="table: expected at least"):
        native.embed(IDS, W, T[:2], 1.0, 0, None, None, 0.0, None, True)
    with pytest.raises(ValueError, match="offsets: expected an int64 or int32 for each of 2 sequences"):
        native.embed(
            IDS, W, None, 1.0, 0, IDS[:1, :1], None, 0.0, None, True
        )  # a kernel reads them with or without a table
    with pytest.raises(ValueError, match="seed"):
        native.add_positional(X, None, 0, None, 0.5, None)
    with pytest.raises(ValueError, match="grad_out"):
        native.embed_backward(X[:1], IDS, 4, 1.0, None, 0.0, None, True)


def test_one_id_without_a_dimension_gives_one_row(device: torch.device) -> None:
    weight, table = torch.randn(5, 6, device=device, requires_grad=True), torch.randn(4, 6, device=device)
    one, two = torch.tensor(3, device=device), torch.tensor(2, device=device)
    row, options = torch.tensor([3], device=device), {"scale": 2.0, "padding_idx": 1}
    assert torch.equal(embed(one, weight), torch.nn.functional.embedding(one, weight))
    assert torch.equal(
        embed(one, weight, table, offset=two, **options)[None], embed(row, weight, table, offset=2, **options)
    )
    with fixed_seed(5):
        dropped = embed(one, weight, dropout_p=0.5)
        assert torch.equal(dropped[None], embed(row, weight, dropout_p=0.5))
    (grad,) = torch.autograd.grad(embed(one.int(), weight).sum(), weight)
    assert torch.equal(grad.sum(1), torch.tensor([0.0, 0, 0, 6, 0], device=device))
    with pytest.raises(IndexError, match=r"is 5, .*0 <= id < 5") if device.type == "cpu" else contextlib.nullcontext():
        embed(torch.tensor(5, device=device), weight)
    with tfast.backend("reference"):
        assert embed(one, weight).shape == (6,)
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(weight.detach()))
    assert tfast.accelerate(model).swapped
    assert torch.equal(model(one), weight[3])
    compiled = torch.compile(embed, fullgraph=True, backend="eager")
    assert torch.equal(compiled(one, weight), weight[3])
