"""The decoder stack."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ..layers.attention import layer_mask
from ..layers.decoder import DecoderLayer
from ..layers.embedding import Embedder, PositionalEncoder
from ..layers.norm import make_norm
from ..masks import AttentionMask


class Decoder(nn.Module):
    """Embedding with positional encoding in one pass, N decoder layers, and (pre-norm) a last norm.

    Arguments are those of :class:`~transformer_fast.layers.Encoder`.
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
        layer = DecoderLayer(d_model, heads, dropout, norm_first=norm_first, norm=norm, **layer_options)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(N))
        self.norm = make_norm(norm, d_model) if norm_first else nn.Identity()

    def forward(
        self,
        trg: Tensor,
        e_outputs: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
    ) -> Tensor:
        """trg (B, L_trg) ids, e_outputs (B, L_src, d_model); masks as in the layer -> (B, L_trg, d_model)."""
        src_mask, trg_mask = layer_mask(src_mask), layer_mask(trg_mask)
        x = self.embed.with_positions(trg, self.pe)
        for layer in self.layers:
            x = layer(x, e_outputs, src_mask, trg_mask)
        return self.norm(x)
