"""Dropout, alone and after a ReLU, against ``F.dropout``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.ops import dropout

SMALL_CASE = "test_dropout[cpu-cpu-1x64-dropout-forward]"
SHAPES = {"cpu": [(1, 64), (2048, 512), (2048, 2048)], "cuda": [(16_384, 1024), (16_384, 4096)]}
CASES = [(device, shape) for device, shapes in SHAPES.items() for shape in shapes]
P = 0.1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("relu", [False, True], ids=["dropout", "relu+dropout"])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=[f"{device}-{shape[0]}x{shape[1]}" for device, shape in CASES])
def test_dropout(versus, device, on, shape, relu, backward):
    if on != device:
        pytest.skip(f"a shape for {on}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def make_inputs():
        x, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        return x.requires_grad_(backward), grad_out

    def call(function):
        def run(inputs):
            x, grad_out = inputs
            out = function(x)
            return torch.autograd.grad(out, x, grad_out) if backward else out

        return run

    def check(inputs):
        x = inputs[0].detach().relu() if relu else inputs[0].detach()
        y = dropout(inputs[0].detach(), P, relu=relu)
        kept = y != 0
        assert abs((kept.sum() / x.count_nonzero()).item() - (1 - P)) < 6 * (P * (1 - P) / x.numel()) ** 0.5 + 1e-2
        torch.testing.assert_close(y[kept], x[kept] / (1 - P))

    calls = {
        "ours": call(lambda x: dropout(x, P, relu=relu)),
        "F.dropout": call(lambda x: F.dropout(F.relu(x) if relu else x, P)),
    }
    matrices = 2 + (3 if relu else 2) * backward
    versus(make_inputs, calls, check=check, bytes_moved=matrices * shape[0] * shape[1] * dtype.itemsize)
