"""Post-norm encoder and decoder layers."""

from __future__ import annotations

from torch import Tensor, nn

from ...layers.hooks import TAKES_NEED_WEIGHTS, in_role
from ...layers.linear import apply_in_order
from ...layers.norm import LayerNorm, norm_and_sum, unsummed
from .attention import BlockedMask, MultiHeadAttention, needs

EPSILON = 1e-6


def point_wise_feed_forward_network(d_model: int, dff: int) -> nn.Sequential:
    """``Linear(dff)``, ReLU, ``Linear(d_model)`` (Vaswani et al., 2017, section 3.3); parameters ``0.*``, ``2.*``."""
    return nn.Sequential(nn.Linear(d_model, dff), nn.ReLU(), nn.Linear(dff, d_model))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each ``layernorm(x + dropout(sublayer(x)))``, eps 1e-6.

    Args:
        d_model, num_heads, dff: widths and heads.
        rate: dropout probability, on each sublayer's output.
    """

    def __init__(self, d_model: int, num_heads: int, dff: int, rate: float = 0.1) -> None:
        super().__init__()
        self.mha = MultiHeadAttention(d_model, num_heads)
        self.ffn = point_wise_feed_forward_network(d_model, dff)
        self.layernorm1 = LayerNorm(d_model, eps=EPSILON)
        self.layernorm2 = LayerNorm(d_model, eps=EPSILON)
        self.dropout1 = nn.Dropout(rate)
        self.dropout2 = nn.Dropout(rate)

    def forward(self, x: Tensor, mask: BlockedMask = None) -> Tensor:
        """x (B, L, d_model); mask as for :func:`scaled_dot_product_attention` -> (B, L, d_model)."""
        attended, _ = self.mha(x, x, x, mask, **needs(self.mha, False))
        x, _ = norm_and_sum(self.layernorm1, unsummed(x, attended, self.dropout1))
        return norm_and_sum(self.layernorm2, unsummed(x, apply_in_order(self.ffn, x), self.dropout2))[0]


@in_role(TAKES_NEED_WEIGHTS)
class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's output and feed-forward.

    Arguments are those of :class:`EncoderLayer`.
    """

    def __init__(self, d_model: int, num_heads: int, dff: int, rate: float = 0.1) -> None:
        super().__init__()
        self.mha1 = MultiHeadAttention(d_model, num_heads)
        self.mha2 = MultiHeadAttention(d_model, num_heads)
        self.ffn = point_wise_feed_forward_network(d_model, dff)
        self.layernorm1 = LayerNorm(d_model, eps=EPSILON)
        self.layernorm2 = LayerNorm(d_model, eps=EPSILON)
        self.layernorm3 = LayerNorm(d_model, eps=EPSILON)
        self.dropout1 = nn.Dropout(rate)
        self.dropout2 = nn.Dropout(rate)
        self.dropout3 = nn.Dropout(rate)

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
        x, _ = norm_and_sum(self.layernorm1, unsummed(x, attended, self.dropout1))
        attended, weights_2 = self.mha2(enc_output, enc_output, x, padding_mask, **needs(self.mha2, need_weights))
        x, _ = norm_and_sum(self.layernorm2, unsummed(x, attended, self.dropout2))
        x, _ = norm_and_sum(self.layernorm3, unsummed(x, apply_in_order(self.ffn, x), self.dropout3))
        return x, weights_1, weights_2
