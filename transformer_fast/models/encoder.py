"""The encoder stack."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ..layers.attention import layer_mask
from ..layers.embedding import Embedder, PositionalEncoder
from ..layers.encoder import EncoderLayer
from ..layers.norm import make_norm
from ..masks import AttentionMask


class Encoder(nn.Module):
    """Embedding with positional encoding in one pass, N layers, and (pre-norm) a last norm.

    Args:
        vocab_size, d_model, N, heads: sizes.
        dropout: probability, everywhere unless ``layer_options`` say otherwise.
        max_len: length of the stored positional table; longer inputs extend it.
        padding_idx: this id's embedding starts at zero and gets no gradient.
        norm_first, norm, layer_options: see :class:`~transformer_fast.layers.EncoderLayer`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        N: int,
        heads: int,
        dropout: float,
        *,
        max_len: int = 5000,
        padding_idx: int | None = None,
        norm_first: bool = True,
        norm: str = "std",
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.embed = Embedder(vocab_size, d_model, padding_idx=padding_idx)
        self.pe = PositionalEncoder(d_model, dropout, max_len)
        layer = EncoderLayer(d_model, heads, dropout, norm_first=norm_first, norm=norm, **layer_options)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(N))
        self.norm = make_norm(norm, d_model) if norm_first else nn.Identity()

    def forward(self, src: Tensor, mask: Tensor | AttentionMask | None) -> Tensor:
        """src (B, L) ids; mask: keep mask (B, 1, L) or (B, L, L), or an AttentionMask -> (B, L, d_model)."""
        mask = layer_mask(mask)
        x = self.embed.with_positions(src, self.pe)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)
