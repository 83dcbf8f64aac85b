"""Layers around hand-written attention in the style of ESPnet, JoeyNMT, RecBole and fairseq, and a fast class for each
attention, as a user registers them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast

D, HEADS = 16, 2


def linears(names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(D, D) for name in names.split()}


def split(t: Tensor) -> Tensor:
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class SpeechAttention(nn.Module):
    """ESPnet: mask (B, 1, Lk), 0 hides a key; a query without a key gets zeros, and the last weights are kept."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.linears, self.dropout, self.attn = nn.ModuleDict(linears("q k v out")), nn.Dropout(p), None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split(self.linears[name](t)) for name, t in zip("qkv", (query, key, value)))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is None:
            self.attn = scores.softmax(-1)
        else:
            blocked = mask.unsqueeze(1).eq(0)
            self.attn = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(blocked, 0.0)
        return self.linears["out"]((self.dropout(self.attn) @ v).transpose(1, 2).flatten(2))


class FastSpeechAttention(SpeechAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split(self.linears[name](t)) for name, t in zip("qkv", (query, key, value)))
        keep = None if mask is None else mask.unsqueeze(1) != 0
        p = self.dropout.p if self.training else 0.0
        out = tfast.attention(q, k, v, keep, dropout_p=p, empty_rows="zero")
        return self.linears["out"](out.transpose(1, 2).flatten(2))


class TranslationAttention(nn.Module):
    """JoeyNMT: keys first; blocked scores are -inf; the weights are returned where they are asked for."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.k_layer, self.v_layer, self.q_layer, self.output_layer = linears("k v q o").values()
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(p)

    def forward(
        self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None, return_weights: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        k, v, q = split(self.k_layer(k)), split(self.v_layer(v)), split(self.q_layer(q))
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
        weights = self.softmax(scores)
        out = self.output_layer((self.dropout(weights) @ v).transpose(1, 2).flatten(2))
        return out, weights.mean(dim=1) if return_weights else None


class FastTranslationAttention(nn.Module):
    """No subclass of the text's class: only the names of the children are the same."""

    def forward(self: Any, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        k, v, q = split(self.k_layer(k)), split(self.v_layer(v)), split(self.q_layer(q))
        p = self.dropout.p if self.training else 0.0
        out = tfast.attention(q, k, v, None if mask is None else mask.unsqueeze(1), dropout_p=p)
        return self.output_layer(out.transpose(1, 2).flatten(2)), None


class RecommenderAttention(nn.Module):
    """RecBole: a mask (B, 1, 1, Lk) is added; residual and norm belong to the module."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = linears("q k v o").values()
        self.attn_dropout, self.out_dropout = nn.Dropout(p), nn.Dropout(p)
        self.LayerNorm = nn.LayerNorm(D, eps=1e-12)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (split(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + attention_mask).softmax(-1)
        context = (self.attn_dropout(weights) @ v).transpose(1, 2).flatten(2)
        return self.LayerNorm(self.out_dropout(self.dense(context)) + hidden_states)


class FastRecommenderAttention(RecommenderAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (split(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        p = self.attn_dropout.p if self.training else 0.0
        context = tfast.attention(q, k, v, bias=attention_mask, dropout_p=p).transpose(1, 2).flatten(2)
        return self.LayerNorm(self.out_dropout(self.dense(context)) + hidden_states)


class LengthFirstAttention(nn.Module):
    """fairseq: inputs (L, B, d), and a mask (B, Lk), True at padding; dropout is a number."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = linears("q k v o").values()
        self.dropout, self.scaling = p, (D // HEADS) ** -0.5

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        linears = self.q_proj, self.k_proj, self.v_proj
        return [split(linear(t.transpose(0, 1))) for linear, t in zip(linears, (query, key, value))]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        q, k, v = self.heads(query, key, value)
        scores = (q * self.scaling) @ k.mT
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -1e9)
        weights = F.dropout(scores.softmax(-1), p=self.dropout, training=self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2).transpose(0, 1)), None


class FastLengthFirstAttention(LengthFirstAttention):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        q, k, v = self.heads(query, key, value)
        keep = None if key_padding_mask is None else ~key_padding_mask[:, None, None]
        p = self.dropout if self.training else 0.0
        out = tfast.attention(q, k, v, keep, scale=self.scaling, dropout_p=p)
        return self.out_proj(out.transpose(1, 2).flatten(2).transpose(0, 1)), None


class Layer(nn.Module):
    """Layer after Xiong et al. (2020): norm, attention, norm, feed-forward network, with residual additions."""

    length_first = False

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm_of_ff = nn.LayerNorm(D), nn.LayerNorm(D)
        self.widen, self.narrow = nn.Linear(D, 24), nn.Linear(24, D)
        self.drop = nn.Dropout(p)
        self.attention = self.make(p)

    def make(self, p: float) -> nn.Module:
        return nn.MultiheadAttention(D, HEADS, p, batch_first=not self.length_first)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=mask)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = x + self.drop(self.heads(self.norm(x), mask))
        return x + self.narrow(F.gelu(self.widen(self.norm_of_ff(x))))


class LengthFirstLayer(Layer):
    length_first = True


class SdpaLayer(Layer):
    """Layer whose mask is a keep mask for torch's function."""

    def make(self, p: float) -> nn.Module:
        self.qkv, self.p = nn.Linear(D, 3 * D), p
        return nn.Linear(D, D)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        mask = None if mask is None else mask[:, None, None]
        function = getattr(F, "scaled_dot_product_attention")  # noqa: B009 # a name that no reader of code finds
        return self.attention(function(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(2))


class SpeechLayer(Layer):
    """Layer that returns its mask."""

    def make(self, p: float) -> nn.Module:
        return SpeechAttention(p)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Tensor | None = None) -> Any:
        return super().forward(x, mask), mask


class TranslationLayer(Layer):
    def make(self, p: float) -> nn.Module:
        return TranslationAttention(p)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, mask)[0]


class RecommenderLayer(Layer):
    def make(self, p: float) -> nn.Module:
        return RecommenderAttention(p)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, mask)


class TranslatorLayer(Layer):
    length_first = True

    def make(self, p: float) -> nn.Module:
        return LengthFirstAttention(p)


Make = Callable[[Tensor], Tensor]


def added(keep: Tensor) -> Tensor:
    """Mask (B, 1, 1, L) of 0 and -10000."""
    return torch.zeros(keep[:, None, None].shape).masked_fill(~keep[:, None, None], -10000.0)


LAYERS: dict[str, tuple[type[Layer], str, Make]] = {
    "nn.MultiheadAttention": (Layer, "blocked", lambda keep: ~keep),
    "nn.MultiheadAttention, length first": (LengthFirstLayer, "blocked", lambda keep: ~keep),
    "torch's function": (SdpaLayer, "keep", lambda keep: keep),
    "ESPnet": (SpeechLayer, "keep", lambda keep: keep[:, None]),
    "ESPnet, int": (SpeechLayer, "keep", lambda keep: keep[:, None].int()),
    "ESPnet, a row per query": (SpeechLayer, "keep", lambda keep: keep[:, None].expand(-1, keep.shape[1], -1)),
    "JoeyNMT": (TranslationLayer, "keep", lambda keep: keep[:, None]),
    "RecBole": (RecommenderLayer, "added", added),
    "fairseq": (TranslatorLayer, "blocked", lambda keep: ~keep),
}
"""Class of the layer, meaning of its mask, and the mask of padding, bool (B, L), True at tokens."""

ATTENTIONS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[int, int], Any]]] = {
    SpeechAttention: (FastSpeechAttention, lambda B, L: (*[torch.randn(B, L, D)] * 3, torch.rand(B, 1, L) > 0.3)),
    TranslationAttention: (
        FastTranslationAttention,
        lambda B, L: (*[torch.randn(B, L + 3, D)] * 2, torch.randn(B, L, D), torch.rand(B, 1, L + 3) > 0.3),
    ),
    RecommenderAttention: (
        FastRecommenderAttention,
        lambda B, L: (torch.randn(B, L, D), added(torch.rand(B, L) > 0.3)),
    ),
    LengthFirstAttention: (
        FastLengthFirstAttention,
        lambda B, L: {
            "query": torch.randn(L, B, D), "key": (kv := torch.randn(L + 1, B, D)), "value": kv,
            "key_padding_mask": torch.rand(B, L + 1) > 0.7,
        },
    ),
}  # fmt: skip
"""Fast class of an attention, and its inputs."""


class Stack(nn.Module):
    """A list of layers in a loop."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
        length_first = getattr(self.layers[0], "length_first", False)
        x = x.transpose(0, 1) if length_first else x
        for layer in self.layers:
            result = layer(x, mask, **others)
            x = result[0] if isinstance(result, tuple) else result
        return x.transpose(0, 1) if length_first else x


LENGTH = 9
KEEP = torch.arange(LENGTH) < torch.tensor([9, 2, 6, 4])[:, None]
X = torch.randn(4, LENGTH, D, generator=torch.Generator().manual_seed(0))


def registered(kind: type[nn.Module], means: str, as_mask: Callable[[Tensor], Tensor], **options: Any) -> Any:
    """Register a layer."""
    length_first = getattr(kind, "length_first", False)
    x = X.transpose(0, 1) if length_first else X
    sample = kind(), (x, as_mask(KEEP))
    options = {"mask": "mask", "mask_means": means, "tokens": True, "batch_first": not length_first, **options}
    return tfast.register(kind, check=sample, **options)
