"""The norms and the transposed linear layers of transformers on the fused ops."""

from __future__ import annotations

import copy

import accelerated
import pytest
import torch
from torch import Tensor, nn

from transformer_fast.huggingface import Fast, supported
from transformer_fast.ops.linear import is_faster, products_by
from transformer_fast.testing import assert_as_exact_as_eager

transformers = pytest.importorskip("transformers")
from transformers.models.cohere.modeling_cohere import CohereLayerNorm  # noqa: E402
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm  # noqa: E402
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm  # noqa: E402
from transformers.models.helium.modeling_helium import HeliumRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

pytestmark = pytest.mark.skipif(not supported.has_version(), reason="the table has other versions of transformers")
D = 97
NORMS = [
    LlamaRMSNorm, T5LayerNorm, Olmo2RMSNorm, HeliumRMSNorm, Llama4TextRMSNorm, Gemma4RMSNorm, CohereLayerNorm,
    DebertaLayerNorm,
]  # fmt: skip


def made(kind: type[nn.Module]) -> nn.Module:
    norm = kind(D)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return norm


def step(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    grads = torch.autograd.grad((out * torch.linspace(-1, 1, D, dtype=out.dtype)).sum(), (x, *norm.parameters()))
    return {"out": out.detach(), **dict(zip(("x", "weight", "bias"), grads))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_as_exact_as_transformers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    norm = made(kind).to(dtype)
    plain, fast, report = accelerated.pair(norm)
    assert [row.now for row in report.rows] == [f"huggingface.{type(fast).__bases__[0].__name__}"]
    x = torch.randn(3, 17, D).to(dtype)
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():  # rows as small as eps show where it is added
        for rows in (x, x * 1e-3):
            assert_as_exact_as_eager(fast(rows), plain(rows), exact(rows.double()), ulps=8.0)
    if dtype == torch.float32:
        for name, true in step(exact, x.double()).items():
            ours, theirs = step(fast, x)[name], step(plain, x)[name]
            assert_as_exact_as_eager(ours, theirs, true, ulps=8.0 * 51**0.5, what=name)


@pytest.mark.parametrize("library", ["onednn", "aten"])
def test_linear_layers_of_gpt2(library: str) -> None:
    """GPT-2's linear layers, with a weight (in, out), are swapped if oneDNN is the faster library."""
    conv = transformers.pytorch_utils.Conv1D
    with products_by(library):
        layer, fast, report = accelerated.pair(conv(256, 512))
        faster = is_faster(layer.weight.t())
        assert [row.now for row in report.rows] == ["huggingface.TransposedLinear" if faster else None]
        assert isinstance(fast, Fast) == faster
        x, results = torch.randn(2, 300, 512, requires_grad=True), []
        for m in (fast, layer):
            grads = torch.autograd.grad(m(x).square().sum(), (x, m.weight, m.bias))
            results.append([m(x), *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))
