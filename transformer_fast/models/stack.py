"""Base of the encoder and the decoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers.decoder import DecoderLayer
from ..layers.embedding import Embedder, PositionalEncoder, embed_with_positions
from ..layers.encoder import EncoderLayer
from ..layers.hooks import is_plain
from ..layers.norm import Unsummed, make_norm, norm_and_sum, pre_norm
from ..masks import AttentionMask
from ..masks.packing import PackedMask, take, unpack


class Stack(nn.Module):
    """Embedding with positional encoding, N layers with equal initial weights, and (pre-norm) a final norm.

    Args:
        layer_type: class of the layers.
        vocab_size, d_model, N, heads: sizes.
        dropout: probability, in all places that ``layer_options`` do not override.
        max_len: length of the stored positional table; longer inputs extend it.
        padding_idx: id whose embedding starts at zero and gets no gradient.
        checkpoint_activations: recompute the layers' inner results in the backward pass, with the same dropout, instead
            of keeping them (Chen et al., 2016). The attribute of this name may be changed at any time.
        scale: factor of the embeddings; None is ``sqrt(d_model)``.
        positions: layout of the positional table, see :func:`transformer_fast.positional_table`.
        norm_first, norm, layer_options: see :class:`~transformer_fast.layers.EncoderLayer`.
    """

    def __init__(
        self,
        layer_type: type[EncoderLayer | DecoderLayer],
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
        checkpoint_activations: bool = False,
        scale: float | None = None,
        positions: str = "interleaved",
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.embed = Embedder(vocab_size, d_model, padding_idx=padding_idx, scale=scale)
        self.pe = PositionalEncoder(d_model, dropout, max_len, positions)
        layer = layer_type(d_model, heads, dropout, norm_first=norm_first, norm=norm, **layer_options)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(N))
        self.norm = make_norm(norm, d_model) if norm_first else nn.Identity()

    def embedded(self, ids: Tensor, mask: AttentionMask | PackedMask | None) -> Tensor:
        """Input of the first layer: ids (B, L) -> (B, L, d_model); with a packed mask (T,) -> (T, d_model)."""
        if not isinstance(mask, PackedMask):
            return embed_with_positions(self.embed, self.pe, ids)
        packing = mask.queries
        if not is_plain(self.pe, PositionalEncoder):  # the module may support only positions of padded rows
            return take(embed_with_positions(self.embed, self.pe, unpack(ids, packing)), packing)
        each = ids.unsqueeze(-1)  # one sequence per token
        x = embed_with_positions(self.embed, self.pe, each, packing.positions, length=packing.length)
        return x.squeeze(-2)

    def through(self, x: Tensor, inputs: tuple[Any, ...], given: tuple[Any, ...]) -> Tensor:
        """Run the layers and the final norm.

        Between two pre-norm layers, the last sum of a layer and the first norm of the next layer run as one op. With
        ``checkpoint_activations`` only the outputs of the layers are kept for backward.

        Args:
            x: (B, L, d_model), or packed (T, d_model).
            inputs: further arguments of each layer, with masks in normal form.
            given: the same arguments with the caller's original masks, for a layer that is not plain.
        """
        again = self.checkpoint_activations and torch.is_grad_enabled()
        y: Tensor | Unsummed = x
        for layer in self.layers:
            if (is_plain(layer, EncoderLayer) or is_plain(layer, DecoderLayer)) and layer.norm_first and not again:
                y = pre_norm(y, layer.sublayers(*inputs))
                continue
            y = y.summed() if isinstance(y, Unsummed) else y
            arguments = inputs if is_plain(layer, EncoderLayer, DecoderLayer) else given
            y = checkpoint(layer, y, *arguments, use_reentrant=False) if again else layer(y, *arguments)
        return norm_and_sum(self.norm, y)[0]
