"""The decoder layer as a drop-in module."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from .attention import KeyValues, LayerMask, MultiHeadAttention
from .feed_forward import FeedForward
from .norm import Sublayer, make_norm, post_norm, pre_norm


class LayerCache(NamedTuple):
    """Cached keys and values of a decoder layer's two attentions."""

    own: KeyValues
    cross: KeyValues


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's outputs, and feed-forward (Vaswani et al., 2017, section 3.1).

    Arguments are those of :class:`~transformer_fast.layers.EncoderLayer`.
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
        activation: str = "relu",
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
        activation_dropout = dropout if activation_dropout is None else activation_dropout
        self.ff = FeedForward(d_model, d_ff, activation_dropout, activation)

    def forward(
        self, x: Tensor, e_outputs: Tensor, src_mask: LayerMask, trg_mask: LayerMask, *, cache: LayerCache | None = None
    ) -> Tensor:
        """Run the layer: x (B, L_trg, d_model) and e_outputs (B, L_src, d_model) -> (B, L_trg, d_model).

        src_mask: over the encoder's outputs, keep mask (B, 1, L_src) or an AttentionMask; trg_mask: over x, keep
        mask (B, L_trg, L_trg) or an AttentionMask such as ``AttentionMask.causal()``. If both are a PackedMask, x is
        (T_trg, d_model) and e_outputs (T_src, d_model). With a cache x is the newest position, (rows, 1, d_model); the
        cache replaces e_outputs and both masks.
        """
        sublayers = self.sublayers(e_outputs, src_mask, trg_mask, cache)
        return pre_norm(x, sublayers).summed() if self.norm_first else post_norm(x, sublayers)

    def sublayers(
        self, e_outputs: Tensor, src_mask: LayerMask, trg_mask: LayerMask, cache: LayerCache | None = None
    ) -> tuple[Sublayer, ...]:
        """The three sublayers in order, bound to these inputs."""
        own, cross = ({}, {}) if cache is None else ({"cache": known} for known in cache)
        return (
            (self.norm_1, self.dropout_1, lambda x: self.attn_1(x, x, x, trg_mask, **own)),
            (self.norm_2, self.dropout_2, lambda x: self.attn_2(x, e_outputs, e_outputs, src_mask, **cross)),
            (self.norm_3, self.dropout_3, self.ff),
        )
