"""Blocks of vision models as users write them: attention and a network, each added to its input."""

from __future__ import annotations

import torch
from form_arguments import ONE, D, Forms
from handwritten_vision import QkvProj
from torch import Tensor, nn


class Scale(nn.Module):
    """A factor per feature on the output of a branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """The network of a vision transformer, with dropouts that are usually 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        self.drop1, self.drop2 = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class PreNorm(nn.Module):
    """Pre-norm block without dropout of its own, with a scale on each branch or without."""

    def __init__(self, dim: int, heads: int, *, scales: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            QkvProj(dim, heads),
            nn.LayerNorm(dim),
            Mlp(dim),
        )
        self.ls1, self.ls2 = (Scale(dim) if scales else nn.Identity() for _ in range(2))
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class OneDropPath(nn.Module):
    """Pre-norm block whose branches share one module for stochastic depth."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            QkvProj(dim, heads),
            nn.LayerNorm(dim),
            Mlp(dim),
        )
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


FORMS: Forms = {
    "pre-norm block": (lambda: PreNorm(D, 2), ONE),
    "pre-norm block with scales": (lambda: PreNorm(D, 2, scales=True), ONE),
    "pre-norm block with one drop_path": (lambda: OneDropPath(D, 2), ONE),
}
