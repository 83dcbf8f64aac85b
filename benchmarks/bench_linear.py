"""Linear layer on a CPU: ours chooses between PyTorch's two libraries; ``F.linear`` always calls MKL."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.ops import linear

SMALL_CASE = "test_linear[cpu-4x64x64-forward]"
SHAPES = [  # (rows, in, out)
    (4, 64, 64),
    (16, 512, 512),
    (64, 512, 2048),
    (1024, 512, 512),
    (2048, 768, 768),
    (2048, 768, 3072),
    (2048, 3072, 768),
    (2048, 512, 8000),
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("shape", SHAPES, ids=["x".join(map(str, shape)) for shape in SHAPES])
def test_linear(versus, device, shape, backward):
    if device != "cpu":
        pytest.skip("on a GPU it is F.linear itself")
    rows, width, outputs = shape

    def make_inputs():
        x, weight, bias = torch.randn(rows, width), torch.randn(outputs, width), torch.randn(outputs)
        return [t.requires_grad_(backward) for t in (x, weight, bias)], torch.randn(rows, outputs)

    def call(function):
        def run(inputs):
            given, grad_out = inputs
            out = function(*given)
            return torch.autograd.grad(out, given, grad_out) if backward else out

        return run

    def check(inputs):
        for actual, expected in zip(call(linear)(inputs), call(F.linear)(inputs), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)

    operations = 2 * rows * width * outputs * (3 if backward else 1)
    versus(make_inputs, {"ours": call(linear), "F.linear": call(F.linear)}, check=check, operations=operations)
