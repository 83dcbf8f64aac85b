"""Attention of vision models as users write it: one linear layer for queries, keys and values, or two."""

from __future__ import annotations

import torch
from form_arguments import ONE, B, D, Forms, S, keep, x
from torch import Tensor, nn


def in_heads(t: Tensor, heads: int) -> Tensor:
    """Split (B, L, heads * d) to (B, heads, L, d)."""
    return t.view(t.shape[0], t.shape[1], heads, -1).transpose(1, 2)


class ToQkv(nn.Module):
    """Pre-norm attention whose weights come from modules; ``to_out`` ends in a dropout."""

    def __init__(self, dim: int, heads: int, dim_head: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm, self.attend, self.dropout = nn.LayerNorm(dim), nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out: nn.Module = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(t, self.heads) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        weights = self.dropout(self.attend(torch.matmul(q, k.mT) * self.scale))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class ToQkvAlone(ToQkv):
    """One head as wide as the model has no output layer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1, dim)
        self.to_out = nn.Identity()


class ToKv(nn.Module):
    """Queries look at a context, or at themselves, over a keep mask (B, Lk); heads are folded into the batch."""

    def __init__(self, dim: int, context_dim: int, heads: int, dim_head: int, *, norms: bool = False) -> None:
        super().__init__()
        self.heads, self.scale, inner = heads, dim_head**-0.5, heads * dim_head
        self.norm = nn.LayerNorm(dim) if norms else None
        self.to_q, self.to_kv = nn.Linear(dim, inner, bias=False), nn.Linear(context_dim, 2 * inner, bias=False)
        self.dropout, self.to_out = nn.Dropout(0.1), nn.Linear(inner, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        if self.norm is not None:
            x, context = self.norm(x), self.norm(context)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (in_heads(t, self.heads).flatten(0, 1) for t in (self.to_q(x), k, v))
        scores = torch.einsum("bid,bjd->bij", q, k) * self.scale
        if mask is not None:
            scores.masked_fill_(~mask.repeat_interleave(self.heads, dim=0)[:, None], -torch.finfo(scores.dtype).max)
        out = self.dropout(scores.softmax(dim=-1)) @ v
        return self.to_out(out.view(-1, self.heads, *out.shape[1:]).transpose(1, 2).flatten(2))


class QkvProj(nn.Module):
    """The attention of a vision transformer, with norms of queries and keys if asked for."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.1, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.LayerNorm(dim // num_heads) if qk_norm else nn.Identity() for _ in range(2))
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((self.q_norm(q) * self.scale) @ self.k_norm(k).transpose(-2, -1)).softmax(dim=-1)
        return self.proj_drop(self.proj((self.attn_drop(weights) @ v).transpose(1, 2).reshape(batch, length, dim)))


class QkvByHead(QkvProj):
    """Each head's queries, keys and values lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2).unbind(3)
        weights = self.attn_drop((q @ k.mT * self.scale).softmax(-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


class QkvGrid(QkvProj):
    """Attention over a grid (B, Y, X, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).view(x.shape)


class QkvGroups(QkvProj):
    """Attention in every group of (B, N, L, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


class WindowAttention(nn.Module):
    """Attention in windows, with a learned bias per distance, and a mask that repeats for every image."""

    def __init__(self, dim: int, window: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale, (height, width) = num_heads, (dim // num_heads) ** -0.5, window
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * height - 1) * (2 * width - 1), num_heads))
        rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        index = (rows[:, None] - rows + height - 1) * (2 * width - 1) + columns[:, None] - columns + width - 1
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj, self.softmax = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Softmax(dim=-1)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q * self.scale @ k.mT + self.relative_position_bias_table[self.relative_position_index].permute(
            2, 0, 1
        )
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[None, :, None]).flatten(0, 1)
        weights = self.attn_drop(self.softmax(scores))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(batch, length, dim)))


def windows() -> Tensor:
    return torch.randn(2 * B, 6, D, requires_grad=True)


def shifted() -> Tensor:
    """Mask of two windows, of 0 and -100."""
    return (1.0 - keep(B, 6, 6).float()) * -100.0


def grid() -> Tensor:
    return torch.randn(B, 2, 3, D, requires_grad=True)


FORMS: Forms = {
    "to_qkv": (lambda: ToQkv(D, 2, 6), ONE),
    "to_qkv, no output layer": (lambda: ToQkvAlone(D), ONE),
    "to_kv": (lambda: ToKv(D, D, 2, 6), ONE),
    "to_kv of a context": (lambda: ToKv(D, 6, 2, 4), lambda: (x(), torch.randn(B, S, 6), keep(B, S))),
    "to_kv, one norm": (lambda: ToKv(D, D, 2, 4, norms=True), lambda: (x(), x(S), keep(B, S))),
    "qkv": (lambda: QkvProj(D, 2), ONE),
    "qkv with norms": (lambda: QkvProj(D, 2, qk_norm=True), ONE),
    "qkv by head": (lambda: QkvByHead(D, 2), ONE),
    "qkv over a grid": (lambda: QkvGrid(D, 2), lambda: (grid(),)),
    "qkv in groups": (lambda: QkvGroups(D, 2), lambda: (grid(),)),
    "windows": (lambda: WindowAttention(D, (2, 3), 2), lambda: (windows(),)),
    "shifted windows": (lambda: WindowAttention(D, (2, 3), 2), lambda: (windows(), shifted())),
}
