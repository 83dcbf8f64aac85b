"""``accelerate(model, quantize="int8")``: wrong inputs, assigned weights, and what the calibration measures."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from linear_models import D, given
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.accelerate import Int8

pytestmark = pytest.mark.skipif(not extension.load(), reason="needs the C++ extension")


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 256)).eval()


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("width", [1, 57, 60, 61, 63, 65, 128])
@torch.no_grad()
def test_an_input_of_another_width_is_an_error(width: int, free: bool) -> None:
    model = made()
    tfast.accelerate(model, quantize=Int8(free=free))
    with pytest.raises(RuntimeError, match=rf"x must be of shape \(\.\.\., 64\), got \(8, {width}\)"):
        model(torch.randn(8, width))


@torch.no_grad()
def test_a_weight_assigned_to_a_freed_layer_is_used() -> None:
    model, other, x = made(), made(1), torch.randn(5, D)
    tfast.accelerate(model, quantize=Int8(free=True))
    model(x)
    model[0].weight, model[0].bias = nn.Parameter(other[0].weight.clone()), other[0].bias
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one.state_dict()["0.weight"], other[0].weight)
    expected = copy.deepcopy(other)
    tfast.accelerate(expected, quantize="int8")
    assert torch.equal(model(x), expected(x))
    model.load_state_dict(made(2).state_dict())
    assert torch.equal(model[0].weight, made(2)[0].weight)
    tfast.accelerate(expected := made(2), quantize="int8")
    assert torch.equal(model(x), expected(x))


@torch.no_grad()
def test_signs_of_columns_are_seen() -> None:
    model, x = made(), torch.ones(4, D)
    tfast.accelerate(model, quantize="int8")
    for columns in (slice(1, 2), slice(1, None, 2), slice(None)):
        before = model(x)
        model[0].weight.data[:, columns].neg_()
        assert (model(x) - before).norm() > 0.1 * before.norm()


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"keep_weights": True}], ids=str)
@torch.no_grad()
def test_parameters_may_be_swapped(options: dict[str, Any]) -> None:
    model, other, x = made(), made(1), torch.randn(5, D)
    tfast.accelerate(model, **options)
    before = model(x)
    model.double()
    assert torch.equal(model.float()(x), before)
    tfast.accelerate(other, **options)
    expected = other(x)
    for mine, theirs in zip(model.parameters(), list(other.parameters()), strict=True):
        torch.utils.swap_tensors(mine, theirs)
    assert torch.equal(model(x), expected) and torch.equal(other(x), before)


class Block(nn.Module):
    """Attention and a linear layer that are called by names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(query=x, key=x, value=x, need_weights=False)[0]
        return self.linear(input=attended)


PRODUCTS = [
    *[("attention", "attention.in_proj_weight", slice(n * D, (n + 1) * D)) for n in range(3)],
    ("attention", "attention.out_proj.weight", slice(None)), ("linear", "linear.weight", slice(None)),
]  # fmt: skip
"""Layer, its weight, and rows of the weight."""


@pytest.mark.parametrize(("layer", "weight", "rows"), PRODUCTS, ids=str)
@torch.no_grad()
def test_every_product_is_calibrated(layer: str, weight: str, rows: slice) -> None:
    """In a product of these rows, one weight per output is so great that the others are rounded to zero."""
    torch.manual_seed(0)
    model, x = Block().eval(), given()
    assert tfast.accelerate(copy.deepcopy(model), quantize=Int8(calibration=x)).int8 == ("attention", "linear")
    model.get_parameter(weight)[rows, 0] *= 3000
    if weight.startswith("attention.in"):
        x[..., 0] = 0
    elif weight.startswith("attention.out"):
        model.attention.in_proj_weight[2 * D] = 0
    else:
        model.attention.out_proj.weight[0] = 0
    report = tfast.accelerate(model, quantize=Int8(calibration=x))
    assert {*report.int8} == {"attention", "linear"} - {layer}


@torch.no_grad()
def test_a_result_that_is_not_finite_stays_in_fp32() -> None:
    model, x = made(), torch.randn(2, D)
    x[0, 0] = float("inf")
    report = tfast.accelerate(model, quantize=Int8(calibration=x))
    assert not report.int8 and "its int8 result is not finite on the calibration batch" in str(report)


@torch.no_grad()
def test_layers_of_other_classes_are_named() -> None:
    config = transformers.GPT2Config(n_embd=D, n_layer=1, n_head=4, vocab_size=99)
    report = tfast.accelerate(transformers.GPT2Model(config).eval(), quantize="int8")
    paths = {row.path for row in report.rows if row.why == "in fp32: it is no plain nn.Linear"}
    assert paths == {f"h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
