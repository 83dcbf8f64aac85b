"""Encoder and decoder stacks, and the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from ...layers.embedding import SinusoidalTable
from ...layers.hooks import is_plain
from ...layers.linear import apply_linear
from ..common import embed_with_positions
from .attention import BlockedMask, blocked_mask, needs
from .layers import DecoderLayer, EncoderLayer


class _Stack(SinusoidalTable):
    """Base of both stacks: dropout(embedding * sqrt(d_model) + ``pos_encoding``).

    ``pos_encoding`` is a buffer; a state dict may lack it, since the tutorial's checkpoints do.
    """

    table_name = "pos_encoding"
    table_is_stored = False

    def __init__(self, d_model: int, vocab_size: int, maximum_position_encoding: int, rate: float) -> None:
        super().__init__(d_model, maximum_position_encoding)
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(rate)

    def embedded(self, ids: Tensor) -> Tensor:
        """ids (B, L) -> (B, L, d_model), in one pass."""
        return embed_with_positions(ids, self.embedding, self, self.dropout, scale=math.sqrt(self.d_model))


class Encoder(_Stack):
    """``num_layers`` encoder layers over embedded ids.

    Args:
        num_layers, d_model, num_heads, dff: sizes.
        input_vocab_size: number of source ids.
        maximum_position_encoding: length of the stored positional table; longer inputs extend it.
        rate: dropout probability.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        input_vocab_size: int,
        maximum_position_encoding: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__(d_model, input_vocab_size, maximum_position_encoding, rate)
        self.num_layers = num_layers
        self.enc_layers = nn.ModuleList(EncoderLayer(d_model, num_heads, dff, rate) for _ in range(num_layers))

    def forward(self, x: Tensor, mask: BlockedMask = None) -> Tensor:
        """ids (B, L_inp); mask such as :func:`create_padding_mask` -> (B, L_inp, d_model)."""
        normal = blocked_mask("Encoder", mask)
        x = self.embedded(x)
        for layer in self.enc_layers:
            x = layer(x, normal if is_plain(layer, EncoderLayer) else mask)
        return x


class Decoder(_Stack):
    """``num_layers`` decoder layers over embedded ids; arguments as for :class:`Encoder`."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        target_vocab_size: int,
        maximum_position_encoding: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__(d_model, target_vocab_size, maximum_position_encoding, rate)
        self.num_layers = num_layers
        self.dec_layers = nn.ModuleList(DecoderLayer(d_model, num_heads, dff, rate) for _ in range(num_layers))

    def forward(
        self,
        x: Tensor,
        enc_output: Tensor,
        look_ahead_mask: BlockedMask = None,
        padding_mask: BlockedMask = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """ids (B, L_tar) and enc_output (B, L_inp, d_model) -> (B, L_tar, d_model) and the weights by name.

        The names are ``decoder_layer1_block1`` (self-attention), ``decoder_layer1_block2`` (attention to the encoder)
        and so on, each (B, num_heads, L_tar, L_tar or L_inp). Without ``need_weights`` None replaces the dictionary.
        """
        given = look_ahead_mask, padding_mask
        normal = tuple(blocked_mask("Decoder", mask) for mask in given)
        masks = [normal if is_plain(layer, DecoderLayer) else given for layer in self.dec_layers]
        x, weights = through_decoder(self.dec_layers, self.embedded(x), enc_output, masks, need_weights)
        return x, weights if need_weights else None


def through_decoder(
    layers: nn.ModuleList,
    x: Tensor,
    enc_output: Tensor,
    masks: Sequence[tuple[BlockedMask, BlockedMask]],
    need_weights: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run decoder layers, each with its look-ahead and padding mask. Return the output, and all weights by name."""
    weights = {}
    for number, (layer, both_masks) in enumerate(zip(layers, masks, strict=True), start=1):
        x, *both = layer(x, enc_output, *both_masks, **needs(layer, need_weights))
        weights |= {f"decoder_layer{number}_block{block}": w for block, w in enumerate(both, start=1)}
    return x, weights


class Transformer(nn.Module):
    """The tutorial's encoder-decoder Transformer.

    Args:
        num_layers, d_model, num_heads, dff: sizes of both stacks.
        input_vocab_size, target_vocab_size: numbers of ids.
        pe_input, pe_target: lengths of the stored positional tables.
        rate: dropout probability.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        input_vocab_size: int,
        target_vocab_size: int,
        pe_input: int,
        pe_target: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(num_layers, d_model, num_heads, dff, input_vocab_size, pe_input, rate)
        self.decoder = Decoder(num_layers, d_model, num_heads, dff, target_vocab_size, pe_target, rate)
        self.final_layer = nn.Linear(d_model, target_vocab_size)

    def forward(
        self,
        inp: Tensor,
        tar: Tensor,
        enc_padding_mask: BlockedMask = None,
        look_ahead_mask: BlockedMask = None,
        dec_padding_mask: BlockedMask = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """inp (B, L_inp) and tar (B, L_tar) ids; masks from :func:`create_masks`, or AttentionMasks.

        Returns logits (B, L_tar, target_vocab_size) and the decoder's weights (see :class:`Decoder`). In training,
        ``need_weights=False`` saves the matrix products for the weights.
        """
        enc_output = self.encoder(inp, enc_padding_mask)
        x, weights = self.decoder(tar, enc_output, look_ahead_mask, dec_padding_mask, need_weights=need_weights)
        return apply_linear(self.final_layer, x), weights
