"""Encoder and decoder stacks, and their combination."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ...layers.embedding import PositionalEncoder
from ...layers.hooks import is_plain
from ...layers.linear import apply_linear
from ..common import embed_with_positions
from .blocks import DecoderBlock, EncoderBlock, State
from .sequences import ValidLens


class PositionalEncoding(PositionalEncoder):
    """Adds the sinusoidal positional encoding, buffer ``P`` (1, max_len, num_hiddens), then dropout.

    A state dict may lack ``P``: the chapter keeps it as a plain attribute.

    Args:
        num_hiddens: width; may be odd.
        dropout: probability.
        max_len: length of the stored table; longer inputs extend it.
    """

    table_name = "P"
    table_is_stored = False

    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 1000) -> None:
        super().__init__(num_hiddens, dropout, max_len)


class _Stack(nn.Module):
    """Base of both stacks: dropout(embedding * sqrt(num_hiddens) + ``P``)."""

    def __init__(self, vocab_size: int, num_hiddens: int, dropout: float) -> None:
        super().__init__()
        self.num_hiddens = num_hiddens
        self.embedding = nn.Embedding(vocab_size, num_hiddens)
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)

    def embedded(self, ids: Tensor, offset: int = 0) -> Tensor:
        """ids (B, L), the first at position ``offset`` -> (B, L, num_hiddens); one pass where all parts are plain."""
        positions, scale = self.pos_encoding, math.sqrt(self.num_hiddens)
        if is_plain(positions, PositionalEncoding):
            return embed_with_positions(ids, self.embedding, positions, positions.dropout, scale=scale, offset=offset)
        x = self.embedding(ids) * scale
        return positions(x, offset) if offset else positions(x)


class TransformerEncoder(_Stack):
    """``num_layers`` encoder blocks, ``blks.block0`` and on, over embedded ids.

    Args:
        vocab_size: number of ids.
        num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias: as for :class:`EncoderBlock`.
        num_layers: number of blocks.
    """

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
            block = EncoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias)
            self.blks.add_module(f"block{i}", block)

    def forward(self, X: Tensor, valid_lens: ValidLens, *args: Any) -> Tensor:
        """ids (B, L), valid_lens (B,) or (B, L) -> (B, L, num_hiddens). Further arguments are ignored."""
        X = self.embedded(X)
        for block in self.blks:
            X = block(X, valid_lens)
        return X

    @property
    def attention_weights(self) -> list[Tensor | None]:
        """Weights of the last call, per block; see :class:`DotProductAttention`."""
        return [block.attention.attention.attention_weights for block in self.blks]


class TransformerDecoder(_Stack):
    """``num_layers`` decoder blocks over embedded ids, and the output layer ``dense``.

    Positions continue from the state, so decoding token by token gives the same results as training on the whole
    target.

    Args:
        vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_layers, dropout: as for :class:`TransformerEncoder`.
        causal_eval: as for :class:`DecoderBlock`.
    """

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
            block = DecoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, i, causal_eval=causal_eval)
            self.blks.add_module(f"block{i}", block)
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def init_state(self, enc_outputs: Tensor, enc_valid_lens: ValidLens, *args: Any) -> State:
        """The state before the first target token. Further arguments are ignored."""
        return [enc_outputs, enc_valid_lens, [None] * self.num_layers]

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """ids (B, T) -> logits (B, T, vocab_size) and the extended state."""
        seen = next((s.shape[1] for s in state[2] if s is not None), 0)
        X = self.embedded(X, offset=seen)
        for block in self.blks:
            X, state = block(X, state)
        return apply_linear(self.dense, X), state

    @property
    def attention_weights(self) -> list[list[Tensor | None]]:
        """Weights of the last call: self-attention and attention to the encoder, each a list with one tensor per
        block."""
        both = ([getattr(block, name) for block in self.blks] for name in ("attention1", "attention2"))
        return [[attend.attention.attention_weights for attend in attends] for attends in both]


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder that starts from its outputs.

    Args:
        encoder: called with ``(enc_X, *args)``, as :class:`TransformerEncoder`.
        decoder: with ``init_state(enc_outputs, *args)``, called with ``(dec_X, state)``, as
            :class:`TransformerDecoder`.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, enc_X: Tensor, dec_X: Tensor, *args: Any) -> tuple[Tensor, State]:
        """enc_X (B, L) and dec_X (B, T) ids; args: valid_lens -> logits (B, T, vocab_size) and the decoder's state."""
        return self.decoder(dec_X, self.decoder.init_state(self.encoder(enc_X, *args), *args))
