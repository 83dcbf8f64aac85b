"""Small models that call torch's attention in users' styles: a GPT whose attention is one method, a vision
transformer with a switch for it, and an encoder and a decoder that share a module around it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class GptNorm(nn.Module):
    """LayerNorm whose shift is optional."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class GptAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.out_dropout = nn.Dropout(dropout)
        self.heads, self.dropout = heads, dropout
        self.fused = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        if self.fused:
            dropout_p = self.dropout if self.training else 0
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=dropout_p, is_causal=True
            )
        else:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q @ k.mT / math.sqrt(k.size(-1))).masked_fill(later, float("-inf"))
            y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        return self.out_dropout(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class GptFeedForward(nn.Module):
    def __init__(self, width: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.up, self.gelu = nn.Linear(width, 4 * width, bias=bias), nn.GELU()
        self.down, self.dropout = nn.Linear(4 * width, width, bias=bias), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.gelu(self.up(x))))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = GptNorm(width, bias), GptAttention(width, heads, dropout, bias)
        self.norm_2, self.feed_forward = GptNorm(width, bias), GptFeedForward(width, dropout, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Gpt(nn.Module):
    """Ids (B, L) -> logits (B, L, vocabulary); the token table is also the output layer."""

    def __init__(
        self, vocabulary: int = 40, width: int = 32, layers: int = 2, heads: int = 4, most: int = 64,
        dropout: float = 0.0, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(most, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([GptBlock(width, heads, dropout, bias) for _ in range(layers)])
        self.norm, self.head = GptNorm(width, bias), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VisionAttention(nn.Module):
    fused: bool

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.fused, self.scale = heads, True, (width // heads) ** -0.5
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.dropout, self.out_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            x = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout.p if self.training else 0.0
            )
        else:
            x = self.dropout((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.out_dropout(self.projection(x.transpose(1, 2).reshape(batch, length, width)))


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width, eps=1e-6), VisionAttention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width, eps=1e-6)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale_1, self.scale_2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale_1 * self.attention(self.norm_1(x))
        return x + self.scale_2 * self.feed_forward(self.norm_2(x))


class Vision(nn.Module):
    """Images (B, 3, size, size) -> classes (B, 7)."""

    def __init__(
        self, width: int = 32, layers: int = 2, heads: int = 4, dropout: float = 0.0, size: int = 16, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        positions = (size // patch) ** 2 + 1
        self.first, self.positions = (nn.Parameter(torch.randn(1, n, width)) for n in (1, positions))
        self.blocks = nn.Sequential(*[VisionBlock(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GammaNorm(nn.Module):
    """LayerNorm whose shift is a buffer of zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.register_buffer("beta", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class Attend(nn.Module):
    """Base of every attention here: (B, H, Lq, D), and keys and values with one head or with H heads."""

    def __init__(self, dropout: float, causal: bool) -> None:
        super().__init__()
        self.dropout, self.causal = dropout, causal

    def flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        if k.ndim == 3:
            k, v = (t.unsqueeze(1).expand_as(q[..., : t.shape[-2], :]) for t in (k, v))
        causal = self.causal
        if mask is not None:
            mask = mask.expand(-1, q.shape[1], q.shape[2], -1)
            if causal:
                mask, causal = mask & torch.ones(q.shape[2], k.shape[-2], dtype=torch.bool).tril(), False
        if bias is not None:
            lowest = -torch.finfo(q.dtype).max
            mask = bias if mask is None else bias.masked_fill(~mask, lowest // 2)
        dropout_p = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        return self.flash(q, k, v, mask, bias)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.heads, self.norm = heads, GammaNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.attend, self.to_out = Attend(dropout, causal), nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1)) if biased else None

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        context = normed if context is None else context
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(normed), *self.to_kv(context).chunk(2, dim=-1))
        )
        mask = None if mask is None else mask[:, None, None]
        bias = None
        if self.bias is not None:
            distance = torch.arange(context.shape[1]) - torch.arange(x.shape[1]).unsqueeze(1)
            bias = self.bias * distance.abs().neg()
        return self.to_out(self.attend(q, k, v, mask, bias).transpose(1, 2).flatten(-2))


class EncoderDecoder(nn.Module):
    """Ids (B, S), (B, L) and a keep mask (B, S) -> logits (B, L, vocabulary). The encoder has a learned bias."""

    def __init__(self, vocabulary: int = 40, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList([Attention(width, heads, dropout, biased=True) for _ in range(2)])
        self.decoder = nn.ModuleList([Attention(width, heads, dropout, causal=True) for _ in range(2)])
        self.cross = nn.ModuleList([Attention(width, heads, dropout) for _ in range(2)])
        self.to_logits = nn.Linear(width, vocabulary)

    def forward(self, src: Tensor, trg: Tensor, keep: Tensor) -> Tensor:
        memory, x = self.tokens(src), self.tokens(trg)
        for layer in self.encoder:
            memory = memory + layer(memory, mask=keep)
        for own, cross in zip(self.decoder, self.cross):
            x = x + own(x)
            x = x + cross(x, memory, keep)
        return self.to_logits(x)
