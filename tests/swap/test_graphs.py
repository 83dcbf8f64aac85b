"""Graphs of accelerated models and of plain ones, as docs/export.md says.

Padded positions of ``nn.TransformerEncoder`` are zeros in eager evaluation and in a trace, and in other graphs what was
computed there. A tied table is stored by ONNX as that of the plain model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerated import pair
from torch import Tensor, nn

D = 16
GRAPHS = (
    *("compiled", "exported", "traced"),
    pytest.param("ONNX", marks=pytest.mark.slow("the exporter works for seconds")),
)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


class Padded(nn.Module):
    """An encoder with its padding mask by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        return self.model(x, src_key_padding_mask=blocked)


def through(way: str, model: nn.Module, given: tuple[Tensor, Tensor], path: Path) -> Tensor:
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(model, backend="eager")(*given)
    if way == "exported":
        return torch.export.export(model, given).module()(*given)
    if way == "traced":
        return torch.jit.trace(model, given, check_trace=False)(*given)
    if way == "ONNX":
        pytest.importorskip("onnxscript")
        onnxruntime = pytest.importorskip("onnxruntime")
        options = {"dynamo": True, "input_names": ["x", "blocked"], "verbose": False}
        torch.onnx.export(model, given, path, **options)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"x": given[0].numpy(), "blocked": given[1].numpy()})[0])
    return model(*given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["eager", *GRAPHS])
@pytest.mark.parametrize("accelerated", [False, True])
def test_padding_is_zero_in_eager_evaluation_alone(accelerated: bool, way: str, tmp_path: Path) -> None:
    plain, fast, report = pair(encoder)
    model = fast if accelerated else plain
    assert report.swapped
    x, blocked = torch.randn(3, 7, D), torch.arange(7) >= torch.tensor([[7], [4], [2]])
    with torch.no_grad():
        expected = plain(x, src_key_padding_mask=blocked)
        out = through(way, Padded(model), (x, blocked), tmp_path / "encoder.onnx")
    assert torch.all(expected[blocked] == 0.0)
    torch.testing.assert_close(out[~blocked], expected[~blocked], atol=1e-5, rtol=1e-5)
    if way in ("eager", "traced"):
        assert torch.all(out[blocked] == 0.0)
    else:
        assert torch.all(out[blocked].abs().amax(-1) > 0.1), f"{way}: padding is zero, other than the pages say"


V = 4000


class Tied(nn.Module):
    """Embedding and output layer of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.table(ids)))


@pytest.mark.parametrize("newer", [True, False])
def test_a_tied_table_is_stored_as_that_of_the_plain_model(newer: bool, tmp_path: Path) -> None:
    onnx, quantization = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime.quantization")
    from onnxruntime.quantization.shape_inference import quant_pre_process

    def quantised(graph: Path) -> set[str]:
        written = graph.with_suffix(".int8.onnx")
        quantization.quantize_dynamic(graph, written)
        return {node.op_type for node in onnx.load(written).graph.node}

    plain, fast, report = pair(lambda: Tied().eval())
    assert report.swapped
    for model in (plain, fast):
        path, folded = tmp_path / "tied.onnx", tmp_path / "folded.onnx"
        torch.onnx.export(model, (torch.tensor([[1, 2, 3]]),), path, dynamo=newer, external_data=False)
        assert round(path.stat().st_size / (4 * V * D)) == (1 if newer else 2)
        assert ("MatMulInteger" in quantised(path)) != newer
        quant_pre_process(path, folded)
        assert "MatMulInteger" in quantised(folded)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_scripted_after_undo() -> None:
    plain, fast, report = pair(lambda: nn.Sequential(nn.LayerNorm(D)))
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only"):
        torch.jit.script(fast)
    report.undo()
    x = torch.randn(3, 5, D)
    torch.testing.assert_close(torch.jit.script(fast)(x), plain(x), rtol=0, atol=0)
