"""A tied table in a graph of ONNX: how often it is stored, and what multiplies after quantize_dynamic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

onnx = pytest.importorskip("onnx")
quantization = pytest.importorskip("onnxruntime.quantization")
V, D = 4000, 32


class Tied(nn.Module):
    """Embedding and output layer of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.table(ids)))


def quantised(graph: Path, **options: Any) -> set[str]:
    """Return the names of the operators after quantize_dynamic."""
    written = graph.with_suffix(".int8.onnx")
    quantization.quantize_dynamic(graph, written, **options)
    return {node.op_type for node in onnx.load(written).graph.node}


@pytest.mark.parametrize("newer", [True, False])
def test_an_accelerated_model_is_stored_as_the_plain_one(newer: bool, tmp_path: Path) -> None:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain, fast = Tied().eval(), Tied().eval()
    assert tfast.accelerate(fast).swapped
    for model in (plain, fast):
        path, folded = tmp_path / "tied.onnx", tmp_path / "folded.onnx"
        torch.onnx.export(model, (torch.tensor([[1, 2, 3]]),), path, dynamo=newer, external_data=False)
        assert round(path.stat().st_size / (4 * V * D)) == (1 if newer else 2)
        assert ("MatMulInteger" in quantised(path)) != newer
        quant_pre_process(path, folded)
        assert "MatMulInteger" in quantised(folded)
