"""Queries whose keys are all blocked, in graphs of ONNX and OpenVINO: runtimes give the number of the eager call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

ROWS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda q, k, v, m: tfast.attention(q, k, v, tfast.AttentionMask.keep(m)),
    "zero": lambda q, k, v, m: tfast.attention(q, k, v, tfast.AttentionMask.keep(m), empty_rows="zero"),
    "sdpa": tfast.scaled_dot_product_attention,
}
OPSETS = 18, 23


class Calling(nn.Module):
    """Module that calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def exported(model: nn.Module, args: tuple[Tensor, ...], path: Path, opset: int) -> dict[str, Tensor]:
    """Return the output of each runtime for the graph of an opset."""
    onnxruntime = pytest.importorskip("onnxruntime")
    reference = pytest.importorskip("onnx.reference")
    names = [f"in{place}" for place in range(len(args))]
    torch.onnx.export(model, args, path, input_names=names, dynamo=True, opset_version=opset)
    feed = {name: t.numpy() for name, t in zip(names, args)}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    runs = {"onnxruntime": session.run, "onnx.reference": reference.ReferenceEvaluator(str(path)).run}
    return {name: torch.from_numpy(run(None, feed)[0]) for name, run in runs.items()}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [torch.bool, torch.float])
def test_in_graphs_of_onnx(kind: torch.dtype, rows: str, opset: int, tmp_path: Path) -> None:
    if kind == torch.float and rows != "sdpa":
        pytest.skip("a keep mask is bool")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    mask = keep if kind == torch.bool else torch.zeros(4, 4).masked_fill(~keep, float("-inf"))
    args = q, k, v, mask
    expected = ROWS[rows](*args)
    for runtime, out in exported(Calling(ROWS[rows]), args, tmp_path / "rows.onnx", opset).items():
        torch.testing.assert_close(
            out, expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=runtime: f"{name}: {text}"
        )


@pytest.mark.parametrize("opset", OPSETS)
def test_two_masks_of_float16_whose_sum_is_not_finite(opset: int, tmp_path: Path) -> None:
    """PyTorch's own graph of opset 18 gives the row a number of no meaning."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8).half()
    mask = torch.zeros(4, 4).half()
    mask[2] = torch.finfo(torch.float16).min
    model = Calling(lambda q, k, v, m, n: tfast.scaled_dot_product_attention(q, k, v, m + n))
    for out in exported(model, (q, k, v, mask, mask), tmp_path / "half.onnx", opset).values():
        assert not out[:, :, 2].any()
        torch.testing.assert_close(out, model(q, k, v, mask, mask), atol=2e-3, rtol=2e-3)


class Padded(nn.Module):
    """Encoder layer whose mask is its second argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        tfast.accelerate(self.layer)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=blocked)


def padded() -> tuple[Tensor, Tensor]:
    """Return a batch with a sentence of padding alone, and its mask."""
    torch.manual_seed(1)
    return torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([3, 0, 5])[:, None]


@pytest.mark.parametrize("opset", OPSETS)
def test_an_encoder_layer_in_graphs_of_onnx(opset: int, tmp_path: Path) -> None:
    """The plain layer gives NaN to the empty sentence, and does not run in onnxruntime at opset 23."""
    model = Padded()
    with torch.no_grad():
        expected = model(*padded())
    assert not expected.isnan().any()
    for out in exported(model, padded(), tmp_path / "layer.onnx", opset).values():
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_in_openvino(rows: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    args = q, k, v, keep
    program = torch.export.export(Calling(ROWS[rows]), args).run_decompositions(tfast.decompositions())
    converted = openvino.convert_model(program)
    path = tmp_path / "rows.xml"
    openvino.save_model(converted, path)  # stores float16: -inf becomes -65504, and NaN 65504
    for model in (converted, path):
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        out = torch.from_numpy(compiled([t.numpy() for t in args])[0])
        torch.testing.assert_close(out, ROWS[rows](*args), atol=1e-5, rtol=1e-5)
