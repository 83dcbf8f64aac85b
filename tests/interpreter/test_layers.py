"""Public functions, autograd and layers on the Triton kernels, against the reference backend."""

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.mark.cover("values")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", ["std", "layer", "rms"])
def test_a_training_step_of_the_transformer(norm_first, norm, device):
    """With one seed and equal dropout masks, Triton and the fp64 reference agree in the loss and in every gradient."""
    torch.manual_seed(0)
    model = layers.Transformer(13, 13, 16, 1, 2, 0.1, d_ff=24, norm_first=norm_first, norm=norm, tie_weights=True)
    model.to(device).train()
    src, trg = (torch.randint(0, 13, (2, L), device=device) for L in (7, 5))
    src_mask, trg_mask = AttentionMask.lengths(torch.tensor([7, 3], device=device)), AttentionMask.causal()

    def step(backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model.to(dtype).zero_grad()
        torch.manual_seed(3)
        with tfast.backend(backend):
            logits = model(src, trg, src_mask, trg_mask)
            logits.square().mean().backward()
        return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    exact = step("reference", torch.float64)
    eager = step("reference", torch.float32)
    actual = step("triton", torch.float32)
    largest = max(float(x.abs().max()) for x in exact.values())
    for name, x in exact.items():
        ulps = 8 * max(1.0, largest / max(float(x.abs().max()), 1e-30))
        assert_as_exact_as_eager(actual[name], eager[name], x, what=name, ulps=ulps)
