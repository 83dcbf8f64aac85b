"""The dialect of the d2l textbook's Transformer chapter in plain eager PyTorch: the oracle of
:mod:`transformer_fast.dialects.d2l`. A mask is ``valid_lens``, (B,) or (B, Lq)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """(B, L, hidden) -> (B * num_heads, L, hidden / num_heads)."""
    X = X.reshape(X.shape[0], X.shape[1], num_heads, -1).permute(0, 2, 1, 3)
    return X.reshape(-1, X.shape[2], X.shape[3])


def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """Undoes :func:`transpose_qkv`."""
    X = X.reshape(-1, num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
    return X.reshape(X.shape[0], X.shape[1], -1)


def sequence_mask(X: Tensor, valid_len: Tensor, value: float = 0) -> Tensor:
    """X (N, L, ...) with ``value`` at and past each length (N,)."""
    X = X.clone()
    X[torch.arange(X.shape[1], device=X.device)[None, :] >= valid_len[:, None]] = value
    return X


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

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class AdditiveAttention(nn.Module):
    """Scores ``w_v^T tanh(W_q q + W_k k)``: (queries, keys, values, valid_lens) -> (B, Lq, dv)."""

    def __init__(self, num_hiddens: int, dropout: float, *, query_size: int, key_size: int) -> None:
        super().__init__()
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        features = self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1)
        scores = self.w_v(torch.tanh(features)).squeeze(-1)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(nn.Module):
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
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(query_size or num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size or num_hiddens, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size or num_hiddens, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        queries = transpose_qkv(self.W_q(queries), self.num_heads)
        keys = transpose_qkv(self.W_k(keys), self.num_heads)
        values = transpose_qkv(self.W_v(values), self.num_heads)
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        return self.W_o(transpose_output(self.attention(queries, keys, values, valid_lens), self.num_heads))


class PositionWiseFFN(nn.Module):
    """(..., num_inputs) -> (..., pw_num_outputs)."""

    def __init__(self, ffn_num_hiddens: int, pw_num_outputs: int, *, num_inputs: int) -> None:
        super().__init__()
        self.dense1 = nn.Linear(num_inputs, ffn_num_hiddens)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(ffn_num_hiddens, pw_num_outputs)

    def forward(self, X: Tensor) -> Tensor:
        return self.dense2(self.relu(self.dense1(X)))


class AddNorm(nn.Module):
    """LayerNorm(X + dropout(Y))."""

    def __init__(self, normalized_shape: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:
        return self.ln(self.dropout(Y) + X)


class PositionalEncoding(nn.Module):
    """dropout(X + P[:, offset : offset + L]); positions past the table are computed, never indexed past it."""

    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 1000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("P", self.table(max_len, num_hiddens))

    @staticmethod
    def table(length: int, num_hiddens: int) -> Tensor:
        X = torch.arange(length, dtype=torch.float64).reshape(-1, 1) / torch.pow(
            10000, torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
        )
        P = torch.zeros((1, length, num_hiddens))
        P[:, :, 0::2] = torch.sin(X)
        P[:, :, 1::2] = torch.cos(X)[:, : num_hiddens // 2]
        return P

    def forward(self, X: Tensor, offset: int = 0) -> Tensor:
        end, P = offset + X.shape[1], self.P
        if P.shape[1] < end:
            P = torch.cat((P, self.table(end, P.shape[2])[:, P.shape[1] :].to(P)), dim=1)
        return self.dropout(X + P[:, offset:end])


class EncoderBlock(nn.Module):
    """Encoder block: (X, valid_lens) -> (B, L, num_hiddens)."""

    def __init__(
        self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float, use_bias: bool = False
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(num_hiddens, num_heads, dropout, use_bias)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm2 = AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, valid_lens: Tensor | None) -> Tensor:
        Y = self.addnorm1(X, self.attention(X, X, X, valid_lens))
        return self.addnorm2(Y, self.ffn(Y))


class DecoderBlock(nn.Module):
    """(X, state) -> (B, T, num_hiddens) and the state: encoder outputs, their lengths, inputs seen by each block."""

    def __init__(self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float, i: int) -> None:
        super().__init__()
        self.i = i
        self.attention1 = MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.attention2 = MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm2 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm3 = AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, state: list) -> tuple[Tensor, list]:
        enc_outputs, enc_valid_lens = state[0], state[1]
        seen = state[2][self.i]
        key_values = X if seen is None else torch.cat((seen, X), dim=1)
        state[2][self.i] = key_values
        if self.training:
            batch_size, num_steps, _ = X.shape
            dec_valid_lens = torch.arange(1, num_steps + 1, device=X.device).repeat(batch_size, 1)
        else:
            dec_valid_lens = None
        Y = self.addnorm1(X, self.attention1(X, key_values, key_values, dec_valid_lens))
        Z = self.addnorm2(Y, self.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens))
        return self.addnorm3(Z, self.ffn(Z)), state


class TransformerEncoder(nn.Module):
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
        super().__init__()
        self.num_hiddens = num_hiddens
        self.embedding = nn.Embedding(vocab_size, num_hiddens)
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)
        self.blks = nn.Sequential()
        for i in range(num_layers):
            self.blks.add_module(f"block{i}", EncoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias))

    def forward(self, X: Tensor, valid_lens: Tensor | None, *args) -> Tensor:
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        self.attention_weights = [None] * len(self.blks)
        for i, blk in enumerate(self.blks):
            X = blk(X, valid_lens)
            self.attention_weights[i] = blk.attention.attention.attention_weights
        return X


class TransformerDecoder(nn.Module):
    """(ids, state) -> logits (B, T, vocab_size) and the state. Positions count on from the state."""

    def __init__(
        self,
        vocab_size: int,
        num_hiddens: int,
        ffn_num_hiddens: int,
        num_heads: int,
        num_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.num_hiddens = num_hiddens
        self.num_layers = num_layers
        self.embedding = nn.Embedding(vocab_size, num_hiddens)
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)
        self.blks = nn.Sequential()
        for i in range(num_layers):
            self.blks.add_module(f"block{i}", DecoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, i))
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def init_state(self, enc_outputs: Tensor, enc_valid_lens: Tensor | None, *args) -> list:
        return [enc_outputs, enc_valid_lens, [None] * self.num_layers]

    def forward(self, X: Tensor, state: list) -> tuple[Tensor, list]:
        # The textbook encodes each decoded token at position 0, which differs from training.
        offset = 0 if state[2][0] is None else state[2][0].shape[1]
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens), offset)
        self.attention_weights = [[None] * len(self.blks) for _ in range(2)]
        for i, blk in enumerate(self.blks):
            X, state = blk(X, state)
            self.attention_weights[0][i] = blk.attention1.attention.attention_weights
            self.attention_weights[1][i] = blk.attention2.attention.attention_weights
        return self.dense(X), state


class EncoderDecoder(nn.Module):
    """(enc_X, dec_X, valid_lens) -> logits and the decoder's state."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, enc_X: Tensor, dec_X: Tensor, *args) -> tuple[Tensor, list]:
        enc_outputs = self.encoder(enc_X, *args)
        return self.decoder(dec_X, self.decoder.init_state(enc_outputs, *args))
