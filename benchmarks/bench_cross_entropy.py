"""Output layer and label-smoothed loss in one op, against PyTorch's two ops and torch.compile of both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.ops import linear_cross_entropy

try:  # a peer on a GPU, where it is installed
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
except ImportError:
    Liger = None

SMALL_CASE = "test_linear_cross_entropy[cpu-cpu-64x256x8000-forward]"
SHAPES = {"cpu": [(64, 256, 8000), (1024, 512, 8000)], "cuda": [(8_192, 512, 32_000), (16_384, 1024, 32_000)]}
CASES = [(device, shape) for device, shapes in SHAPES.items() for shape in shapes]
OPTIONS = {"label_smoothing": 0.1, "ignore_index": 0}


def separate(x, weight, bias, target):
    return F.cross_entropy(F.linear(x, weight, bias).float(), target, **OPTIONS)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize(
    ("on", "shape"), CASES, ids=[f"{device}-{'x'.join(map(str, shape))}" for device, shape in CASES]
)
def test_linear_cross_entropy(versus, device, on, shape, backward):
    if on != device:
        pytest.skip(f"a shape for {on}")
    rows, d, vocabulary = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def make_inputs():
        shapes = (rows, d), (vocabulary, d), (vocabulary,)
        leaves = [torch.randn(s, device=device, dtype=dtype).requires_grad_(backward) for s in shapes]
        return leaves, torch.randint(1, vocabulary, (rows,), device=device)

    def call(function):
        def run(inputs):
            leaves, target = inputs
            loss = function(*leaves, target)
            return torch.autograd.grad(loss, leaves) if backward else loss

        return run

    def ours(*inputs):
        return linear_cross_entropy(*inputs, **OPTIONS, dtype=torch.float32)

    def check(inputs):
        leaves, target = inputs
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours(*leaves, target), separate(*leaves, target), atol=tolerance, rtol=tolerance)

    def liger(x, weight, bias, target):
        # (x, weight, target, bias, class weights, ignore_index, z-loss scale, label smoothing), as of August 2026
        result = Liger.apply(x, weight, target, bias, None, OPTIONS["ignore_index"], 0.0, OPTIONS["label_smoothing"])
        return result[0] if isinstance(result, tuple) else result  # newer versions return more than the loss

    calls = {"ours": ours, "eager": separate, "compiled": torch.compile(separate)}
    if Liger is not None and device == "cuda":
        calls["Liger"] = liger
    versus(
        make_inputs,
        {name: call(function) for name, function in calls.items()},
        check=check,
        operations=2.0 * rows * d * vocabulary * (3 if backward else 1),
    )
