"""A weight that changes in place inside an autocast region: PyTorch keeps the copy that it made first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
    "attention": lambda: SelfAttention(),
}


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def region(model: nn.Module, clear: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs before and after all weights change, in one region."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(X)
        for p in model.parameters():
            p.mul_(1.5)
        if clear:
            torch.clear_autocast_cache()
        return before, model(X)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_an_accelerated_model_reads_what_the_plain_one_reads(name: str, training: bool) -> None:
    """Training mode is the oracle: the plain model's fast path in eval takes other copies.

    Weights that no copy is made of are new at once in both: norms, and biases that are added in float32.
    """
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model).swapped
    model.train(training)
    for clear in (False, True):
        for out, expected in zip(region(model, clear), region(plain.train(), clear)):
            torch.testing.assert_close(out.float(), expected.float(), atol=0.1, rtol=0.05)
