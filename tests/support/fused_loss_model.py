"""Language model of one layer, eager and accelerated, for the tests of the fused loss."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast

D, V = 16, 50


class Gpt(nn.Module):
    """Embedding, layer and head, with the loss in forward, as users write it."""

    def __init__(self, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(torch.tanh(self.layer(self.wte(ids))))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **options)


def pair(dtype: torch.dtype = torch.float64, **options: bool) -> tuple[Gpt, Gpt]:
    """Return an eager model and an accelerated copy."""
    eager = Gpt(**options).to(dtype)
    fast = copy.deepcopy(eager)
    report = tfast.accelerate(fast, fused_loss=True)
    assert [row.now for row in report.swapped if row.path == "lm_head"] == ["fused loss"]
    return eager, fast


def batch() -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(0, V, (2, 3, 7))
    targets[0, :3] = -100
    return ids, targets


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(actual: Any, expected: Any, **options: Any) -> None:
    torch.testing.assert_close(actual, expected, **(options or {"rtol": 1e-12, "atol": 1e-14}))


def loss_of(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1), **options)
