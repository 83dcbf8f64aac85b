"""The decoder stack."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..layers.attention import LayerMask, layer_mask
from ..layers.decoder import DecoderLayer, LayerCache
from ..layers.embedding import embed_with_positions
from .stack import Stack


class DecoderCache(Protocol):
    """Generation cache of a decoder: one cache per layer, and the number of positions held."""

    layers: list[LayerCache]
    length: int


class Decoder(Stack):
    """N decoder layers over embedded ids. Arguments and options: see :class:`~transformer_fast.models.Stack`."""

    def __init__(self, vocab_size: int, d_model: int, N: int, heads: int, dropout: float, **options: Any) -> None:
        super().__init__(DecoderLayer, vocab_size, d_model, N, heads, dropout, **options)

    def forward(
        self,
        trg: Tensor,
        e_outputs: Tensor,
        src_mask: LayerMask,
        trg_mask: LayerMask,
        *,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Run the decoder: trg (B, L_trg) ids, e_outputs (B, L_src, d_model); masks as in the layer -> (B, L_trg,
        d_model).

        With PackedMasks trg is (T_trg,), e_outputs (T_src, d_model), and the result (T_trg, d_model). With a cache trg
        is the newest id per row, (rows, 1); the cache replaces e_outputs and the masks, and grows by one position.
        """
        if cache is not None:
            x = embed_with_positions(self.embed, self.pe, trg, cache.length)
            for layer, known in zip(self.layers, cache.layers, strict=True):
                x = layer(x, e_outputs, src_mask, trg_mask, cache=known)
            return self.norm(x)
        source, target = layer_mask(src_mask), layer_mask(trg_mask)
        x = self.embedded(trg, target)
        return self.through(x, (e_outputs, source, target), (e_outputs, src_mask, trg_mask))
