"""Texts that accelerate has no form for: the code of vit-pytorch, timm and OpenCLIP is left, and torch's modules inside
it are swapped all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerated import pair, step
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import layers
from transformer_fast.layers import torch_modules
from transformer_fast.layers.dropout import Dropout

D, HEADS, INNER, B, L = 16, 2, 24, 3, 7


class VitFeedForward(nn.Module):
    """vit-pytorch's network, with its norm."""

    def __init__(self, dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class VitAttention(nn.Module):
    """vit-pytorch's attention."""

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm, self.attend, self.dropout = nn.LayerNorm(dim), nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, -1))
        weights = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class VitTransformer(nn.Module):
    """vit-pytorch's stack."""

    def __init__(self, dim: int, depth: int, heads: int, dim_head: int, mlp_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            nn.ModuleList([VitAttention(dim, heads, dim_head, dropout), VitFeedForward(dim, mlp_dim, dropout)])
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attend, network in self.layers:
            x = attend(x) + x
            x = network(x) + x
        return self.norm(x)


class TimmAttention(nn.Module):
    """The attention of timm 0.6."""

    def __init__(self, dim: int, num_heads: int = 8, attn_drop: float = 0.0, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.attn_drop = nn.Linear(dim, 3 * dim), nn.Dropout(attn_drop)
        self.proj, self.proj_drop = nn.Linear(dim, dim), nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.attn_drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(batch, length, dim)))


class TimmMlp(nn.Module):
    """timm's network."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(drop)
        self.fc2, self.drop2 = nn.Linear(hidden, dim), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class TimmScale(nn.Module):
    """timm's factor per feature."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    """timm's block."""

    def __init__(self, dim: int, heads: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), TimmAttention(dim, heads, drop, drop)
        self.ls1, self.drop_path1 = TimmScale(dim), nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(dim), TimmMlp(dim, INNER, drop)
        self.ls2, self.drop_path2 = TimmScale(dim), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ClipBlock(nn.Module):
    """OpenCLIP's block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, INNER), nn.GELU(), nn.Linear(INNER, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


TEXTS: dict[str, Callable[[], nn.Module]] = {
    "vit-pytorch": lambda: VitTransformer(D, 2, HEADS, 6, INNER),
    "timm": lambda: nn.Sequential(*(TimmBlock(D, HEADS) for _ in range(2))),
    "OpenCLIP": lambda: nn.Sequential(*(ClipBlock(D, HEADS) for _ in range(2))),
}
SWAPPED = {
    nn.LayerNorm: torch_modules.LayerNorm,
    nn.Dropout: Dropout,
    nn.MultiheadAttention: torch_modules.MultiheadAttention,
    nn.Linear: layers.Linear,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_without_a_form_is_left_and_its_children_are_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_fast.swap.accelerate.is_faster", lambda weight: True)  # on each processor
    plain, fast, report = pair(TEXTS[name])
    x = torch.randn(B, L, D)
    torch.testing.assert_close(step(fast, x), step(plain, x), atol=2e-5, rtol=2e-5)
    inside = {id(m) for part in plain.modules() if type(part) is nn.MultiheadAttention for m in part.children()}
    for before, after in zip(plain.modules(), fast.modules(), strict=True):
        if id(before) not in inside:
            assert type(after) is SWAPPED.get(type(before), type(before))
    own = {type(part).__name__ for part in plain.modules() if type(part).__module__ == __name__}
    assert own <= {row.was for row in report.left}


def test_the_dropouts_of_a_left_text_drop() -> None:
    torch.manual_seed(0)
    model = TimmBlock(D, HEADS, drop=1.0)
    tfast.accelerate(model)
    x = torch.randn(B, L, D)
    assert torch.equal(model(x), x) and not torch.equal(model.eval()(x), x)
