"""What encoder and decoder share."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers.decoder import DecoderLayer
from ..layers.embedding import Embedder, PositionalEncoder
from ..layers.encoder import EncoderLayer
from ..layers.hooks import is_plain
from ..layers.norm import LayerNorm, Norm, RMSNorm, Unsummed, make_norm, norm_and_sum, pre_norm
from ..masks import AttentionMask
from ..packing import PackedMask


class Stack(nn.Module):
    """Embedding with positional encoding, N layers that start as copies of one, and (pre-norm) a last norm.

    Args:
        layer_type: class of the layers.
        vocab_size, d_model, N, heads: sizes.
        dropout: probability, everywhere unless ``layer_options`` say otherwise.
        max_len: length of the stored positional table; longer inputs extend it.
        padding_idx: this id's embedding starts at zero and gets no gradient.
        checkpoint_activations: keep no layer's inner results for backward, which computes them again, with the same
            dropout (Chen et al., 2016); an attribute, to be changed at will.
        scale: of the embeddings; None is ``sqrt(d_model)``.
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
        """What enters the first layer: ids (B, L) -> (B, L, d_model); packed by the mask, (T,) -> (T, d_model)."""
        if not isinstance(mask, PackedMask):
            return self.embed.with_positions(ids, self.pe)
        packing, ids = mask.queries, ids.unsqueeze(-1)  # each token is a sequence of its own
        return self.embed.with_positions(ids, self.pe, packing.positions, length=packing.length).squeeze(-2)

    def through(self, x: Tensor, *inputs: Any) -> Tensor:
        """The norm of what leaves the last layer. Between two pre-norm layers the sum that ends one and the norm that
        begins the next are one op; with ``checkpoint_activations`` nothing but the layers' outputs is kept."""
        again = self.checkpoint_activations and torch.is_grad_enabled()
        y: Tensor | Unsummed = x
        for layer in self.layers:
            if not again and _leaves_sum(layer):
                y = pre_norm(y, layer.sublayers(*inputs))
                continue
            y = y.summed() if isinstance(y, Unsummed) else y
            y = checkpoint(layer, y, *inputs, use_reentrant=False) if again else layer(y, *inputs)
        if not isinstance(y, Unsummed):
            return self.norm(y)
        if is_plain(self.norm) and isinstance(self.norm, Norm | LayerNorm | RMSNorm):
            return norm_and_sum(self.norm, y)[0]
        return self.norm(y.summed())


def _leaves_sum(layer: Any) -> TypeGuard[EncoderLayer | DecoderLayer]:
    """Whether a layer need not be called, so that its last sum can be left to the norm that follows."""
    plain = is_plain(layer, EncoderLayer, DecoderLayer)
    return plain and layer.norm_first and isinstance(layer.norm_1, Norm | LayerNorm | RMSNorm)
