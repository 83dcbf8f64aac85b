"""The dialect of the d2l textbook's Transformer chapter: valid lengths for masks, batch and heads folded into one
axis, decoding through a state.

A mask is ``valid_lens``: integers (B,), or (B, Lq) for one length per query; keys at or past the length are blocked,
and a query of length 0 gets uniform weights. Text and oracle: ``transformer_fast.reference.dialects.d2l``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import norm
from ..layers.attention import attend as attend_with
from ..layers.embedding import PositionalEncoder
from ..layers.hooks import ADDS_POSITIONS, SCALED_DOT_PRODUCT, TAKES_MASKS, has_role, in_role, is_plain
from ..layers.linear import apply_linear
from ..masks import AttentionMask
from ..masks.checks import may_be_keep
from ..masks.packing import PackedMask
from ..ops.attention import attention
from ..reference.dialects import d2l as text
from ..reference.dialects.d2l import State, ValidLens, sequence_mask, transpose_output, transpose_qkv
from .common import (
    LAST_WEIGHTS,
    LastWeights,
    additive_scores,
    attend_by_scores,
    embed_with_positions,
    embed_with_table,
    leave_weights,
    merge_heads,
    packed_heads,
    padded_weights,
    project_heads,
    root_of,
)

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "DecoderBlock",
    "DotProductAttention",
    "EncoderBlock",
    "EncoderDecoder",
    "MLPAttention",
    "MultiHeadAttention",
    "PositionWiseFFN",
    "PositionalEncoding",
    "TransformerDecoder",
    "TransformerEncoder",
    "masked_softmax",
    "sequence_mask",
    "transpose_output",
    "transpose_qkv",
]

LayerNorm = norm.LayerNorm
"""The norm of :class:`AddNorm`."""


def masked_softmax(X: Tensor, valid_lens: ValidLens) -> Tensor:
    """Softmax over the last axis of scores (B, Lq, Lk), weight 0 at and past each valid length.

    valid_lens: integers (B,) or (B, Lq), or None. A length of 0 gives uniform weights. 16-bit scores are summed in
    fp32. Raises ValueError for scores of another rank or lengths that do not fit.
    """
    if X.dim() != 3:
        raise ValueError(f"masked_softmax: expected scores (B, Lq, Lk), got shape {tuple(X.shape)}")
    scores = X if X.dtype == torch.float64 else X.float()
    mask = lengths_mask("masked_softmax", valid_lens, *X.shape)
    if mask is not None:
        added = mask.added(*X.shape[1:], scores.dtype)
        if added is not None:
            scores = scores + added.squeeze(1)
        keep = mask.dense(*X.shape[1:], X.device).squeeze(1)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1).to(X.dtype)


def lengths_mask(where: str, valid_lens: ValidLens, B: int, Lq: int, Lk: int) -> AttentionMask | None:
    """AttentionMask of valid lengths; raises for other dtypes and shapes."""
    if valid_lens is None or isinstance(valid_lens, AttentionMask):
        return valid_lens
    if not isinstance(valid_lens, Tensor) or valid_lens.is_floating_point() or valid_lens.dtype == torch.bool:
        what = valid_lens.dtype if isinstance(valid_lens, Tensor) else type(valid_lens).__name__
        raise TypeError(
            f"{where}: valid_lens must be an integer tensor of lengths, got {what}; a bool keep mask goes in as "
            "AttentionMask.keep(mask), a float mask of 1.0 = blocked as AttentionMask.blocked(mask)"
        )
    if valid_lens.shape != (B,) and valid_lens.shape != (B, Lq):
        raise ValueError(
            f"{where}: valid_lens must be (B,) = ({B},) or (B, Lq) = ({B}, {Lq}), got shape {tuple(valid_lens.shape)}"
        )
    return certain_lengths(valid_lens, Lk)


def certain_lengths(lengths: Tensor, Lk: int) -> AttentionMask:
    """AttentionMask of lengths (B,) or (B, Lq) that skips the check for keep masks."""
    if may_be_keep(lengths, Lk):
        return AttentionMask.keep(torch.arange(Lk) < lengths[:, None, :, None])
    return AttentionMask.lengths(lengths)


class _Attention(nn.Module):
    """Attention whose ``attention_weights``, those of the last call, are computed when they are read; None before a
    call and in a copy."""

    attention_weights: Any = LastWeights()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), LAST_WEIGHTS: None}


@in_role(SCALED_DOT_PRODUCT)
class DotProductAttention(_Attention, text.DotProductAttention):
    """Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1).

    ``attention_weights`` (B * heads, Lq, Lk) has the weights of the last call, before dropout and without gradient,
    computed when it is read; None before a call.

    Args:
        dropout: probability, on the attention weights.
    """

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """Attend: queries (B, Lq, d), keys (B, Lk, d), values (B, Lk, dv), valid_lens (B,) or (B, Lq) -> (B, Lq,
        dv)."""
        _three_axes("DotProductAttention", queries, keys, values)
        mask = lengths_mask("DotProductAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        return attend(self, queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), mask).squeeze(1)


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> Tensor:
    """Compute :class:`DotProductAttention` per head: q (B, H, Lq, d), k and v (B, H, Lk, d) -> (B, H, Lq, d)."""
    leave_weights(module, lambda q, k: attention(q, k, k, mask, return_weights=True)[1].flatten(0, 1), q, k)
    return attend_with(module.dropout, q, k, v, mask)


class AdditiveAttention(_Attention, text.AdditiveAttention):
    """Attention with the score ``w_v^T tanh(W_q q + W_k k)`` (Bahdanau, Cho and Bengio, 2015, appendix A.1.2).

    ``attention_weights`` (B, Lq, Lk) as for :class:`DotProductAttention`.

    Args:
        num_hiddens: width of the hidden layer.
        dropout: probability, on the attention weights.
        query_size, key_size: widths; taken from the first call where they are not given (``nn.LazyLinear``).
    """

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """queries (B, Lq, query_size), keys (B, Lk, key_size), values (B, Lk, dv) -> (B, Lq, dv)."""
        _three_axes("AdditiveAttention", queries, keys, values)
        mask = lengths_mask("AdditiveAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        scores = additive_scores(apply_linear(self.W_q, queries), apply_linear(self.W_k, keys), self.w_v)
        leave_weights(self, lambda scores: masked_softmax(scores, mask), scores)
        return attend_by_scores(scores, values, mask, dropout=self.dropout)[0]


MLPAttention = AdditiveAttention
"""Another name of :class:`AdditiveAttention`."""


class MultiHeadAttention(text.MultiHeadAttention):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Args:
        num_hiddens: width of the projections and of the output.
        num_heads: number of heads; must divide ``num_hiddens``.
        dropout: probability, on the attention weights.
        bias: True adds a bias to the four projections.
        query_size, key_size, value_size: widths of the inputs; taken from the first call where they are not given
            (``nn.LazyLinear``).
    """

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """queries (B, Lq, query_size), keys and values (B, Lk, ...), valid_lens (B,) or (B, Lq) ->
        (B, Lq, num_hiddens). ``attention.attention_weights`` then has the weights (B * num_heads, Lq, Lk)."""
        _three_axes("MultiHeadAttention", queries, keys, values)
        mask = lengths_mask("MultiHeadAttention", valid_lens, *queries.shape[:2], keys.shape[1])
        q, k, v = project_heads((self.W_q, self.W_k, self.W_v), (queries, keys, values), self.num_heads)
        if has_role(self.attention, SCALED_DOT_PRODUCT):
            return apply_linear(self.W_o, merge_heads(attend(self.attention, q, k, v, mask)))
        if isinstance(valid_lens, Tensor):
            valid_lens = valid_lens.repeat_interleave(self.num_heads, dim=0)
        heads = self.attention(*(t.flatten(0, 1) for t in (q, k, v)), valid_lens)
        return apply_linear(self.W_o, merge_heads(heads.unflatten(0, (-1, self.num_heads))))


def _three_axes(where: str, *inputs: Tensor) -> None:
    if any(t.dim() != 3 for t in inputs):
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        raise ValueError(f"{where}: queries, keys and values must be (batch, length, width), got {shapes}")


class PositionWiseFFN(text.PositionWiseFFN):
    """``dense2(relu(dense1(X)))``, position by position (Vaswani et al., 2017, section 3.3).

    Args:
        ffn_num_hiddens: inner width.
        pw_num_outputs: width of the output.
        num_inputs: width of the input; taken from the first call where it is not given (``nn.LazyLinear``).
    """

    def forward(self, X: Tensor) -> Tensor:
        """(..., num_inputs) -> (..., pw_num_outputs)."""
        return apply_linear(self.dense2, self.relu(apply_linear(self.dense1, X)))


class AddNorm(text.AddNorm):
    """``LayerNorm(X + dropout(Y))`` in one pass.

    Args:
        normalized_shape: width d, or (d,).
        dropout: probability, on Y.

    Raises:
        ValueError: for a shape of more than one axis: it would norm over positions too.
    """

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:
        """X and Y (..., d) of one shape -> (..., d)."""
        if X.shape != Y.shape:
            raise ValueError(f"AddNorm: X and Y must have one shape, got {tuple(X.shape)} and {tuple(Y.shape)}")
        return norm.norm_and_sum(self.ln, norm.unsummed(X, Y, self.dropout))[0]


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


class EncoderBlock(text.EncoderBlock):
    """Self-attention and feed-forward, each followed by :class:`AddNorm`.

    Args:
        num_hiddens, ffn_num_hiddens, num_heads: widths and heads.
        dropout: probability, on attention weights and sublayer outputs.
        use_bias: True adds a bias to the attention's projections.
    """


class DecoderBlock(text.DecoderBlock):
    """Masked self-attention, attention to the encoder's outputs and feed-forward, each followed by :class:`AddNorm`.

    Args:
        num_hiddens, ffn_num_hiddens, num_heads, dropout: as for :class:`EncoderBlock`.
        i: index of the block in the decoder and in the state.
        causal_eval: False lets each new position see all new positions in evaluation, as in the textbook, which passes
            one position at a time. True lets each position see only positions up to itself, so that a call may have
            several.
    """

    def visible(self, X: Tensor, seen: Tensor | None) -> AttentionMask | None:
        """Return the mask that equals the valid lengths of the text."""
        if self.training:
            return AttentionMask.causal()
        return AttentionMask.causal(0 if seen is None else seen.shape[1]) if self.causal_eval else None


class _Stack(text.Stack):
    """Base of both stacks: one pass where embedding and positions are plain."""

    def embedded(self, ids: Tensor, offset: int = 0) -> Tensor:
        positions, scale = self.pos_encoding, math.sqrt(self.num_hiddens)
        if is_plain(positions, PositionalEncoding):
            return embed_with_positions(ids, self.embedding, positions, positions.dropout, scale=scale, offset=offset)
        return super().embedded(ids, offset)


class TransformerEncoder(text.TransformerEncoder, _Stack):
    """``num_layers`` encoder blocks, ``blks.block0`` and on, over embedded ids.

    Args:
        vocab_size: number of ids.
        num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias: as for :class:`EncoderBlock`.
        num_layers: number of blocks.
    """


class TransformerDecoder(text.TransformerDecoder, _Stack):
    """``num_layers`` decoder blocks over embedded ids, and the output layer ``dense``.

    Positions continue from the state, so decoding token by token gives the same results as training on the whole
    target.

    Args:
        vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_layers, dropout: as for :class:`TransformerEncoder`.
        causal_eval: as for :class:`DecoderBlock`.
    """

    def forward(self, X: Tensor, state: State) -> tuple[Tensor, State]:
        """ids (B, T) -> logits (B, T, vocab_size) and the extended state."""
        X, state = self.through_blocks(self.embedded(X, text.positions_seen(state)), state)
        return apply_linear(self.dense, X), state


class EncoderDecoder(text.EncoderDecoder):
    """An encoder, and a decoder that starts from its outputs.

    Args:
        encoder: called with ``(enc_X, *args)``, as :class:`TransformerEncoder`.
        decoder: with ``init_state(enc_outputs, *args)``, called with ``(dec_X, state)``, as
            :class:`TransformerDecoder`.
    """


def ported_lengths(valid_lens: Any, keys: int) -> Any:
    """AttentionMask of lengths (B,) or (B, Lq) in a port of the text; a length above the number of keys means all
    keys."""
    if not isinstance(valid_lens, Tensor):
        return valid_lens
    return certain_lengths(valid_lens.to(torch.int64).clamp(0, keys), keys)


def ported_attention(m: Any, q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None) -> Tensor:
    """:class:`DotProductAttention` for a port of the text."""
    q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    return attend(m, q, k, v, ported_lengths(valid_lens, k.shape[2])).squeeze(1)


def ported_heads(m: Any, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None) -> Tensor | None:
    """:class:`MultiHeadAttention` for a port of the text; None for a call that the author's ``forward`` must
    compute."""
    if type(m.num_heads) is not int or not has_role(m.attention, SCALED_DOT_PRODUCT):
        return None
    if not isinstance(valid_lens, PackedMask):
        return MultiHeadAttention.forward(m, queries, keys, values, ported_lengths(valid_lens, keys.shape[1]))
    q, k, v = project_heads((m.W_q, m.W_k, m.W_v), (queries, keys, values), m.num_heads)
    leave_weights(m.attention, lambda q, k: padded_weights(q, k, valid_lens).flatten(0, 1), q, k)
    return apply_linear(m.W_o, merge_heads(packed_heads(q, k, v, valid_lens, m.attention.dropout)))


def ported_decoder_block(m: Any, X: Tensor, state: Any) -> Any:
    """:class:`DecoderBlock` for a port of the text: in training each position sees those up to itself, in evaluation
    every one."""
    if not m.training:
        return None if getattr(m, "causal_eval", False) else DecoderBlock.run(m, X, state, None)
    heads = m.attention1
    if not (has_role(heads, TAKES_MASKS) and has_role(heads.attention, SCALED_DOT_PRODUCT)):
        return None
    return DecoderBlock.run(m, X, state, AttentionMask.causal())


def ported_embedded(m: Any, ids: Tensor, offset: int = 0) -> Tensor | None:
    """Input of the first block of a port's stack, in one pass."""
    positions = m.pos_encoding
    if not has_role(positions, ADDS_POSITIONS) or (scale := root_of(m.num_hiddens)) is None:
        return None
    return embed_with_table(ids, m.embedding, positions.P[0], scale, positions.dropout, offset)


def ported_encoder(m: Any, X: Tensor, valid_lens: Any, *others: Any) -> Tensor:
    """Blocks of a port's encoder; the weights are computed when they are read."""
    X = TransformerEncoder.through_blocks(m, X, valid_lens)
    _leave_all_weights(m, TransformerEncoder)
    return X


def ported_decoder(m: Any, ids: Tensor, state: Any, *, counts_on: bool) -> Any:
    """A port's decoder. Positions continue from the state, or begin at 0 in each call, as in the chapter."""
    seen = state[2][0] if counts_on and state[2] else None
    X = ported_embedded(m, ids, 0 if seen is None else seen.shape[1])
    if X is None:
        return None
    X, state = TransformerDecoder.through_blocks(m, X, state)
    _leave_all_weights(m, TransformerDecoder)
    return m.dense(X), state


def _leave_all_weights(m: Any, stack: type) -> None:
    if not torch.compiler.is_compiling():
        m.__dict__[LAST_WEIGHTS] = stack.attention_weights.fget  # type: ignore[attr-defined]
