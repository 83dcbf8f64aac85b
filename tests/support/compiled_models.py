"""Models and modules to compile, export and copy, with inputs of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handwritten
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.dialects import bert, d2l, tensorflow
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import d2l as d2l_oracle

VOCABULARY, D = 20, 16
Inputs = Callable[[int], tuple[Any, ...]]


class Padded(nn.Module):
    """`Transformer`, called with lengths and a look-ahead mask."""

    def __init__(self, dropout: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.model = tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, dropout, d_ff=24, **options)

    def forward(self, src: Tensor, trg: Tensor, lengths: Tensor) -> Tensor:
        return self.model(src, trg, tfast.AttentionMask.lengths(lengths), tfast.AttentionMask.causal())


class Windowed(Padded):
    """`Transformer` with a sliding window on either side."""

    def forward(self, src: Tensor, trg: Tensor, lengths: Tensor) -> Tensor:
        masks = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.window(2, 1), tfast.AttentionMask.window(1)
        hidden = self.model.decoder(
            trg, self.model.encoder(src, masks[0]), tfast.AttentionMask.lengths(lengths), masks[1]
        )
        return self.model.out(hidden)


class Stock(nn.Module):
    """Accelerated nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(D, 2, 1, 1, 24, batch_first=True)
        assert len(tfast.accelerate(self).swapped) == 21

    def forward(self, x: Tensor, blocked: Tensor, look_ahead: Tensor) -> Tensor:
        options = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked, "src_is_causal": False}
        return self.model(x, x, tgt_mask=look_ahead, tgt_is_causal=True, **options)


class Packed(nn.Module):
    """``Transformer(packed=True)`` on lengths; its logits or its loss."""

    def __init__(self, loss: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.model = tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, dropout, d_ff=24, packed=True)
        self.loss = loss

    def forward(self, src: Tensor, trg: Tensor, src_lengths: Tensor, trg_lengths: Tensor) -> Tensor:
        masks = AttentionMask.lengths(src_lengths), AttentionMask.lengths(trg_lengths) & AttentionMask.causal()
        if self.loss:
            return self.model.loss(src, trg, *masks, trg, label_smoothing=0.1)
        return self.model(src, trg, *masks)


class PackedWindowed(Packed):
    """``Transformer(packed=True)`` with a sliding window in the targets."""

    def forward(self, src: Tensor, trg: Tensor, src_lengths: Tensor, trg_lengths: Tensor) -> Tensor:
        window = AttentionMask.lengths(trg_lengths) & AttentionMask.window(2)
        return self.model(src, trg, AttentionMask.lengths(src_lengths), window)


class PackedKeep(Packed):
    """``Transformer(packed=True)`` on keep masks, without padding in the targets."""

    def forward(self, src: Tensor, trg: Tensor, src_keep: Tensor, trg_mask: Tensor | None) -> Tensor:
        return self.model(src, trg, src_keep, AttentionMask.causal() if trg_mask is None else trg_mask)


def swapped(model: nn.Module) -> nn.Module:
    """Return an accelerated model."""
    assert tfast.accelerate(model).rows[0].now
    return model


def ids(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (3, length))


def x(length: int) -> Tensor:
    return torch.randn(3, length, D)


def blocked(length: int) -> Tensor:
    """Return the padding mask of three sentences."""
    return torch.arange(length) >= torch.tensor([length, length - 2, 1]).unsqueeze(1)


def keep(length: int) -> Tensor:
    return ~blocked(length).unsqueeze(1)


def padded_inputs(n: int) -> tuple[Tensor, ...]:
    return ids(n), ids(n - 1), torch.tensor([n, n - 2, 1])


def packed_inputs(n: int) -> tuple[Tensor, ...]:
    return *padded_inputs(n), torch.tensor([2, n - 1, n - 2])


def packed_with_holes(n: int) -> tuple[Any, ...]:
    return ids(n), ids(n - 1), torch.rand(3, 1, n) > 0.4, None


AUTO = torch.export.Dim.AUTO
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, tuple[Any, ...]]] = {
    "ours": (Padded, padded_inputs, ({1: AUTO}, {1: AUTO}, {})),
    "RMSNorm": (lambda: Padded(norm="rms"), padded_inputs, ({1: AUTO}, {1: AUTO}, {})),
    "windows": (Windowed, padded_inputs, ({1: AUTO}, {1: AUTO}, {})),
    "nn.Transformer": (
        Stock,
        lambda n: (x(n), blocked(n), nn.Transformer.generate_square_subsequent_mask(n)),
        ({1: AUTO}, {1: AUTO}, {0: AUTO, 1: AUTO}),
    ),
    "hand-written": (
        lambda: swapped(reference.EncoderLayer(D, 2, d_ff=24)), lambda n: (x(n), keep(n)), ({1: AUTO}, {2: AUTO}),
    ),
    "packed": (Packed, packed_inputs, ({1: AUTO}, {1: AUTO}, {}, {})),
    "packed, loss": (lambda: Packed(loss=True), packed_inputs, ({1: AUTO}, {1: AUTO}, {}, {})),
    "packed, a window": (PackedWindowed, packed_inputs, ({1: AUTO}, {1: AUTO}, {}, {})),
    "packed, a keep mask with holes": (PackedKeep, packed_with_holes, ({1: AUTO}, {1: AUTO}, {2: AUTO}, None)),
}  # fmt: skip
"""Inputs of each model for a length, and their dynamic dimensions."""
SIZES = (VOCABULARY, D, 24, 4, 1, 0.1)
PARTS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "attention": (lambda: layers.MultiHeadAttention(2, D), lambda n: (x(n), x(n), x(n), keep(n))),
    "encoder layer": (lambda: layers.EncoderLayer(D, 2, norm_first=False, norm="layer"), lambda n: (x(n), keep(n))),
    "encoder layer with RMSNorm": (lambda: layers.EncoderLayer(D, 2, norm="rms"), lambda n: (x(n), keep(n))),
    "decoder layer": (
        lambda: layers.DecoderLayer(D, 2),
        lambda n: (x(n), x(n), keep(n), layers.subsequentmask(n)),
    ),
    "RMSNorm": (lambda: layers.RMSNorm(D), lambda n: (x(n),)),
    "bert attention": (lambda: bert.MultiHeadedAttention(2, D), lambda n: (x(n), x(n), x(n), keep(n).unsqueeze(1))),
    "bert embedding": (lambda: bert.BERTEmbedding(VOCABULARY, D), lambda n: (ids(n),)),
    "tensorflow attention": (
        lambda: tensorflow.MultiHeadAttention(D, 2),
        lambda n: (x(n), x(n), x(n), blocked(n)[:, None, None].float()),
    ),
    "tensorflow additive": (
        lambda: tensorflow.AdditiveAttention(8, D, D),
        lambda n: (x(n), x(n), x(n), blocked(n)[:, None].float()),
    ),
    "d2l attention": (
        lambda: d2l.MultiHeadAttention(D, 2, 0.1, **dict.fromkeys(("query_size", "key_size", "value_size"), D)),
        lambda n: (x(n), x(n), x(n), torch.tensor([n, n - 2, 1])),
    ),
    "d2l model": (
        lambda: d2l.EncoderDecoder(d2l.TransformerEncoder(*SIZES), d2l.TransformerDecoder(*SIZES)),
        lambda n: (ids(n), ids(n), torch.tensor([n, n - 2, 1])),
    ),
    "nn.TransformerEncoder": (
        lambda: swapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 1)),
        lambda n: (x(n), None, blocked(n)),
    ),
    "swapped bert block": (lambda: swapped(handwritten.BertBlock(D, 2, 24)), lambda n: (x(n), keep(n).unsqueeze(1))),
    "swapped d2l decoder": (
        lambda: swapped(d2l_oracle.TransformerDecoder(*SIZES)),
        lambda n: (ids(n), [x(n), torch.tensor([n, n - 2, 1]), [None]]),
    ),
}
