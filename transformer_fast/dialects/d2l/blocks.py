"""Encoder and decoder blocks, and their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...layers.linear import apply_linear
from ...layers.norm import LayerNorm, norm_and_sum, unsummed
from ...masks import AttentionMask
from ...tracing import sizes
from .attention import MultiHeadAttention, linear
from .sequences import ValidLens

State = list[Any]
"""State of a decoder: the encoder's outputs (B, L, h), their valid lengths, and per block the inputs so far (B, T, h),
or None before the first input."""


class PositionWiseFFN(nn.Module):
    """``dense2(relu(dense1(X)))``, position by position (Vaswani et al., 2017, section 3.3).

    Args:
        ffn_num_hiddens: inner width.
        pw_num_outputs: width of the output.
        num_inputs: width of the input; taken from the first call where it is not given (``nn.LazyLinear``).
    """

    def __init__(self, ffn_num_hiddens: int, pw_num_outputs: int, *, num_inputs: int | None = None) -> None:
        super().__init__()
        self.dense1 = linear(num_inputs, ffn_num_hiddens)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(ffn_num_hiddens, pw_num_outputs)

    def forward(self, X: Tensor) -> Tensor:
        """(..., num_inputs) -> (..., pw_num_outputs)."""
        return apply_linear(self.dense2, self.relu(apply_linear(self.dense1, X)))


class AddNorm(nn.Module):
    """``LayerNorm(X + dropout(Y))`` in one pass.

    Args:
        normalized_shape: width d, or (d,).
        dropout: probability, on Y.

    Raises:
        ValueError: for a shape of more than one axis: it would norm over positions too.
    """

    def __init__(self, normalized_shape: int | tuple[int, ...] | list[int], dropout: float) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(
                f"AddNorm: normalized_shape {shape} would normalise over positions, not per vector; pass its last "
                "number only"
            )
        self.dropout = nn.Dropout(dropout)
        self.ln = LayerNorm(shape)

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:
        """X and Y (..., d) of one shape -> (..., d)."""
        if sizes(X) != sizes(Y):
            raise ValueError(f"AddNorm: X and Y must have one shape, got {tuple(X.shape)} and {tuple(Y.shape)}")
        return norm_and_sum(self.ln, unsummed(X, Y, self.dropout))[0]


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward, each followed by :class:`AddNorm`.

    Args:
        num_hiddens, ffn_num_hiddens, num_heads: widths and heads.
        dropout: probability, on attention weights and sublayer outputs.
        use_bias: True adds a bias to the attention's projections.
    """

    def __init__(
        self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float, use_bias: bool = False
    ) -> None:
        super().__init__()
        self.attention = _self_sized(num_hiddens, num_heads, dropout, use_bias)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm2 = AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, valid_lens: ValidLens) -> Tensor:
        """X (B, L, num_hiddens), valid_lens (B,) or (B, L) -> (B, L, num_hiddens)."""
        Y = self.addnorm1(X, self.attention(X, X, X, valid_lens))
        return self.addnorm2(Y, self.ffn(Y))


class DecoderBlock(nn.Module):
    """Masked self-attention, attention to the encoder's outputs and feed-forward, each followed by :class:`AddNorm`.

    Args:
        num_hiddens, ffn_num_hiddens, num_heads, dropout: as for :class:`EncoderBlock`.
        i: index of the block in the decoder and in the state.
        causal_eval: False lets each new position see all new positions in evaluation, as in the textbook, which passes
            one position at a time. True lets each position see only positions up to itself, so that a call may have
            several.
    """

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
        self.attention1 = _self_sized(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.attention2 = _self_sized(num_hiddens, num_heads, dropout)
        self.addnorm2 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens, num_inputs=num_hiddens)
        self.addnorm3 = AddNorm(num_hiddens, dropout)

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """X (B, T, num_hiddens) -> (B, T, num_hiddens) and the state, with X appended to the earlier inputs.

        In training position t attends to the first t + 1 (valid lengths 1 to T); in evaluation to the whole state.
        """
        return run_decoder_block(self, X, state, causal_eval=self.causal_eval)


def run_decoder_block(block: nn.Module, X: Tensor, state: State, *, causal_eval: bool = False) -> tuple[Tensor, State]:
    """Compute a :class:`DecoderBlock`, for any module with the same parts."""
    enc_outputs, enc_valid_lens = state[0], state[1]
    seen = state[2][block.i]
    key_values = X if seen is None else torch.cat((seen, X), dim=1)
    state[2][block.i] = key_values
    mask = None
    if block.training:
        mask = AttentionMask.causal()  # equals valid lengths 1 to T
    elif causal_eval:
        mask = AttentionMask.causal(0 if seen is None else sizes(seen)[1])
    Y = block.addnorm1(X, block.attention1(X, key_values, key_values, mask))
    Z = block.addnorm2(Y, block.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens))
    return block.addnorm3(Z, block.ffn(Z)), state


def _self_sized(num_hiddens: int, num_heads: int, dropout: float, bias: bool = False) -> MultiHeadAttention:
    sizes = dict.fromkeys(("query_size", "key_size", "value_size"), num_hiddens)
    return MultiHeadAttention(num_hiddens, num_heads, dropout, bias, **sizes)
