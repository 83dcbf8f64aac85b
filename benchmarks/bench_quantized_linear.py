"""Linear layers with int8 weights on a CPU: ours against PyTorch's int8 product (oneDNN) and the fp32 layer.

Ours and the int8 product begin with x in fp32 and end with the same numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_fast.inference.prepacked import PrepackedLinear
from transformer_fast.ops.weight_layout import WeightLayout
from transformer_fast.reference.quantized_linear import quantize_rows

SMALL_CASE = "test_int8_linear[cpu-1x512x2048]"
SHAPES = [  # (rows, in, out)
    (1, 512, 2048),
    (1, 2048, 512),
    (1, 512, 8000),
    (5, 512, 2048),
    (16, 512, 2048),
    (80, 512, 2048),
    (80, 512, 8000),
    (1024, 512, 2048),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["x".join(map(str, shape)) for shape in SHAPES])
def test_int8_linear(versus, device, shape):
    if device != "cpu":
        pytest.skip("a CPU's")
    rows, width, outputs = shape
    torch.manual_seed(0)
    linear = nn.Linear(width, outputs)
    with torch.no_grad():
        weight, scale = quantize_rows(linear.weight)
    weight = weight.t()

    def int8_product(x: Tensor) -> Tensor:
        q, of_row = quantize_rows(x)
        return torch._int_mm(q, weight) * (of_row[:, None] * scale) + linear.bias

    sides = {
        "ours": PrepackedLinear([linear], rows, WeightLayout("int8")),
        "oneDNN int8": int8_product,
        "ours fp32": PrepackedLinear([linear], rows),
        "F.linear": lambda x: F.linear(x, linear.weight, linear.bias),
    }

    def check(x: Tensor) -> None:
        assert torch.equal(sides["ours"](x), sides["oneDNN int8"](x))

    with torch.inference_mode():
        versus(lambda: torch.randn(rows, width), sides, check=check, operations=2 * rows * width * outputs)
