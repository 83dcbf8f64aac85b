"""Parts of the classic layers: embedding, positions, attention, feed-forward and norms, in plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..masks import AttentionMask
from .embedding import positional_table
from .norm import layer_norm


class Embedder(nn.Module):
    """Token embedding times ``sqrt(d_model)``: ids (B, L) -> (B, L, d_model)."""

    def __init__(self, vocab: int, d_model: int, *, padding_idx: int | None = None) -> None:
        super().__init__()
        self.d_model = d_model
        self.lut = nn.Embedding(vocab, d_model, padding_idx=padding_idx)

    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoder(nn.Module):
    """``dropout(x + pe[:, :L])``. Positions past ``max_len`` are computed, never indexed past the table."""

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", positional_table(max_len, d_model).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        L = x.shape[1]
        pe = self.pe
        if pe.shape[1] < L:
            beyond = positional_table(L, x.shape[2])[pe.shape[1] :]
            pe = torch.cat((pe, beyond.unsqueeze(0).to(pe)), dim=1)
        return self.dropout((x + pe[:, :L]).to(x.dtype))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_k: int,
    mask: Tensor | AttentionMask | None = None,
    dropout: nn.Module | None = None,
    verbose: bool = False,
) -> Tensor:
    """``dropout(softmax(q k^T / sqrt(d_k))) v`` for q (B, h, Lq, d_k) and k, v (B, h, Lk, d_k).

    ``verbose`` prints the weights.
    """
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        keep = mask.dense(q.shape[2], k.shape[2], q.device) if isinstance(mask, AttentionMask) else mask.unsqueeze(1)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores  # -1e9 overflows fp16
        scores = scores.masked_fill(keep == 0, -1e9)
    weights = F.softmax(scores, dim=-1).to(q.dtype)
    if dropout is not None:
        weights = dropout(weights)
    if verbose:
        print(weights)
    return torch.matmul(weights, v)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2): forward (q, k, v, mask) with each (B, L, d_model)."""

    def __init__(self, heads: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        if heads < 1 or d_model % heads != 0:
            raise ValueError(
                f"MultiHeadAttention: d_model must be a multiple of heads, got d_model={d_model}, heads={heads}"
            )
        self.d_model = d_model
        self.d_k = d_model // heads
        self.h = heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMask | None = None, verbose: bool = False
    ) -> Tensor:
        B = q.shape[0]
        q, k, v = (
            linear(x).view(B, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in ((self.q_linear, q), (self.k_linear, k), (self.v_linear, v))
        )
        heads = attention(q, k, v, self.d_k, mask, self.dropout, verbose)
        return self.out(heads.transpose(1, 2).reshape(B, -1, self.d_model))


class Norm(nn.Module):
    """``alpha * (x - mean) / (std + eps) + bias`` with the unbiased std over the last dimension."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        if d_model < 2:
            raise ValueError(f"Norm: the unbiased std needs d_model of at least 2, got {d_model}")
        self.alpha = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.alpha, self.bias, self.eps, kind="std")


class FeedForward(nn.Module):
    """``linear_2(dropout(relu(linear_1(x))))`` (section 3.3)."""

    def __init__(self, d_model: int, d_ff: int = 2048, dropout: float = 0.1) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.dropout(F.relu(self.linear_1(x))))


def make_norm(kind: str, d_model: int) -> nn.Module:
    """The norm of a layer: "std" (:class:`Norm`), "layer" (``nn.LayerNorm``) or "rms" (``nn.RMSNorm``, eps 1e-6)."""
    if kind == "std":
        return Norm(d_model)
    if kind == "layer":
        return nn.LayerNorm(d_model)
    if kind == "rms":
        return nn.RMSNorm(d_model, eps=1e-6)
    raise ValueError(f'norm: expected "std", "layer" or "rms", got {kind!r}')
