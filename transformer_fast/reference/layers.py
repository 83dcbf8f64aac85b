"""The classic Transformer, class by class, in plain eager PyTorch: the oracle of :mod:`transformer_fast.layers`.

Pre-norm by default, as the classic tutorials write it; ``norm_first=False`` gives the paper's post-norm. Class names,
constructor order, attribute names and argument order are those that existing checkpoints and code expect.

Masks are keep masks, ``(B, 1, Lk)`` or ``(B, Lq, Lk)``, 0 or False = blocked; a layer adds the head axis.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..masks import AttentionMask
from .sublayers import Embedder, FeedForward, MultiHeadAttention, Norm, PositionalEncoder, attention, make_norm

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Embedder",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "MultiHeadAttention",
    "Norm",
    "PositionalEncoder",
    "Stack",
    "Transformer",
    "attention",
    "make_norm",
    "subsequentmask",
]


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with norm, dropout and residual: (x, mask) -> x, (B, L, d_model)."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        dropout: float = 0.1,
        *,
        d_ff: int = 2048,
        norm_first: bool = True,
        norm: str = "std",
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm_1 = make_norm(norm, d_model)
        self.norm_2 = make_norm(norm, d_model)
        self.attn = MultiHeadAttention(heads, d_model, dropout if attention_dropout is None else attention_dropout)
        self.ff = FeedForward(d_model, d_ff, dropout if activation_dropout is None else activation_dropout)
        self.dropout_1 = nn.Dropout(dropout)
        self.dropout_2 = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | AttentionMask | None) -> Tensor:
        if self.norm_first:
            x2 = self.norm_1(x)
            x = x + self.dropout_1(self.attn(x2, x2, x2, mask))
            return x + self.dropout_2(self.ff(self.norm_2(x)))
        x = self.norm_1(x + self.dropout_1(self.attn(x, x, x, mask)))
        return self.norm_2(x + self.dropout_2(self.ff(x)))


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's outputs, feed-forward.

    (x, e_outputs, src_mask, trg_mask) -> x.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        dropout: float = 0.1,
        *,
        d_ff: int = 2048,
        norm_first: bool = True,
        norm: str = "std",
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
    ) -> None:
        super().__init__()
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.norm_first = norm_first
        self.norm_1 = make_norm(norm, d_model)
        self.norm_2 = make_norm(norm, d_model)
        self.norm_3 = make_norm(norm, d_model)
        self.dropout_1 = nn.Dropout(dropout)
        self.dropout_2 = nn.Dropout(dropout)
        self.dropout_3 = nn.Dropout(dropout)
        self.attn_1 = MultiHeadAttention(heads, d_model, attention_dropout)
        self.attn_2 = MultiHeadAttention(heads, d_model, attention_dropout)
        self.ff = FeedForward(d_model, d_ff, dropout if activation_dropout is None else activation_dropout)

    def forward(
        self,
        x: Tensor,
        e_outputs: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
    ) -> Tensor:
        if self.norm_first:
            x2 = self.norm_1(x)
            x = x + self.dropout_1(self.attn_1(x2, x2, x2, trg_mask))
            x = x + self.dropout_2(self.attn_2(self.norm_2(x), e_outputs, e_outputs, src_mask))
            return x + self.dropout_3(self.ff(self.norm_3(x)))
        x = self.norm_1(x + self.dropout_1(self.attn_1(x, x, x, trg_mask)))
        x = self.norm_2(x + self.dropout_2(self.attn_2(x, e_outputs, e_outputs, src_mask)))
        return self.norm_3(x + self.dropout_3(self.ff(x)))


class Stack(nn.Module):
    """Base of encoder and decoder: embedding, positions, N layers with equal initial weights, (pre-norm) a norm."""

    def __init__(
        self,
        layer_type: type[EncoderLayer | DecoderLayer],
        vocab_size: int,
        d_model: int,
        N: int,
        heads: int,
        dropout: float,
        *,
        max_len: int = 5000,
        padding_idx: int | None = None,
        norm_first: bool = True,
        norm: str = "std",
        **layer_options,
    ) -> None:
        super().__init__()
        self.embed = Embedder(vocab_size, d_model, padding_idx=padding_idx)
        self.pe = PositionalEncoder(d_model, dropout, max_len)
        layer = layer_type(d_model, heads, dropout, norm_first=norm_first, norm=norm, **layer_options)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(N))
        self.norm = make_norm(norm, d_model) if norm_first else nn.Identity()


class Encoder(Stack):
    """(src ids, mask) -> (B, L, d_model)."""

    def __init__(self, vocab_size: int, d_model: int, N: int, heads: int, dropout: float, **options) -> None:
        super().__init__(EncoderLayer, vocab_size, d_model, N, heads, dropout, **options)

    def forward(self, src: Tensor, mask: Tensor | AttentionMask | None) -> Tensor:
        x = self.pe(self.embed(src))
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Decoder(Stack):
    """(trg ids, e_outputs, src_mask, trg_mask) -> (B, L_trg, d_model)."""

    def __init__(self, vocab_size: int, d_model: int, N: int, heads: int, dropout: float, **options) -> None:
        super().__init__(DecoderLayer, vocab_size, d_model, N, heads, dropout, **options)

    def forward(
        self,
        trg: Tensor,
        e_outputs: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
    ) -> Tensor:
        x = self.pe(self.embed(trg))
        for layer in self.layers:
            x = layer(x, e_outputs, src_mask, trg_mask)
        return self.norm(x)


class Transformer(nn.Module):
    """The encoder-decoder Transformer: (src, trg, src_mask, trg_mask) -> logits (B, L_trg, trg_vocab).

    ``tie_weights=True`` shares one matrix among both embeddings and the output layer; "decoder" shares it between the
    target embedding and the output layer.
    """

    def __init__(
        self,
        src_vocab: int,
        trg_vocab: int,
        d_model: int,
        N: int,
        heads: int,
        dropout: float,
        *,
        tie_weights: bool | str = False,
        **options,
    ) -> None:
        super().__init__()
        if tie_weights is True and src_vocab != trg_vocab:
            raise ValueError(f"tie_weights=True needs one vocabulary, got {src_vocab} and {trg_vocab}")
        self.encoder = Encoder(src_vocab, d_model, N, heads, dropout, **options)
        self.decoder = Decoder(trg_vocab, d_model, N, heads, dropout, **options)
        self.out = nn.Linear(d_model, trg_vocab)
        if tie_weights:
            self.out.weight = self.decoder.embed.lut.weight
        if tie_weights is True:
            self.encoder.embed.lut.weight = self.decoder.embed.lut.weight

    def forward(
        self, src: Tensor, trg: Tensor, src_mask: Tensor | AttentionMask | None, trg_mask: Tensor | AttentionMask | None
    ) -> Tensor:
        e_outputs = self.encoder(src, src_mask)
        return self.out(self.decoder(trg, e_outputs, src_mask, trg_mask))


def subsequentmask(size: int) -> Tensor:
    """Look-ahead keep mask: bool (1, size, size), True on and below the diagonal.

    :meth:`transformer_fast.AttentionMask.causal` is the same mask without a tensor.
    """
    return torch.ones(1, size, size, dtype=torch.bool).tril()
