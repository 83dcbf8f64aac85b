"""Models with linear layers, for the tests of kept weights and of int8 weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast

D = 64


class Network(nn.Module):
    """Linear layers that author's code calls: one without a bias, and a head with few outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, 96), nn.Linear(96, D, bias=False), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(F.gelu(self.first(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "author's code": Network,
    "encoder layer": lambda: nn.TransformerEncoderLayer(D, 4, 96, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 96, activation="gelu"), 2),
    "our layer": lambda: tfast.layers.EncoderLayer(D, 4),
}


def made(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return the model of a name in evaluation mode, with the weights of a seed."""
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype).eval()


def given(dtype: torch.dtype = torch.float32, rows: int = 7, batch: int = 3) -> Tensor:
    """Return hidden states (batch, rows, D)."""
    return torch.randn(batch, rows, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def call(model: nn.Module, x: Tensor | None = None) -> Tensor:
    """Return the result of a model, of the same hidden states unless others are given."""
    x = given() if x is None else x
    return model(x, None) if isinstance(model, tfast.layers.EncoderLayer) else model(x)
