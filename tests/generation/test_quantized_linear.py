"""Linear layers with int8 weights equal the reference bit for bit, for any rows, threads and vector unit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_calls import on_threads
from torch import Tensor, nn

from transformer_fast.generation.weights import StepFeedForward, concat_linears, prepack
from transformer_fast.inference import prepacked
from transformer_fast.inference.prepacked import PrepackedLinear
from transformer_fast.layers import FeedForward
from transformer_fast.layers.feed_forward import ACTIVATIONS
from transformer_fast.ops.weight_layout import WeightLayout
from transformer_fast.reference.quantized_linear import gelu, int8_linear, quantize_rows
from transformer_fast.testing import assert_as_exact_as_eager

SHAPES = [(1, 1), (33, 7), (31, 64), (64, 65), (100, 130), (512, 512), (257, 2048)]  # outputs, inputs


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def computed(linear: nn.Linear, x: Tensor, relu: bool = False) -> Tensor:
    with torch.inference_mode():
        return PrepackedLinear([linear], 1, WeightLayout("int8"), relu=relu)(x)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 11, 12, 13, 25, 400])  # around the rows of a sum, and of a task
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bit_for_bit_the_reference(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(shape[1], shape[0], bias=rows % 2 == 0)
    x = torch.randn(rows, 1, shape[1]) * 10.0 ** torch.randint(-3, 4, (rows, 1, 1))
    expected = int8_linear(x, linear.weight, linear.bias)
    for relu in (False, True):
        assert torch.equal(computed(linear, x, relu), expected.relu() if relu else expected)


ACTIVATED = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
}


@pytest.mark.parametrize("rows", [1, 13, 600])  # a result of 600 rows and 2,048 columns bypasses the caches
@pytest.mark.parametrize("outputs", [37, 2048])
@pytest.mark.parametrize("activation", ACTIVATED)
def test_bit_for_bit_the_activation(activation: str, outputs: int, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 40) * 3, torch.randn(outputs, 40), torch.randn(outputs)
    op = torch.ops.transformer_fast
    packed = op.pack_weight([weight], True)
    expected = ACTIVATED[activation](int8_linear(x, weight, bias))
    for threads in (1, 3):
        with on_threads(threads):
            assert torch.equal(op.packed_linear(x, packed, bias, outputs, activation), expected)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_as_exact_as_eager(approximate: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 100_001), torch.tensor([0.0, 1e-30, -1e-30, torch.inf, -torch.inf])])
    own, exact = gelu(x, approximate), F.gelu(x.double(), approximate=approximate)
    assert own[-2] == torch.inf and (own[-1].isnan() or own[-1] == 0)
    assert_as_exact_as_eager(own[:-2], F.gelu(x[:-2], approximate=approximate), exact[:-2])


def test_unknown_activation() -> None:
    op = torch.ops.transformer_fast
    weight = torch.randn(8, 8)
    with pytest.raises(ValueError, match="activation must be none, relu, gelu or gelu_tanh, got silu"):
        op.packed_linear(weight, op.pack_weight([weight], True), None, 8, "silu")
    with pytest.raises(ValueError, match="activation must be none or relu for weights in float, got gelu"):
        op.packed_linear(weight, op.pack_weight([weight], False), None, 8, "gelu")


def test_the_reference_is_as_near_as_its_scales_allow() -> None:
    """Each factor is rounded by at most half a step of its scale."""
    torch.manual_seed(0)
    x, weight = torch.randn(20, 300), torch.randn(40, 300)
    (_, of_x), (_, of_weight) = quantize_rows(x), quantize_rows(weight)
    exact = F.linear(x.double(), weight.double())
    bound = F.linear(x.abs(), 0.51 * of_weight[:, None].expand(40, 300)) + F.linear(
        0.51 * of_x[:, None].expand(20, 300), weight.abs() + of_weight[:, None]
    )
    error = (int8_linear(x, weight) - exact).abs()
    assert (error <= bound).all() and error.max() > bound.max() / 1000


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)], ids=str)
def test_nothing_is_saturated(signs: tuple[int, int]) -> None:
    """Use the largest possible products, as many as 32 bits must hold, in one output of two."""
    inputs = prepacked.INT8_INPUTS
    weight = torch.full((2, inputs), float(signs[1]))
    weight[1, 1::2] *= -1
    x = torch.full((1, inputs), float(signs[0]))
    out = computed(linear_of(weight), x)
    assert torch.equal(out, int8_linear(x, weight))
    assert out[0, 0] == pytest.approx(signs[0] * signs[1] * inputs, rel=1e-6) and out[0, 1] == 0


def test_rounding_is_to_even() -> None:
    steps = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    out = computed(linear_of(torch.eye(8)), steps[None])[0]
    assert out.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_one_row_at_a_time_and_any_number_of_threads() -> None:
    torch.manual_seed(0)
    step = PrepackedLinear([nn.Linear(130, 70)], 1, WeightLayout("int8"))
    x = torch.randn(450, 130)
    for count in (1, 2, 3):
        with on_threads(count):
            whole = step(x)
            assert torch.equal(whole, torch.cat([step(row[None]) for row in x]))
            assert torch.equal(whole, int8_linear(x, step.weight, step.bias))


def test_what_is_not_finite_stays_in_its_row_and_output() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(6, 20), torch.randn(9, 20), torch.randn(9)
    x[1, 4], x[3, 19], x[4], x[5] = torch.nan, -torch.inf, 0, 1e-39  # a 127th of it underflows to 0
    weight[2, 0], weight[7, 3], weight[8] = torch.inf, torch.nan, 0
    out, expected = computed(linear_of(weight, bias), x, relu=True), int8_linear(x, weight, bias).relu()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    where = torch.zeros(6, 9, dtype=torch.bool)
    where[[1, 3]] = where[:, [2, 7]] = True
    assert torch.equal(out.isnan(), where)
    assert torch.equal(out[4:][~where[4:]], bias.relu().expand(2, 9)[~where[4:]])


def test_several_side_by_side() -> None:
    torch.manual_seed(0)
    linears, x = [nn.Linear(50, outputs) for outputs in (40, 3, 70)], torch.randn(9, 50)
    packed = [prepack(linear, 9, WeightLayout("int8")) for linear in linears]
    together = concat_linears(*packed, rows=9)
    assert isinstance(together, PrepackedLinear) and together.is_int8
    assert torch.equal(together(x), torch.cat([linear(x) for linear in packed], dim=-1))
    mixed = concat_linears(packed[0], prepack(linears[1], 9))  # one is quantised, the other is not
    assert torch.equal(mixed(x)[:, :40], packed[0](x))


def test_weights_at_any_strides() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(30, 40), torch.randn(3, 40)
    assert torch.equal(computed(linear_of(weight.T.contiguous().T), x), int8_linear(x, weight))
    assert torch.equal(computed(linear_of(weight), x.T.contiguous().T), int8_linear(x, weight))


def test_feed_forward() -> None:
    torch.manual_seed(0)
    for activation in ("relu", "gelu"):
        module, x = FeedForward(24, 50, 0.3, activation).eval(), torch.randn(3, 1, 24)
        step = prepack(module, 3, WeightLayout("int8"))
        assert isinstance(step, StepFeedForward) and step.linear_2.is_int8
        inner = ACTIVATIONS[activation](int8_linear(x, module.linear_1.weight, module.linear_1.bias))
        assert torch.equal(step(x), int8_linear(inner, module.linear_2.weight, module.linear_2.bias))


def test_sums_that_32_bits_do_not_hold_are_left_in_fp32() -> None:
    with torch.device("meta"):
        assert prepack(nn.Linear(prepacked.INT8_INPUTS, 1), 1, WeightLayout("int8")).is_int8
        assert not prepack(nn.Linear(prepacked.INT8_INPUTS + 1, 1), 1, WeightLayout("int8")).is_int8
