"""Attention with three linear layers as users write it, over masks of several meanings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from form_arguments import ATTEND, B, D, Forms, L, S, keep, x
from handwritten import InvertedAttention
from torch import Tensor, nn


def three(names: str, dim: int) -> dict[str, nn.Module]:
    """Linear layers by name."""
    return {name: nn.Linear(dim, dim) for name in names.split()}


class BertSelf(nn.Module):
    """BERT's attention by hand: a mask (B, 1, 1, Lk) is added; residual and norm belong to the module."""

    def __init__(self, hidden_size: int, num_attention_heads: int, p: float = 0.1) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = num_attention_heads, hidden_size // num_attention_heads
        for name, linear in three("query key value dense", hidden_size).items():
            setattr(self, name, linear)
        self.attn_dropout, self.out_dropout = nn.Dropout(p), nn.Dropout(p)
        self.LayerNorm, self.softmax = nn.LayerNorm(hidden_size, eps=1e-12), nn.Softmax(dim=-1)

    def split(self, t: Tensor) -> Tensor:
        return t.view(*t.shape[:2], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (self.split(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.attention_head_size) + attention_mask
        context = (self.attn_dropout(self.softmax(scores)) @ v).permute(0, 2, 1, 3).flatten(2)
        return self.LayerNorm(self.out_dropout(self.dense(context)) + hidden_states)


class SpeechAttention(nn.Module):
    """Attention of a speech model: a query without a key gets zeros, and the last weights are kept."""

    def __init__(self, n_head: int, n_feat: int, dropout_rate: float = 0.1) -> None:
        super().__init__()
        self.d_k, self.h, self.attn = n_feat // n_head, n_head, None
        for name, linear in three("linear_q linear_k linear_v linear_out", n_feat).items():
            setattr(self, name, linear)
        self.dropout, self.dropout_rate = nn.Dropout(dropout_rate), dropout_rate

    def split(self, t: Tensor) -> Tensor:
        return t.view(t.size(0), -1, self.h, self.d_k).transpose(1, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.split(self.linear_q(query)), self.split(self.linear_k(key)), self.split(self.linear_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is None:
            self.attn = scores.softmax(-1)
        else:
            blocked = mask.unsqueeze(1).eq(0)
            self.attn = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(blocked, 0.0)
        return self.linear_out((self.dropout(self.attn) @ v).transpose(1, 2).flatten(2))


class TranslationAttention(nn.Module):
    """Keys first; blocked scores are -inf; the weights are returned where they are asked for."""

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, size // num_heads
        for name, linear in three("k_layer v_layer q_layer output_layer", size).items():
            setattr(self, name, linear)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)

    def forward(
        self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None, return_weights: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        k, v, q = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in ((self.k_layer, k), (self.v_layer, v), (self.q_layer, q))
        )
        scores = (q / math.sqrt(self.head_size)) @ k.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
        weights = self.softmax(scores)
        out = self.output_layer((self.dropout(weights) @ v).transpose(1, 2).flatten(2))
        return out, weights.mean(dim=1) if return_weights else None


class LengthFirst(nn.Module):
    """Inputs are (L, B, d), and a mask (B, Lk) is True at padding; dropout is a number."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.scaling = num_heads, dropout, (embed_dim // num_heads) ** -0.5
        for name, linear in three("q_proj k_proj v_proj out_proj", embed_dim).items():
            setattr(self, name, linear)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        (length, batch, dim), heads = query.shape, self.num_heads
        q = (self.q_proj(query) * self.scaling).view(length, batch * heads, -1).transpose(0, 1)
        k, v = (t.view(-1, batch * heads, q.shape[-1]).transpose(0, 1) for t in (self.k_proj(key), self.v_proj(value)))
        scores = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            blocked = key_padding_mask[:, None, None].to(torch.bool)
            scores = scores.view(batch, heads, length, -1).masked_fill(blocked, -1e9).flatten(0, 1)
        weights = F.dropout(scores.softmax(dim=-1), p=self.dropout, training=self.training)
        return self.out_proj(torch.bmm(weights, v).transpose(0, 1).reshape(length, batch, dim)), None


class ListOfLinears(nn.Module):
    """A list of three linear layers and an output layer; a float mask of zeros and ones keeps by its value."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.projections = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.output_linear, self.attn_dropout = nn.Linear(dim, dim), nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(t).view(*t.shape[:2], self.n_heads, -1).transpose(1, 2)
            for linear, t in zip(self.projections, (q, k, v))
        )
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.output_linear(
            (self.attn_dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(*q.shape[::2], -1)
        )


def added(*shape: int) -> Tensor:
    """Mask of 0 and -10000."""
    return (1.0 - keep(*shape).float()) * -10000.0


FORMS: Forms = {
    "added mask": (lambda: BertSelf(D, 2), lambda: (x(), added(B, 1, 1, L))),
    "added mask per query": (lambda: BertSelf(D, 2), lambda: (x(), added(B, 1, L, L))),
    "keep mask of speech": (lambda: SpeechAttention(2, D), ATTEND),
    "keep mask of speech, whole numbers": (
        lambda: SpeechAttention(2, D),
        lambda: (x(), x(), x(), keep(B, L, L).long()),
    ),
    "keys first, without a mask": (lambda: TranslationAttention(2, D), lambda: (x(S), x(S), x())),
    "keys first": (lambda: TranslationAttention(2, D), lambda: (x(S), x(S), x(), keep(B, 1, S))),
    "keys first, with weights": (lambda: TranslationAttention(2, D), lambda: (x(S), x(S), x(), keep(B, 1, S), True)),
    "length first": (
        lambda: LengthFirst(D, 2),
        lambda: (x().transpose(0, 1), x(S).transpose(0, 1), x(S).transpose(0, 1), ~keep(B, S)),
    ),
    "list of linears, blocked": (lambda: InvertedAttention(2, D), lambda: (x(), x(S), x(S), ~keep(B, 1, S))),
    "list of linears": (lambda: ListOfLinears(2, D), lambda: (x(), x(S), x(S), keep(B, 1, 1, S).float())),
}
