"""The BERT dialect in plain eager PyTorch: the text of :mod:`transformer_fast.dialects.bert`, and its oracle.

Masks are keep masks over the scores (B, h, Lq, Lk), head axis included; 0 or False = blocked.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..embedding import positional_table
from .common import Text, extended, head_width


class TokenEmbedding(nn.Embedding):
    """ids (B, L) -> (B, L, embed_size), row 0 for padding."""

    def __init__(self, vocab_size: int, embed_size: int = 512) -> None:
        super().__init__(vocab_size, embed_size, padding_idx=0)


class PositionalEmbedding(nn.Module):
    """x (B, L, ...) -> the sinusoidal encoding of L positions, (1, L, d_model)."""

    def __init__(self, d_model: int, max_len: int = 512) -> None:
        super().__init__()
        self.register_buffer("pe", positional_table(max_len, d_model).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return extended(self.pe, x.size(1))[:, : x.size(1)]


class BERTEmbedding(Text):
    """ids (B, L) -> dropout(token + position), (B, L, embed_size)."""

    def __init__(self, vocab_size: int, embed_size: int = 512, dropout: float = 0.1, *, max_len: int = 512) -> None:
        super().__init__()
        self.token = self.family.TokenEmbedding(vocab_size, embed_size)
        self.position = self.family.PositionalEmbedding(embed_size, max_len)
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.dropout(self.token(sequence) + self.position(sequence))


class Attention(nn.Module):
    """(query, key, value, mask, dropout) -> output and weights, these after dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: nn.Module | None = None
    ) -> tuple[Tensor, Tensor | None]:
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if scores.dtype != torch.float64:
            scores = scores.float()  # -1e9 overflows fp16
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = F.softmax(scores, dim=-1).to(query.dtype)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(Text):
    """(query, key, value, mask), each (B, L, d_model) -> (B, Lq, d_model)."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k = head_width(self, d_model, h)
        self.h = h
        self.linear_layers = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(3)])
        self.output_linear = nn.Linear(d_model, d_model)
        self.attention = self.family.Attention()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        B = query.size(0)
        query, key, value = (
            linear(x).view(B, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linear_layers, (query, key, value), strict=True)
        )
        x, _ = self.attention(query, key, value, mask=mask, dropout=self.dropout)
        return self.output_linear(x.transpose(1, 2).reshape(B, -1, self.h * self.d_k))
