"""Feed-forward network, and the pass between its two products: bias, ReLU and dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transformer_fast.layers import FeedForward
from transformer_fast.ops import dropout

SMALL_CASE = "test_feed_forward[cpu-cpu-64x128x256-forward]"
# (rows, d_model, d_ff)
SHAPES = {
    "cpu": [(64, 128, 256), (1024, 512, 2048)],
    "cuda": [(4096, 512, 2048), (16_384, 512, 2048), (16_384, 1024, 4096)],
}
CASES = [(device, shape) for device, shapes in SHAPES.items() for shape in shapes]
IDS = [f"{device}-{'x'.join(map(str, shape))}" for device, shape in CASES]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
P = 0.1


def eager(x, first, bias, second, last):
    return F.linear(F.dropout(F.relu(F.linear(x, first, bias)), P), second, last)


def bias_in_the_product(x, first, bias, second, last):
    """Compute the layer as on a CPU: the product adds the bias, and autograd sums its gradient."""
    return F.linear(dropout(F.linear(x, first, bias), P, relu=True), second, last)


def bias_after_the_product(x, first, bias, second, last):
    """Compute the layer as in Triton: one pass adds the bias and applies ReLU and dropout."""
    return F.linear(dropout(F.linear(x, first), P, bias=bias, relu=True), second, last)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=IDS)
def test_feed_forward(versus, device, on, shape, backward):
    if on != device:
        pytest.skip(f"a shape for {on}")
    rows, d_model, d_ff = shape
    module = FeedForward(d_model, d_ff, P).to(device, DTYPES[device])
    weights = [module.linear_1.weight, module.linear_1.bias, module.linear_2.weight, module.linear_2.bias]

    def make_inputs():
        x, grad_out = (torch.randn(rows, d_model, device=device, dtype=DTYPES[device]) for _ in range(2))
        return x.requires_grad_(backward), grad_out

    def call(function):
        def run(inputs):
            x, grad_out = inputs
            with torch.set_grad_enabled(backward):
                out = function(x)
            return torch.autograd.grad(out, [x, *weights], grad_out) if backward else out

        return run

    def check(inputs):
        reference = nn.Sequential(module.linear_1, nn.ReLU(), module.linear_2)
        with torch.no_grad():
            expected, actual = reference(inputs[0]), module.eval()(inputs[0])
        module.train()
        tolerance = 1e-4 if device == "cpu" else 2e-2
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    compiled = torch.compile(eager)
    calls = {
        "ours": call(module),
        "bias in the product": call(lambda x: bias_in_the_product(x, *weights)),
        "bias after the product": call(lambda x: bias_after_the_product(x, *weights)),
        "eager": call(lambda x: eager(x, *weights)),
        "compiled": call(lambda x: compiled(x, *weights)),
    }
    versus(make_inputs, calls, check=check, operations=4.0 * rows * d_model * d_ff * (3 if backward else 1))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=IDS)
def test_bias_relu_dropout(versus, device, on, shape, backward):
    """Time the pass with the gradient of the bias."""
    if on != device:
        pytest.skip(f"a shape for {on}")
    rows, _, d = shape
    dtype = DTYPES[device]

    def make_inputs():
        x, grad_out = (torch.randn(rows, d, device=device, dtype=dtype) for _ in range(2))
        bias = torch.randn(d, device=device, dtype=dtype)
        return x.requires_grad_(backward), bias.requires_grad_(backward), grad_out

    def call(function):
        def run(inputs):
            x, bias, grad_out = inputs
            out = function(x, bias)
            return torch.autograd.grad(out, (x, bias), grad_out) if backward else out

        return run

    def plain(x, bias):
        return F.dropout(F.relu(x + bias), P)

    def check(inputs):
        x, bias, grad_out = (t.detach().requires_grad_() for t in inputs)
        out = dropout(x, P, bias=bias, relu=True)
        active = F.relu(x + bias).detach()
        kept = out > 0
        assert abs((kept.sum() / active.count_nonzero()).item() - (1 - P)) < 6 * (P * (1 - P) / x.numel()) ** 0.5 + 1e-2
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(out[kept], active[kept] / (1 - P), **tolerance)
        _, grad_bias = torch.autograd.grad(out, (x, bias), grad_out)
        expected = torch.where(kept, grad_out / (1 - P), 0.0).sum(0, dtype=torch.float32)
        torch.testing.assert_close(grad_bias.float(), expected, rtol=tolerance["rtol"], atol=1e-2 * rows**0.5)

    calls = {
        "ours": call(lambda x, bias: dropout(x, P, bias=bias, relu=True)),
        "eager": call(plain),
        "compiled": call(torch.compile(plain)),
    }
    versus(make_inputs, calls, check=check, bytes_moved=(2 + 3 * backward) * rows * d * dtype.itemsize)
