"""accelerate on RMSNorm: torch's module, hand-written ones, and similar modules that it must leave."""

from __future__ import annotations

from collections.abc import Callable

import handwritten_rms as rms
import pytest
import torch
import torch.nn.functional as F
from accelerated import pair
from torch import Tensor, nn

from transformer_fast.layers import torch_modules

D = 24


@pytest.mark.parametrize(("make", "why"), [
    (lambda: nn.RMSNorm((3, D)), "it normalises 2 dimensions, the kernel only the last one"),
    *[(lambda like=like, eps=eps: like(D, eps), "it has the names of a known module, but computes something else")
      for like in (rms.RMSNormEpsOutside, rms.RMSNormOnePlus) for eps in (1e-8, 1e-5)],
])  # fmt: skip
def test_what_is_left(make: Callable[[], nn.Module], why: str) -> None:
    m, fast, report = pair(make())
    assert [row.why for row in report.left] == [why] and type(fast) is type(m)


class GatedRMSNorm(rms.LlamaRMSNorm):
    """Mamba's norm: of one argument, or of a product of two."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


def test_a_second_argument_is_no_residual() -> None:
    (m, fast, report), (x, gate) = pair(GatedRMSNorm(D)), torch.randn(2, 3, D)
    assert not report.swapped and torch.equal(fast(x, gate), m(x, gate))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("like", [rms.LlamaRMSNorm, rms.T5LayerNorm, rms.ScaledRMSNorm])
def test_mixed_types_have_the_results_that_the_author_gave_them(like: type[nn.Module], dtypes: tuple) -> None:
    m, fast, report = pair(like(D).to(dtypes[1]))
    x, residual = torch.randn(2, 3, D).to(dtypes[0])
    assert report.swapped and fast(x).dtype == m(x).dtype and torch.equal(fast(x), m(x))
    out, summed = fast(x, residual=residual)
    assert torch.equal(summed, residual + x) and torch.equal(out, m(summed))


def test_a_torch_layer_with_rms_norms_takes_its_sums_along(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
    (_, fast, _), x, residuals = pair(layer), torch.randn(2, 5, D), []
    forward = torch_modules.RMSNorm.forward

    def watched(self: nn.Module, x: Tensor, **options: Tensor) -> Tensor:
        residuals.append(options.get("residual") is not None)
        return forward(self, x, **options)

    monkeypatch.setattr(torch_modules.RMSNorm, "forward", watched)
    torch.testing.assert_close(fast(x), layer(x), atol=1e-5, rtol=1e-5)
    assert residuals == [False, True]
