"""Models as users write them, in plain PyTorch, which accelerate must recognise or leave."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference.dialects import d2l


def heads_of(linear: nn.Module, x: Tensor, heads: int) -> Tensor:
    """Project (B, L, D) and split into heads: (B, heads, L, D / heads)."""
    return linear(x).unflatten(-1, (heads, -1)).transpose(1, 2)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Multiply queries and keys, and scale."""
    return q @ k.mT / math.sqrt(q.shape[-1])


def clones(module: nn.Module, n: int) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(module) for _ in range(n))


class AnnotatedNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.rand(features) + 0.5)
        self.b_2 = nn.Parameter(torch.rand(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class AnnotatedAttention(nn.Module):
    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (heads_of(linear, x, self.h) for linear, x in zip(self.linears, (query, key, value)))
        scores = scores_of(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.attn = self.dropout(scores.softmax(-1))
        return self.linears[-1]((self.attn @ v).transpose(1, 2).flatten(2))


class AnnotatedFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.w_1(x).relu()))


class Sublayer(nn.Module):
    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = AnnotatedNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class PostSublayer(Sublayer):
    def forward(self, x: Tensor, sublayer) -> Tensor:
        return self.norm(x + self.dropout(sublayer(x)))


class Embeddings(nn.Module):
    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x) * math.sqrt(self.d_model)


class Positions(nn.Module):
    def __init__(self, d_model: int, dropout: float, max_len: int = 50) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", tfast.positional_table(max_len, d_model).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)].requires_grad_(False))


class PositionsLengthFirst(Positions):
    def __init__(self, d_model: int, dropout: float, max_len: int = 50) -> None:
        super().__init__(d_model, dropout, max_len)
        self.pe = self.pe.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0)])


class AnnotatedEncoderLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.feed_forward, self.size = self_attn, feed_forward, size
        self.sublayer = clones(Sublayer(size, dropout), 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class AnnotatedDecoderLayer(nn.Module):
    def __init__(
        self, size: int, self_attn: nn.Module, src_attn: nn.Module, feed_forward: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.size, self.self_attn, self.src_attn, self.feed_forward = size, self_attn, src_attn, feed_forward
        self.sublayer = clones(Sublayer(size, dropout), 3)

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class AnnotatedEncoder(nn.Module):
    def __init__(self, layer: nn.Module, N: int) -> None:
        super().__init__()
        self.layers, self.norm = clones(layer, N), AnnotatedNorm(layer.size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class AnnotatedDecoder(AnnotatedEncoder):
    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.norm(x)


class Generator(nn.Module):
    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).log_softmax(-1)


class EncoderDecoder(nn.Module):
    """The annotated text's model; its generator is a module that forward does not call."""

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, src_embed: nn.Module, tgt_embed: nn.Module, generator: nn.Module
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed, self.generator = src_embed, tgt_embed, generator

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)


def make_model(src_vocab: int, tgt_vocab: int, N: int, d_model: int, d_ff: int, h: int, dropout: float = 0.1):
    """Build the model as the annotated text does."""
    attention, inner = AnnotatedAttention(h, d_model, dropout), AnnotatedFeedForward(d_model, d_ff, dropout)
    layer = AnnotatedEncoderLayer(d_model, copy.deepcopy(attention), copy.deepcopy(inner), dropout)
    heads = copy.deepcopy(attention), copy.deepcopy(attention)
    embeds = (nn.Sequential(Embeddings(d_model, v), Positions(d_model, dropout)) for v in (src_vocab, tgt_vocab))
    return EncoderDecoder(
        AnnotatedEncoder(layer, N),
        AnnotatedDecoder(AnnotatedDecoderLayer(d_model, *heads, copy.deepcopy(inner), dropout), N),
        *embeds,
        Generator(d_model, tgt_vocab),
    )


class Annotated(nn.Module):
    """The annotated text's model with lists of layers, and a generator that forward calls."""

    def __init__(self, vocab: int, d_model: int, heads: int, d_ff: int, N: int, dropout: float = 0.1) -> None:
        super().__init__()
        parts = make_model(vocab, vocab, N, d_model, d_ff, heads, dropout)
        self.src_embed, self.tgt_embed = parts.src_embed, parts.tgt_embed
        self.encoder, self.decoder = parts.encoder.layers, parts.decoder.layers
        self.norms = nn.ModuleList([parts.encoder.norm, parts.decoder.norm])
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        memory, x = self.src_embed(src), self.tgt_embed(tgt)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        memory = self.norms[0](memory)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(self.norms[1](x))


class InvertedAttention(AnnotatedAttention):
    """Attention with the mask of other libraries: nonzero = blocked."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(query, key, value, None if mask is None else mask == 0)


class BertAttention(nn.Module):
    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linear_layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(3))
        self.output_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (heads_of(linear, x, self.h) for linear, x in zip(self.linear_layers, (query, key, value)))
        scores = scores_of(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.output_linear((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class BertFeedForward(AnnotatedFeedForward):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, d_ff, dropout)
        self.activation = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


class BertBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = BertAttention(heads, hidden, dropout)
        self.feed_forward = BertFeedForward(hidden, d_ff, dropout)
        self.input_sublayer, self.output_sublayer = Sublayer(hidden, dropout), Sublayer(hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.input_sublayer(x, lambda x: self.attention.forward(x, x, x, mask=mask))
        return self.dropout(self.output_sublayer(x, self.feed_forward))


class BertPositions(nn.Module):
    def __init__(self, d_model: int, max_len: int = 50) -> None:
        super().__init__()
        self.register_buffer("pe", tfast.positional_table(max_len, d_model).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class BertEmbedding(nn.Module):
    """Token, position and segment embedding, as in the well-known code."""

    def __init__(self, vocab_size: int, embed_size: int, dropout: float = 0.1, segments: bool = True) -> None:
        super().__init__()
        self.token, self.position = TokenEmbedding(vocab_size, embed_size), BertPositions(embed_size)
        self.segment = TokenEmbedding(3, embed_size) if segments else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: Tensor, segment_label: Tensor) -> Tensor:
        x = self.token(sequence) + self.position(sequence) + self.segment(segment_label)
        return self.dropout(x)


class TokenEmbedding(nn.Embedding):
    def __init__(self, vocab_size: int, embed_size: int = 512) -> None:
        super().__init__(vocab_size, embed_size, padding_idx=0)


class TensorflowAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.depth = num_heads, d_model // num_heads
        self.wq, self.wk, self.wv, self.dense = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (heads_of(linear, x, self.num_heads) for linear, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
        scores = scores_of(q, k)
        if mask is not None:
            scores = scores + mask * -1e9
        weights = scores.softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).flatten(2)), weights


class DotProductAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        if valid_lens is not None:
            lens = valid_lens[:, None, None] if valid_lens.dim() == 1 else valid_lens[:, :, None]
            scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, -1e6)
        self.attention_weights = F.softmax(scores, dim=-1)
        return torch.bmm(self.dropout(self.attention_weights), values)


class AddNorm(nn.Module):
    def __init__(self, norm_shape: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.ln = nn.Dropout(dropout), nn.LayerNorm(norm_shape)

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:
        return self.ln(self.dropout(Y) + X)


class D2lPositions(nn.Module):
    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 50) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.P = tfast.positional_table(max_len, num_hiddens).unsqueeze(0)

    def forward(self, X: Tensor) -> Tensor:
        X = X + self.P[:, : X.shape[1], :].to(X.device)
        return self.dropout(X)


class D2lHeads(nn.Module):
    """The chapter's multi-head attention: sizes from the first call, heads folded into the batch."""

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False) -> None:
        super().__init__()
        self.num_heads, self.attention = num_heads, DotProductAttention(dropout)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.LazyLinear(num_hiddens, bias=bias) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).flatten(0, 1)
            for linear, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        )
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        out = self.attention(q, k, v, valid_lens)
        return self.W_o(out.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))


class D2lEncoder(d2l.TransformerEncoder):
    """The chapter's encoder: its call stores the weights."""

    attention_weights = None

    def forward(self, X: Tensor, valid_lens: Tensor | None, *args: object) -> Tensor:
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        self.attention_weights = [None] * len(self.blks)
        for i, block in enumerate(self.blks):
            X = block(X, valid_lens)
            self.attention_weights[i] = block.attention.attention.attention_weights
        return X


class D2lDecoder(d2l.TransformerDecoder):
    """The chapter's decoder: every call starts at position 0, and weights are a property."""

    def forward(self, X: Tensor, state: list) -> tuple[Tensor, list]:
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        self._attention_weights = [[None] * len(self.blks) for _ in range(2)]
        for i, block in enumerate(self.blks):
            X, state = block(X, state)
            self._attention_weights[0][i] = block.attention1.attention.attention_weights
            self._attention_weights[1][i] = block.attention2.attention.attention_weights
        return self.dense(X), state

    @property
    def attention_weights(self) -> list:
        return self._attention_weights
