"""The dialect of TensorFlow's Transformer tutorial: float masks, 1.0 = blocked; weights with every output; post-norm.

The module's own mode (``train()``, ``eval()``) replaces the tutorial's argument ``training``. All other arguments and
names stay, so weights can be copied by name (a Dense kernel transposed). Text and oracle:
``transformer_fast.reference.dialects.tensorflow``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import backends
from ..layers import norm
from ..layers.embedding import SinusoidalTable
from ..layers.hooks import TAKES_NEED_WEIGHTS, has_role, in_role, is_plain
from ..layers.linear import apply_in_order, apply_linear, is_linear
from ..masks import AttentionMask
from ..masks.checks import four_dimensions
from ..masks.packing import PackedMask
from ..ops.embedding import positional_table
from ..ops.linear import linear
from ..reference.dialects import tensorflow as text
from ..reference.dialects.tensorflow import (
    create_look_ahead_mask,
    create_masks,
    create_padding_mask,
    get_angles,
    point_wise_feed_forward_network,
)
from .common import (
    additive_scores,
    attend,
    attend_by_scores,
    embed_with_positions,
    embed_with_table,
    merge_heads,
    packed_heads,
    project_heads,
    root_of,
    with_head_axis,
    with_padded_weights,
)

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "MultiHeadAttention",
    "Transformer",
    "create_look_ahead_mask",
    "create_masks",
    "create_padding_mask",
    "get_angles",
    "point_wise_feed_forward_network",
    "positional_encoding",
    "scaled_dot_product_attention",
]

LayerNorm = norm.LayerNorm
"""The norm of the layers."""
BlockedMask = Tensor | AttentionMask | None
"""A float mask broadcastable to (B, H, Lq, Lk), 1.0 = blocked and 0.0 = kept; an AttentionMask; or None."""


def positional_encoding(position: int, d_model: int) -> Tensor:
    """The sinusoidal encoding of positions 0 to position - 1, fp32 (1, position, d_model); sines in even dimensions."""
    return positional_table(position, d_model).unsqueeze(0)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockedMask, *, need_weights: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute ``softmax(q k^T / sqrt(d) + mask * -1e9) v`` and the weights (Vaswani et al., 2017, section 3.2.1).

    Args:
        q: (..., Lq, d), two to four dimensions.
        k, v: (..., Lk, d) and (..., Lk, dv).
        mask: float, 1.0 = blocked, broadcastable to (..., Lq, Lk); an AttentionMask; or None.
        need_weights: False skips the matrix product for the weights and returns None instead of them.

    Returns:
        out (..., Lq, dv) and weights (..., Lq, Lk).

    Raises:
        TypeError: for a bool or integer mask, which is ambiguous.
        ValueError: for a float mask that holds more than 0.0 and 1.0 (checked on CPU), or does not fit.
    """
    where = "scaled_dot_product_attention"
    return attend(where, q, k, v, blocked_mask(where, mask, q.dim()), return_weights=need_weights)


@in_role(TAKES_NEED_WEIGHTS)
class MultiHeadAttention(text.MultiHeadAttention):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2) without attention dropout; note the order v, k, q.

    Args:
        d_model: width.
        num_heads: number of heads; must divide ``d_model``.
    """

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """v, k (B, Lk, d_model), q (B, Lq, d_model) -> out (B, Lq, d_model) and weights (B, num_heads, Lq, Lk).

        mask, need_weights: as for :func:`scaled_dot_product_attention`.
        """
        mask = blocked_mask("MultiHeadAttention", mask)
        q, k, v = project_heads((self.wq, self.wk, self.wv), (q, k, v), self.num_heads)
        out, weights = attend("MultiHeadAttention", q, k, v, mask, return_weights=need_weights)
        return apply_linear(self.dense, merge_heads(out)), weights


def needs(module: nn.Module, need_weights: bool) -> dict[str, bool]:
    """Return ``need_weights`` as an argument for an attention or layer that takes it, else no argument."""
    return {"need_weights": need_weights} if has_role(module, TAKES_NEED_WEIGHTS) else {}


def blocked_mask(where: str, mask: BlockedMask, axes: int = 4) -> AttentionMask | None:
    """Convert a mask over scores of ``axes`` dimensions to normal form."""
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"{where}: mask must be a float tensor, an AttentionMask or None, got {type(mask).__name__}")
    if not mask.is_floating_point():
        raise TypeError(
            f"{where}: a mask of this dialect is float, 1.0 = blocked; a {mask.dtype} one can be read two ways. "
            "If True or 1 means blocked, pass mask.float(); if it means kept, pass AttentionMask.keep(mask)."
        )
    if mask.dim() > axes or (axes == 4 and mask.dim() == 3):
        hint = "; pass mask[:, None] if its first axis is the batch, mask[None] if it is the heads"
        raise ValueError(
            f"{where}: mask of shape {tuple(mask.shape)} does not fit scores of {axes} dimensions"
            + (hint if mask.dim() == 3 else "")
        )
    # On a GPU this check would wait for the device.
    checked = mask.device.type == "cpu" and not (torch.compiler.is_compiling() or backends.in_transform())
    if checked and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{where}: a mask of this dialect holds 1.0 for blocked and 0.0 for kept, and nothing else. If it is added "
            "to the scores as it is, pass AttentionMask.bias(mask)."
        )
    return AttentionMask.blocked(with_head_axis(mask, axes))


class EncoderLayer(text.EncoderLayer):
    """Self-attention and feed-forward, each ``layernorm(x + dropout(sublayer(x)))``, eps 1e-6.

    Args:
        d_model, num_heads, dff: widths and heads.
        rate: dropout probability, on each sublayer's output.
    """

    def forward(self, x: Tensor, mask: BlockedMask = None) -> Tensor:
        """x (B, L, d_model); mask as for :func:`scaled_dot_product_attention` -> (B, L, d_model)."""
        attended, _ = self.mha(x, x, x, mask, **needs(self.mha, False))
        x, _ = norm.norm_and_sum(self.layernorm1, norm.unsummed(x, attended, self.dropout1))
        return norm.norm_and_sum(self.layernorm2, norm.unsummed(x, apply_in_order(self.ffn, x), self.dropout2))[0]


@in_role(TAKES_NEED_WEIGHTS)
class DecoderLayer(text.DecoderLayer):
    """Masked self-attention, attention to the encoder's output and feed-forward.

    Arguments are those of :class:`EncoderLayer`.
    """

    def forward(
        self,
        x: Tensor,
        enc_output: Tensor,
        look_ahead_mask: BlockedMask = None,
        padding_mask: BlockedMask = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x (B, L_tar, d_model), enc_output (B, L_inp, d_model) -> (B, L_tar, d_model) and the weights of both blocks.

        look_ahead_mask is over x, padding_mask over enc_output; each as for :func:`scaled_dot_product_attention`.
        """
        attended, weights_1 = self.mha1(x, x, x, look_ahead_mask, **needs(self.mha1, need_weights))
        x, _ = norm.norm_and_sum(self.layernorm1, norm.unsummed(x, attended, self.dropout1))
        attended, weights_2 = self.mha2(enc_output, enc_output, x, padding_mask, **needs(self.mha2, need_weights))
        x, _ = norm.norm_and_sum(self.layernorm2, norm.unsummed(x, attended, self.dropout2))
        x, _ = norm.norm_and_sum(self.layernorm3, norm.unsummed(x, apply_in_order(self.ffn, x), self.dropout3))
        return x, weights_1, weights_2


class _Stack(text.Embedded, SinusoidalTable):
    """Base of both stacks: dropout(embedding * sqrt(d_model) + ``pos_encoding``).

    ``pos_encoding`` is a buffer; a state dict may lack it, since the tutorial's checkpoints do.
    """

    table_name = "pos_encoding"
    table_is_stored = False

    def __init__(self, d_model: int, vocab_size: int, maximum_position_encoding: int, rate: float) -> None:
        SinusoidalTable.__init__(self, d_model, maximum_position_encoding)
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(rate)

    def embedded(self, ids: Tensor) -> Tensor:
        """ids (B, L) -> (B, L, d_model), in one pass."""
        return embed_with_positions(ids, self.embedding, self, self.dropout, scale=math.sqrt(self.d_model))


class Encoder(text.Encoder, _Stack):
    """``num_layers`` encoder layers over embedded ids.

    Args:
        num_layers, d_model, num_heads, dff: sizes.
        input_vocab_size: number of source ids.
        maximum_position_encoding: length of the stored positional table; longer inputs extend it.
        rate: dropout probability.
    """

    def forward(self, x: Tensor, mask: BlockedMask = None) -> Tensor:
        """ids (B, L_inp); mask such as :func:`create_padding_mask` -> (B, L_inp, d_model)."""
        normal = blocked_mask("Encoder", mask)
        x = self.embedded(x)
        for layer in self.enc_layers:
            x = layer(x, normal if is_plain(layer, EncoderLayer) else mask)
        return x


class Decoder(text.Decoder, _Stack):
    """``num_layers`` decoder layers over embedded ids; arguments as for :class:`Encoder`."""

    def forward(
        self,
        x: Tensor,
        enc_output: Tensor,
        look_ahead_mask: BlockedMask = None,
        padding_mask: BlockedMask = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """ids (B, L_tar) and enc_output (B, L_inp, d_model) -> (B, L_tar, d_model) and the weights by name.

        The names are ``decoder_layer1_block1`` (self-attention), ``decoder_layer1_block2`` (attention to the encoder)
        and so on, each (B, num_heads, L_tar, L_tar or L_inp). Without ``need_weights`` None replaces the dictionary.
        """
        given = look_ahead_mask, padding_mask
        normal = tuple(blocked_mask("Decoder", mask) for mask in given)
        masks = [normal if is_plain(layer, DecoderLayer) else given for layer in self.dec_layers]
        x, weights = through_decoder(self.dec_layers, self.embedded(x), enc_output, masks, need_weights)
        return x, weights if need_weights else None


def through_decoder(
    layers: nn.ModuleList,
    x: Tensor,
    enc_output: Tensor,
    masks: Sequence[tuple[BlockedMask, BlockedMask]],
    need_weights: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run decoder layers, each with its look-ahead and padding mask. Return the output, and all weights by name."""
    weights = {}
    for number, (layer, both_masks) in enumerate(zip(layers, masks, strict=True), start=1):
        x, *both = layer(x, enc_output, *both_masks, **needs(layer, need_weights))
        weights |= {f"decoder_layer{number}_block{block}": w for block, w in enumerate(both, start=1)}
    return x, weights


class Transformer(text.Transformer):
    """The tutorial's encoder-decoder Transformer.

    Args:
        num_layers, d_model, num_heads, dff: sizes of both stacks.
        input_vocab_size, target_vocab_size: numbers of ids.
        pe_input, pe_target: lengths of the stored positional tables.
        rate: dropout probability.
    """

    def forward(
        self,
        inp: Tensor,
        tar: Tensor,
        enc_padding_mask: BlockedMask = None,
        look_ahead_mask: BlockedMask = None,
        dec_padding_mask: BlockedMask = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """inp (B, L_inp) and tar (B, L_tar) ids; masks from :func:`create_masks`, or AttentionMasks.

        Returns logits (B, L_tar, target_vocab_size) and the decoder's weights (see :class:`Decoder`). In training,
        ``need_weights=False`` saves the matrix products for the weights.
        """
        enc_output = self.encoder(inp, enc_padding_mask)
        x, weights = self.decoder(tar, enc_output, look_ahead_mask, dec_padding_mask, need_weights=need_weights)
        return apply_linear(self.final_layer, x), weights


class AdditiveAttention(text.AdditiveAttention):
    """Attention with the additive score ``v^T tanh(W [k; q])`` (Bahdanau, Cho and Bengio, 2015), not scaled.

    ``W [k; q]`` is the sum of two projections, so each key and each query is projected once, not once per pair.

    Args:
        units: width of the hidden layer.
        key_size, query_size: widths of keys and queries.
    """

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """v (B, Lk, d), k (B, Lk, key_size), q (B, Lq, query_size) -> out (B, Lq, d) and weights (B, Lq, Lk).

        mask: float blocked mask broadcastable to (B, Lq, Lk), or an AttentionMask.
        """
        scores = self.scores(k, q)
        return attend_by_scores(scores, v, blocked_mask("AdditiveAttention", mask, 3), return_weights=need_weights)

    def scores(self, k: Tensor, q: Tensor) -> Tensor:
        if not is_linear(self.W):
            return super().scores(k, q)
        query, key = linear(q, self.W.weight[:, self.key_size :]), linear(k, self.W.weight[:, : self.key_size])
        return additive_scores(query, key, self.v)


class BilinearAttention(text.BilinearAttention):
    """Attention with the bilinear score ``(W_k k)^T (W_q q)`` (Luong, Pham and Manning, "Effective approaches to
    attention-based neural machine translation", 2015, section 3.1, "general"), not scaled.

    Args:
        units: width of both projections.
        key_size, query_size: widths of keys and queries.
    """

    def forward(
        self, v: Tensor, k: Tensor, q: Tensor, mask: BlockedMask = None, *, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as :class:`AdditiveAttention` does."""
        mask = blocked_mask("BilinearAttention", mask, 3)
        query, key = apply_linear(self.W_q, q), apply_linear(self.W_k, k)
        return attend("BilinearAttention", query, key, v, mask, scale=1.0, return_weights=need_weights)


def ported_mask(mask: Any) -> Any:
    """Normal form of a mask of a port of the tutorial: anything but 0 blocks."""
    return AttentionMask.blocked(four_dimensions(mask)) if isinstance(mask, Tensor) else mask


def ported_heads(
    m: Any, v: Tensor, k: Tensor, q: Tensor, mask: Any = None, need_weights: bool = True
) -> tuple[Tensor, Tensor | None] | None:
    """:class:`MultiHeadAttention` for a port of the tutorial; None for a call that the author's ``forward`` must
    compute."""
    heads, width = m.num_heads, getattr(m.wq, "out_features", 0)
    if type(heads) is not int or heads < 1:
        return None
    if getattr(m, "depth", width // heads) != width // heads or getattr(m, "d_model", width) != width:
        return None
    if not isinstance(mask, PackedMask):
        return MultiHeadAttention.forward(m, v, k, q, ported_mask(mask), need_weights=need_weights)
    q, k, v = project_heads((m.wq, m.wk, m.wv), (q, k, v), heads)
    out, weights = with_padded_weights(q, k, v, mask) if need_weights else (packed_heads(q, k, v, mask), None)
    return apply_linear(m.dense, merge_heads(out)), weights


def ported_embedded(m: Any, ids: Tensor) -> Tensor | None:
    """Input of the first layer of a port's stack, in one pass."""
    if (scale := root_of(m.d_model)) is None or m.pos_encoding.dim() != 3:
        return None
    return embed_with_table(ids, m.embedding, m.pos_encoding[0], scale, m.dropout)


def ported_encoder(m: Any, x: Tensor, *mask: Any) -> Tensor:
    """Layers of a port's encoder."""
    for layer in m.enc_layers:
        x = layer(x, *mask)
    return x


def ported_decoder(m: Any, x: Tensor, enc_output: Tensor, *masks: Any) -> Any:
    """Layers of a port's decoder."""
    return through_decoder(m.dec_layers, x, enc_output, [masks] * len(m.dec_layers))
