"""accelerate on RMSNorm: torch's, and hand-written ones that look alike and are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import handwritten_rms as rms
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager
from sdpa_models import GptNorm
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers import torch_modules

D = 24


def outcome(m: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = m(x)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x] if weight is None else [x, weight], weights)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-2}, {"elementwise_affine": False}], ids=str)
def test_torch_s_rms_norm(options: dict[str, object], dtype: torch.dtype) -> None:
    m = nn.RMSNorm(D, **options).to(dtype)
    if m.weight is not None:
        nn.init.uniform_(m.weight, 0.5, 1.5)
    fast, exact, x = copy.deepcopy(m), copy.deepcopy(m).double(), (1e-2 * torch.randn(3, 7, D)).to(dtype)
    if m.eps is None and dtype != torch.float64:
        exact.eps = torch.finfo(torch.float32).eps  # torch's choice follows the dtype of the statistics
    assert tfast.accelerate(fast).swapped and type(fast) is torch_modules.RMSNorm
    assert list(fast.state_dict()) == list(m.state_dict()) and repr(fast) == repr(m)
    runs = outcome(fast, x, fast.weight), outcome(m, x, m.weight), outcome(exact, x.double(), exact.weight)
    for ours, theirs, true in zip(*runs, strict=True):
        assert ours.dtype == theirs.dtype
        assert_as_exact_as_eager(ours, theirs, true, ulps=4.0 * 21**0.5)


def test_several_dimensions_are_left() -> None:
    report = tfast.accelerate(nn.RMSNorm((3, D)))
    assert [row.why for row in report.left] == ["it normalises 2 dimensions, the kernel the last one"]


@pytest.mark.parametrize("like", [rms.RMSNormEpsOutside, rms.RMSNormOnePlus])
@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_other_formulas_of_these_names_are_left(like: type[nn.Module], eps: float) -> None:
    m = like(D, eps)
    assert [row.why for row in tfast.accelerate(m).left] == ["its names are known, but it computes something else"]
    assert type(m) is like


class GatedRMSNorm(rms.LlamaRMSNorm):
    """Mamba's: the norm of one argument, and of a product of two."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


class GatedLayerNorm(GptNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


@pytest.mark.parametrize("make", [lambda: GatedRMSNorm(D), lambda: GatedLayerNorm(D, bias=True)])
def test_a_second_argument_is_no_residual(make: Callable[[], nn.Module]) -> None:
    m, (x, gate) = make(), torch.randn(2, 3, D)
    fast = copy.deepcopy(m)
    assert not tfast.accelerate(fast).swapped
    assert torch.equal(fast(x, gate), m(x, gate))


@pytest.mark.parametrize("like", [rms.LlamaRMSNorm, rms.T5LayerNorm, rms.ScaledRMSNorm])
def test_mixed_types_have_the_results_that_the_author_gave_them(like: type[nn.Module]) -> None:
    for x_dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        m, x = like(D).to(weight_dtype), torch.randn(3, D).to(x_dtype)
        fast = copy.deepcopy(m)
        assert tfast.accelerate(fast).swapped
        assert fast(x).dtype == m(x).dtype and torch.equal(fast(x), m(x))
        residual = torch.randn(3, D).to(x_dtype)
        out, summed = fast(x, residual=residual)
        assert torch.equal(summed, residual + x) and torch.equal(out, m(summed))


def test_a_torch_layer_with_rms_norms_takes_its_sums_along(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
    fast, x = copy.deepcopy(layer), torch.randn(2, 5, D)
    tfast.accelerate(fast)
    residuals = []
    forward = torch_modules.RMSNorm.forward

    def watched(self: nn.Module, x: Tensor, **options: Tensor) -> Tensor:
        residuals.append(options.get("residual") is not None)
        return forward(self, x, **options)

    monkeypatch.setattr(torch_modules.RMSNorm, "forward", watched)
    torch.testing.assert_close(fast(x), layer(x), atol=1e-5, rtol=1e-5)
    assert residuals == [False, True]
