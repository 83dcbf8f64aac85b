"""The BERT dialect: an encoder's parts, with token + position embedding and weights returned after dropout.

Masks are keep masks that already have their head axis, (B, 1, 1, Lk) or (B, 1, Lq, Lk), bool or integer, 0 or False =
blocked. Text and oracle: ``transformer_fast.reference.dialects.bert``.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..layers.dropout import apply_dropout
from ..layers.embedding import SinusoidalTable
from ..layers.hooks import LOOKS_UP, in_role, is_plain
from ..layers.linear import apply_linear
from ..layers.torch_modules import Embedding
from ..masks import AttentionMask
from ..reference.dialects import bert as text
from .common import attend, embed_with_positions, merge_heads, project_heads, with_head_axis

__all__ = ["Attention", "BERTEmbedding", "MultiHeadedAttention", "PositionalEmbedding", "TokenEmbedding"]

BertMask = Tensor | AttentionMask | None


@in_role(LOOKS_UP)
class TokenEmbedding(text.TokenEmbedding, Embedding):
    """``nn.Embedding`` with ``padding_idx=0``: row 0 is zero and gets no gradient. There is no factor sqrt(d).

    Args:
        vocab_size: number of token ids.
        embed_size: width.
    """


class PositionalEmbedding(SinusoidalTable):
    """Module that returns the sinusoidal positional encoding of its input's length.

    :class:`~transformer_fast.layers.embedding.SinusoidalTable` describes the buffer ``pe`` (1, max_len, d_model).

    Args:
        d_model: width; may be odd.
        max_len: length of the stored table; longer inputs extend it.
    """

    def __init__(self, d_model: int, max_len: int = 512) -> None:
        super().__init__(d_model, max_len)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``pe[:, :L]``, (1, L, d_model), for x (B, L) or (B, L, ...)."""
        length = x.shape[1]
        return self.table(length)[:length].unsqueeze(0)


class BERTEmbedding(text.BERTEmbedding):
    """``dropout(token(ids) + position(ids))`` in one pass.

    Args:
        vocab_size, embed_size: as for :class:`TokenEmbedding`.
        dropout: probability.
        max_len: length of the stored positional table.
    """

    def forward(self, sequence: Tensor) -> Tensor:
        """Embed ids (B, L), int -> (B, L, embed_size)."""
        if is_plain(self.position, PositionalEmbedding):
            return embed_with_positions(sequence, self.token, self.position, self.dropout)
        return apply_dropout(self.dropout, self.token(sequence) + self.position(sequence))


class Attention(text.Attention):
    """``dropout(softmax(query key^T / sqrt(d))) value`` (Vaswani et al., 2017, section 3.2.1). The module has no
    parameters."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BertMask = None,
        dropout: nn.Module | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute output and weights.

        Args:
            query: (B, h, Lq, d), or fewer axes in front.
            key, value: (B, h, Lk, d).
            mask: keep mask with as many dimensions as the scores, broadcastable to (B, h, Lq, Lk), bool or integer; or
                an AttentionMask.
            dropout: module applied to the weights, active in training mode.
            need_weights: False skips the matrix product for the weights and returns None instead of them.

        Returns:
            out (B, h, Lq, d) and p_attn (B, h, Lq, Lk), after dropout.

        Raises:
            ValueError: for a mask without its head axis. TypeError: for a float mask, which is ambiguous.
        """
        if dropout is not None and not isinstance(dropout, nn.Module):
            raise TypeError(f"Attention: dropout must be an nn.Module or None, got {type(dropout).__name__}")
        return attend(
            "Attention",
            query,
            key,
            value,
            _keep("Attention", mask, query.dim()),
            dropout=dropout,
            return_weights="dropped" if need_weights else False,
        )


class MultiHeadedAttention(text.MultiHeadedAttention):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Args:
        h: number of heads; must divide ``d_model``.
        d_model: width.
        dropout: probability, on the attention weights.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: BertMask = None) -> Tensor:
        """Attend: query (B, Lq, d_model); key, value (B, Lk, d_model) -> (B, Lq, d_model).

        mask: keep mask (B, 1, 1, Lk) or (B, 1, Lq, Lk) (axes of 1 may be more), or an AttentionMask.
        """
        keep = _keep("MultiHeadedAttention", mask, 4)
        q, k, v = project_heads(self.linear_layers, (query, key, value), self.h)
        if is_plain(self.attention, Attention):
            heads, _ = self.attention(q, k, v, keep, self.dropout, need_weights=False)
        else:
            heads, _ = self.attention(q, k, v, mask=mask, dropout=self.dropout)
        return apply_linear(self.output_linear, merge_heads(heads))


def _keep(where: str, mask: BertMask, axes: int) -> AttentionMask | None:
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"{where}: mask must be a tensor, an AttentionMask or None, got {type(mask).__name__}")
    if mask.dim() != axes:
        hint = ""
        if axes == 4 and mask.dim() == 3:
            hint = "; give a (B, 1, Lk) or (B, Lq, Lk) mask its head axis with mask.unsqueeze(1)"
        elif axes == 4 and mask.dim() == 2:
            hint = "; give a (B, Lk) padding mask as mask[:, None, None], a (Lq, Lk) mask as mask[None, None]"
        raise ValueError(
            f"{where}: expected a keep mask of {axes} dimensions, like the scores, got shape {tuple(mask.shape)}{hint}"
        )
    return AttentionMask.keep(with_head_axis(mask, axes))
