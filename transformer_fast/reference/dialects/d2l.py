"""The dialect of the d2l textbook's Transformer chapter in plain eager PyTorch: the text of
:mod:`transformer_fast.dialects.d2l`, and its oracle. A mask is ``valid_lens``, (B,) or (B, Lq)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...masks import AttentionMask
from ..embedding import positional_table
from .common import Text, extended, head_width

LayerNorm = nn.LayerNorm
"""The norm of :class:`AddNorm`."""
ValidLens = Tensor | AttentionMask | None
"""Integers (B,) or (B, Lq); None: every key. The fast form also takes an AttentionMask."""
State = list[Any]
"""State of a decoder: the encoder's outputs (B, L, h), their valid lengths, and per block the inputs so far (B, T, h),
or None before the first input."""


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """(B, L, num_heads * d) -> (B * num_heads, L, d)."""
    return X.view(*X.shape[:-1], num_heads, -1).transpose(-3, -2).flatten(0, 1)


def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """(B * num_heads, L, d) -> (B, L, num_heads * d): undoes :func:`transpose_qkv`."""
    return X.unflatten(0, (-1, num_heads)).transpose(-3, -2).flatten(-2)


def sequence_mask(X: Tensor, valid_len: Tensor, value: float = 0) -> Tensor:
    """Copy of X (B, L, ...) with ``value`` at and past the valid length (B,) per sequence."""
    if valid_len.shape != X.shape[:1]:
        raise ValueError(f"sequence_mask: expected one length for each of {X.shape[0]}, got {tuple(valid_len.shape)}")
    beyond = torch.arange(X.shape[1], device=X.device) >= valid_len.unsqueeze(1)
    return X.masked_fill(beyond.view(*X.shape[:2], *(1,) * (X.dim() - 2)), value)


def masked_softmax(X: Tensor, valid_lens: Tensor | None) -> Tensor:
    """Softmax over the last axis of (B, Lq, Lk); keys at and past the valid lengths are filled with -1e6."""
    scores = X if X.dtype == torch.float64 else X.float()
    if valid_lens is not None:
        if valid_lens.dim() == 1:
            valid_lens = torch.repeat_interleave(valid_lens, X.shape[1])
        scores = sequence_mask(scores.reshape(-1, X.shape[-1]), valid_lens.reshape(-1), value=-1e6).reshape(X.shape)
    return nn.functional.softmax(scores, dim=-1).to(X.dtype)


class DotProductAttention(nn.Module):
    """(queries, keys, values, valid_lens) -> (B, Lq, dv); ``attention_weights`` (B, Lq, Lk) are kept."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.attention_weights: Tensor | None = None

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class AdditiveAttention(nn.Module):
    """Scores ``w_v^T tanh(W_q q + W_k k)``: (queries, keys, values, valid_lens) -> (B, Lq, dv)."""

    def __init__(
        self, num_hiddens: int, dropout: float, *, query_size: int | None = None, key_size: int | None = None
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.attention_weights: Tensor | None = None
        self.W_k = linear(key_size, num_hiddens, bias=False)
        self.W_q = linear(query_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        features = self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1)
        scores = self.w_v(torch.tanh(features)).squeeze(-1)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(Text):
    """(queries, keys, values, valid_lens) -> (B, Lq, num_hiddens)."""

    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float,
        bias: bool = False,
        *,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
    ) -> None:
        super().__init__()
        head_width(self, num_hiddens, num_heads)
        self.num_heads = num_heads
        self.attention = self.family.DotProductAttention(dropout)
        self.W_q = linear(query_size, num_hiddens, bias)
        self.W_k = linear(key_size, num_hiddens, bias)
        self.W_v = linear(value_size, num_hiddens, bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        queries = transpose_qkv(self.W_q(queries), self.num_heads)
        keys = transpose_qkv(self.W_k(keys), self.num_heads)
        values = transpose_qkv(self.W_v(values), self.num_heads)
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        return self.W_o(transpose_output(self.attention(queries, keys, values, valid_lens), self.num_heads))


def linear(size: int | None, outputs: int, bias: bool = True) -> nn.Linear:
    """Linear layer whose input has ``size`` features; None takes the size from the first call."""
    return nn.LazyLinear(outputs, bias=bias) if size is None else nn.Linear(size, outputs, bias=bias)


class PositionWiseFFN(nn.Module):
    """(..., num_inputs) -> (..., pw_num_outputs)."""

    def __init__(self, ffn_num_hiddens: int, pw_num_outputs: int, *, num_inputs: int | None = None) -> None:
        super().__init__()
        self.dense1 = linear(num_inputs, ffn_num_hiddens)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(ffn_num_hiddens, pw_num_outputs)

    def forward(self, X: Tensor) -> Tensor:
        return self.dense2(self.relu(self.dense1(X)))


class AddNorm(Text):
    """LayerNorm(X + dropout(Y))."""

    def __init__(self, normalized_shape: int | tuple[int, ...] | list[int], dropout: float) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(
                f"AddNorm: normalized_shape {shape} would normalise over positions, not per vector; pass its last "
                "number only"
            )
        self.dropout = nn.Dropout(dropout)
        self.ln = self.family.LayerNorm(shape)

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:
        return self.ln(self.dropout(Y) + X)


class PositionalEncoding(nn.Module):
    """dropout(X + P[:, offset : offset + L]); positions past the table are computed, never indexed past it."""

    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 1000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("P", positional_table(max_len, num_hiddens).unsqueeze(0))

    def forward(self, X: Tensor, offset: int = 0) -> Tensor:
        end = offset + X.shape[1]
        return self.dropout(X + extended(self.P, end)[:, offset:end])


class Block(Text):
    """Base of both blocks: attentions of the block's own width, each followed by :class:`AddNorm`, and a
    feed-forward network."""

    def attend(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False) -> nn.Module:
        """Make an attention whose queries, keys and values have ``num_hiddens`` features."""
        sizes = dict.fromkeys(("query_size", "key_size", "value_size"), num_hiddens)
        return self.family.MultiHeadAttention(num_hiddens, num_heads, dropout, bias, **sizes)


class EncoderBlock(Block):
    """Encoder block: (X, valid_lens) -> (B, L, num_hiddens)."""

    def __init__(
        self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float, use_bias: bool = False
    ) -> None:
        super().__init__()
        self.attention = self.attend(num_hiddens, num_heads, dropout, use_bias)
        self.addnorm1 = self.family.AddNorm(num_hiddens, dropout)
        self.ffn = self.family.PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm2 = self.family.AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, valid_lens: ValidLens) -> Tensor:
        """X (B, L, num_hiddens), valid_lens (B,) or (B, L) -> (B, L, num_hiddens)."""
        Y = self.addnorm1(X, self.attention(X, X, X, valid_lens))
        return self.addnorm2(Y, self.ffn(Y))


class DecoderBlock(Block):
    """(X, state) -> (B, T, num_hiddens) and the state: encoder outputs, their lengths, inputs seen by each block."""

    def __init__(
        self,
        num_hiddens: int,
        ffn_num_hiddens: int,
        num_heads: int,
        dropout: float,
        i: int,
        *,
        causal_eval: bool = False,
    ) -> None:
        super().__init__()
        self.i = i
        self.causal_eval = causal_eval
        self.attention1 = self.attend(num_hiddens, num_heads, dropout)
        self.addnorm1 = self.family.AddNorm(num_hiddens, dropout)
        self.attention2 = self.attend(num_hiddens, num_heads, dropout)
        self.addnorm2 = self.family.AddNorm(num_hiddens, dropout)
        self.ffn = self.family.PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm3 = self.family.AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """X (B, T, num_hiddens) -> (B, T, num_hiddens) and the state, with X appended to the earlier inputs.

        In training position t attends to the first t + 1 (valid lengths 1 to T); in evaluation to the whole state.
        """
        return self.run(X, state, self.visible(X, state[2][self.i]))

    def visible(self, X: Tensor, seen: Tensor | None) -> ValidLens:
        """Valid lengths (B, T) of the self-attention of X (B, T, h) after ``seen`` (B, S, h); None: every input."""
        if not (self.training or self.causal_eval):
            return None
        first = 1 if self.training or seen is None else 1 + seen.shape[1]
        return torch.arange(first, first + X.shape[1], device=X.device).repeat(X.shape[0], 1)

    def run(self, X: Tensor, state: State, valid_lens: ValidLens) -> tuple[Tensor, State]:
        """Compute the block, with valid lengths for its self-attention."""
        enc_outputs, enc_valid_lens = state[0], state[1]
        seen = state[2][self.i]
        key_values = X if seen is None else torch.cat((seen, X), dim=1)
        state[2][self.i] = key_values
        Y = self.addnorm1(X, self.attention1(X, key_values, key_values, valid_lens))
        Z = self.addnorm2(Y, self.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens))
        return self.addnorm3(Z, self.ffn(Z)), state


class Stack(Text):
    """Base of both stacks: dropout(embedding * sqrt(num_hiddens) + ``P``), then the blocks."""

    def __init__(self, vocab_size: int, num_hiddens: int, dropout: float) -> None:
        super().__init__()
        self.num_hiddens = num_hiddens
        self.embedding = nn.Embedding(vocab_size, num_hiddens)
        self.pos_encoding = self.family.PositionalEncoding(num_hiddens, dropout)

    def embedded(self, ids: Tensor, offset: int = 0) -> Tensor:
        """ids (B, L), the first at position ``offset`` -> (B, L, num_hiddens)."""
        X = self.embedding(ids) * math.sqrt(self.num_hiddens)
        return self.pos_encoding(X, offset) if offset else self.pos_encoding(X)


class TransformerEncoder(Stack):
    """(ids, valid_lens) -> (B, L, num_hiddens)."""

    def __init__(
        self,
        vocab_size: int,
        num_hiddens: int,
        ffn_num_hiddens: int,
        num_heads: int,
        num_layers: int,
        dropout: float,
        use_bias: bool = False,
    ) -> None:
        super().__init__(vocab_size, num_hiddens, dropout)
        self.blks = nn.Sequential()
        for i in range(num_layers):
            block = self.family.EncoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias)
            self.blks.add_module(f"block{i}", block)

    def forward(self, X: Tensor, valid_lens: ValidLens, *args: Any) -> Tensor:
        """ids (B, L), valid_lens (B,) or (B, L) -> (B, L, num_hiddens). Further arguments are ignored."""
        return self.through_blocks(self.embedded(X), valid_lens)

    def through_blocks(self, X: Tensor, valid_lens: ValidLens) -> Tensor:
        """X (B, L, num_hiddens) through the blocks -> (B, L, num_hiddens)."""
        for block in self.blks:
            X = block(X, valid_lens)
        return X

    @property
    def attention_weights(self) -> list[Tensor | None]:
        """Weights of the last call, per block; see :class:`DotProductAttention`."""
        return [block.attention.attention.attention_weights for block in self.blks]


class TransformerDecoder(Stack):
    """(ids, state) -> logits (B, T, vocab_size) and the state. Positions count on from the state."""

    def __init__(
        self,
        vocab_size: int,
        num_hiddens: int,
        ffn_num_hiddens: int,
        num_heads: int,
        num_layers: int,
        dropout: float,
        *,
        causal_eval: bool = False,
    ) -> None:
        super().__init__(vocab_size, num_hiddens, dropout)
        self.num_layers = num_layers
        self.blks = nn.Sequential()
        for i in range(num_layers):
            sizes = num_hiddens, ffn_num_hiddens, num_heads
            block = self.family.DecoderBlock(*sizes, dropout, i, causal_eval=causal_eval)
            self.blks.add_module(f"block{i}", block)
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def init_state(self, enc_outputs: Tensor, enc_valid_lens: ValidLens, *args: Any) -> State:
        """The state before the first target token. Further arguments are ignored."""
        return [enc_outputs, enc_valid_lens, [None] * self.num_layers]

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """ids (B, T) -> logits (B, T, vocab_size) and the extended state."""
        X, state = self.through_blocks(self.embedded(X, positions_seen(state)), state)
        return self.dense(X), state

    def through_blocks(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """X (B, T, num_hiddens) through the blocks -> (B, T, num_hiddens) and the extended state."""
        for block in self.blks:
            X, state = block(X, state)
        return X, state

    @property
    def attention_weights(self) -> list[list[Tensor | None]]:
        """Weights of the last call: self-attention and attention to the encoder, each a list with one tensor per
        block."""
        both = ([getattr(block, name) for block in self.blks] for name in ("attention1", "attention2"))
        return [[attend.attention.attention_weights for attend in attends] for attends in both]


def positions_seen(state: State) -> int:
    """Number of positions that the blocks have seen.

    The textbook encodes each decoded token at position 0, which differs from training.
    """
    return next((inputs.shape[1] for inputs in state[2] if inputs is not None), 0)


class EncoderDecoder(nn.Module):
    """(enc_X, dec_X, valid_lens) -> logits and the decoder's state."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, enc_X: Tensor, dec_X: Tensor, *args: Any) -> tuple[Tensor, State]:
        """enc_X (B, L) and dec_X (B, T) ids; args: valid_lens -> logits (B, T, vocab_size) and the decoder's state."""
        return self.decoder(dec_X, self.decoder.init_state(self.encoder(enc_X, *args), *args))
