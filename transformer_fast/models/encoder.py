"""The encoder stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layers.attention import LayerMask, layer_mask
from ..layers.encoder import EncoderLayer
from .stack import Stack


class Encoder(Stack):
    """N encoder layers over embedded ids. Arguments and options: see :class:`~transformer_fast.models.Stack`."""

    def __init__(self, vocab_size: int, d_model: int, N: int, heads: int, dropout: float, **options: Any) -> None:
        super().__init__(EncoderLayer, vocab_size, d_model, N, heads, dropout, **options)

    def forward(self, src: Tensor, mask: LayerMask) -> Tensor:
        """Run the encoder: src (B, L) ids; mask: keep mask (B, 1, L) or (B, L, L), or an AttentionMask -> (B, L,
        d_model).

        With a PackedMask src is packed, (T,), and the result is packed too, (T, d_model).
        """
        normal = layer_mask(mask)
        return self.through(self.embedded(src, normal), (normal,), (mask,))
