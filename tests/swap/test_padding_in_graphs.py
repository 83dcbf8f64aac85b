"""Padded positions of ``nn.TransformerEncoder``: zeros in eager evaluation, in graphs what was computed there.

docs/export.md and docs/accelerate.md say so, of PyTorch's encoder and of the accelerated one. A trace by
torch.jit has zeros: an accelerated encoder is traced as PyTorch's own.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

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
    plain = encoder()
    model = copy.deepcopy(plain)
    if accelerated:
        assert tfast.accelerate(model).swapped
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
