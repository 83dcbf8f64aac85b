"""Linear layers for the few rows of a decoding step, against fp64 and PyTorch's linear."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transformer_fast import extension
from transformer_fast.generation.weights import StepFeedForward, concat_linears, prepack
from transformer_fast.inference import prepacked
from transformer_fast.inference.prepacked import PrepackedLinear
from transformer_fast.layers import FeedForward
from transformer_fast.ops.weight_layout import WeightLayout
from transformer_fast.testing import assert_as_exact_as_eager

SHAPES = [(1, 1), (33, 7), (31, 64), (64, 65), (100, 130), (512, 512), (257, 2048)]  # outputs, inputs


def layers(inputs, *outputs, bias=True, seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(inputs, n, bias=bias) for n in outputs]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 23, 24, 25, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_pytorch(shape, rows):
    outputs, inputs = shape
    linears = layers(inputs, outputs, bias=rows % 2 == 0)
    x = torch.randn(rows, 1, inputs)
    [linear] = linears
    bias = None if linear.bias is None else linear.bias.double()
    for relu in (False, True):
        step = PrepackedLinear(linears, rows, relu=relu)
        with torch.inference_mode():
            actual, again = step(x), step(x)
        eager, exact = linear(x), F.linear(x.double(), linear.weight.double(), bias)
        assert_as_exact_as_eager(actual, *((t.relu() if relu else t).detach() for t in (eager, exact)), what="out")
        assert torch.equal(actual, again) and actual.shape == eager.shape


def test_several_side_by_side():
    linears = layers(50, 40, 3, 70)
    for rows in (1, 9, 30):
        x = torch.randn(rows, 50)
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        packed = [prepack(linear, rows) for linear in linears]
        for together in (concat_linears(*packed, rows=rows), concat_linears(*packed)):
            with torch.inference_mode():
                torch.testing.assert_close(together(x), expected)
    # If one has no bias, all are called one by one.
    mixed = [prepack(linear, 2) for linear in (linears[0], *layers(50, 5, bias=False))]
    assert concat_linears(*mixed, rows=2)(x[:2]).shape == (2, 45)


def test_nan_passes_the_relu_and_stays_in_its_row():
    [linear] = layers(20, 9)
    x = torch.randn(3, 20)
    x[1, 4] = torch.nan
    out = PrepackedLinear([linear], 3, relu=True)(x)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_more_rows_than_were_announced():
    [linear] = layers(20, 9)
    step = PrepackedLinear([linear], 2)
    for rows in (2, 600, 30, 1, 0):
        x = torch.randn(rows, 20)
        torch.testing.assert_close(step(x), linear(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_dtype_is_pytorchs(dtype):
    [linear] = layers(20, 9)
    linear.to(dtype)
    x = torch.randn(3, 20, dtype=dtype)
    assert torch.equal(PrepackedLinear([linear], 3)(x), linear(x))
    assert torch.equal(PrepackedLinear([linear], 3, relu=True)(x), linear(x).relu())


def test_autocast_is_pytorchs():
    [linear] = layers(20, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = PrepackedLinear([linear], 3)(torch.randn(3, 20))
    assert out.dtype == torch.bfloat16


def test_feed_forward():
    module = FeedForward(24, 50, 0.3).eval()
    x = torch.randn(3, 1, 24)
    step = prepack(module, 3)
    assert isinstance(step, StepFeedForward)
    torch.testing.assert_close(step(x), module(x))
    module.register_forward_hook(lambda *_: None)
    assert not isinstance(prepack(module, 3), StepFeedForward)  # a hook is called


def test_without_the_extension(monkeypatch):
    [linear] = layers(20, 9)
    x = torch.randn(3, 20)
    monkeypatch.setattr(extension, "load", lambda: False)
    monkeypatch.setattr(prepacked, "_has_onednn", lambda: False)
    assert torch.equal(PrepackedLinear([linear], 3)(x), linear(x))


def test_weights_are_kept_until_one_is_written_to():
    linears = layers(20, 9, 33)
    x = torch.randn(3, 20)

    def expected():
        return torch.cat([linear(x) for linear in linears], dim=-1)

    writes = {
        "none": lambda: None,
        "a step of an optimizer": lambda: torch.optim.SGD(linears[0].parameters(), lr=0.1).step(),
        "a state": lambda: linears[1].load_state_dict(layers(20, 33)[0].state_dict()),
        "other data": lambda: setattr(linears[0].weight, "data", torch.randn(9, 20)),
    }
    for rows in (3, prepacked.FEW_ROWS + 1):
        for what, write in writes.items():
            expected().sum().backward()
            before = PrepackedLinear(linears, rows, WeightLayout(keep=True)).operand(rows)
            write()
            step = PrepackedLinear(linears, rows, WeightLayout(keep=True))
            assert (step.operand(rows) is before) == (what == "none"), what
            torch.testing.assert_close(step(x), expected(), msg=what)


def test_one_copy_is_kept_for_any_number_of_rows():
    linears = layers(20, 9)
    many = range(prepacked.FEW_ROWS + 1, prepacked.COPIED_ROWS, 100)
    assert len({id(PrepackedLinear(linears, rows, WeightLayout(keep=True)).operand(rows)) for rows in many}) == 1


@pytest.mark.parametrize("few", [True, False])
def test_which_product_a_layer_takes(few, monkeypatch):
    """If only few rows are multiplied natively, a layer with more rows keeps oneDNN's copy and no second one."""
    monkeypatch.setattr(prepacked, "NATIVE_ROWS", dict.fromkeys(extension.INSTRUCTION_SETS, 24 if few else 512))
    [linear] = layers(20, 9)
    x = torch.randn(600, 20)
    taken = {}
    for most in (24, 25, 1000):
        step = PrepackedLinear([linear], most)
        for rows in (1, 24, 25, 512, 513):
            operand = step.operand(rows)
            taken[most, rows] = "torch" if operand is None else "onednn" if operand.is_mkldnn else "native"
            torch.testing.assert_close(step(x[:rows]), linear(x[:rows]))
        assert step._packed is None or step._blocked is None or (most, few) == (24, True)
    rest = "onednn" if few else "native"
    for most in (24, 25, 1000):
        first = "native" if most == 24 else rest
        assert [taken[most, rows] for rows in (1, 24, 25, 512, 513)] == [first, first, rest, rest, "torch"]


def test_weights_are_not_kept_unasked():
    [linear] = layers(20, 9)
    assert PrepackedLinear([linear], 3).operand(3) is not PrepackedLinear([linear], 3).operand(3)
    assert not hasattr(linear.weight, "_tensor_cache")
