"""The encoder layer as a drop-in module."""

from __future__ import annotations

from torch import Tensor, nn

from .attention import LayerMask, MultiHeadAttention
from .feed_forward import FeedForward
from .norm import Sublayer, make_norm, post_norm, pre_norm


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with norm, dropout and residual (Vaswani et al., 2017, section 3.1).

    Dropout, residual addition and the next norm run as one op.

    Args:
        d_model, heads: width and number of heads.
        dropout: probability, on each sublayer's output.
        d_ff: inner width of the feed-forward network.
        norm_first: pre-norm ``x + dropout(sublayer(norm(x)))``; False for post-norm
            ``norm(x + dropout(sublayer(x)))``.
        norm: "std" (:class:`~transformer_fast.layers.Norm`), "layer" (LayerNorm) or "rms" (RMSNorm, eps 1e-6).
        attention_dropout, activation_dropout: on the attention weights and after the activation; ``dropout`` if None.
        activation: "relu", "swish" or "gelu".
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
        self.norm_first = norm_first
        self.norm_1 = make_norm(norm, d_model)
        self.norm_2 = make_norm(norm, d_model)
        self.attn = MultiHeadAttention(heads, d_model, dropout if attention_dropout is None else attention_dropout)
        activation_dropout = dropout if activation_dropout is None else activation_dropout
        self.ff = FeedForward(d_model, d_ff, activation_dropout, activation)
        self.dropout_1 = nn.Dropout(dropout)
        self.dropout_2 = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: LayerMask) -> Tensor:
        """Run the layer on x (B, L, d_model); mask: keep mask (B, 1, L) or (B, L, L), an AttentionMask, or None.

        With a PackedMask x is packed, (T, d_model).
        """
        sublayers = self.sublayers(mask)
        return pre_norm(x, sublayers).summed() if self.norm_first else post_norm(x, sublayers)

    def sublayers(self, mask: LayerMask) -> tuple[Sublayer, ...]:
        """The two sublayers in order, bound to this mask."""
        return (
            (self.norm_1, self.dropout_1, lambda x: self.attn(x, x, x, mask)),
            (self.norm_2, self.dropout_2, self.ff),
        )
