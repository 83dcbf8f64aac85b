"""Linear layers of few rows with kept copies of their weights, on a CPU: this package's layout and oneDNN's.

A call runs twelve layers, whose weights are together as large as those of a small model.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_fast import extension

SMALL_CASE = "test_kept_linear[cpu-1x512x512-bf16]"
SHAPES = (512, 512), (512, 2048), (2048, 512)
CASES = [(rows, *shape) for rows in (1, 8, 32, 64, 128) for shape in SHAPES]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = 12


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", CASES, ids=["x".join(map(str, case)) for case in CASES])
def test_kept_linear(versus, shape, dtype, device):
    if device != "cpu":
        pytest.skip("a CPU's")
    rows, width, outputs = shape
    torch.manual_seed(0)
    layers = [nn.Linear(width, outputs).to(TYPES[dtype]).requires_grad_(False) for _ in range(LAYERS)]
    made = extension.module().KeptWeight

    def kept(most: int):
        copies = [made(native_rows=most, narrow_rows=most, blocked_rows=rows) for _ in layers]
        return lambda x: [copy.linear(x, layer.weight, layer.bias) for copy, layer in zip(copies, layers)]

    sides = {"ours": kept(rows), "oneDNN, kept": kept(0)}
    sides["F.linear"] = lambda x: [F.linear(x, layer.weight, layer.bias) for layer in layers]

    def check(x: Tensor) -> None:
        for side in sides.values():
            torch.testing.assert_close(side(x)[0], layers[0](x), atol=2e-2, rtol=2e-2)

    versus(lambda: torch.randn(rows, width).to(TYPES[dtype]), sides, check=check)
