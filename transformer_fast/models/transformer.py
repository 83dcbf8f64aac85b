"""The whole encoder-decoder Transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.linear import apply_linear, is_linear
from ..masks import AttentionMask
from ..masks.packing import PackedMask, Packing, take, unpack
from ..ops import linear_cross_entropy
from .decoder import Decoder
from .encoder import Encoder
from .packed import padder_of


class Transformer(nn.Module):
    """The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) on fused kernels.

    Args:
        src_vocab, trg_vocab: vocabulary sizes.
        d_model, N, heads: width, layers in each stack, heads (dividing ``d_model``). N, heads and ``d_ff`` may each be
            a pair, for encoder and decoder.
        dropout: probability.
        tie_weights: True shares one matrix among both embeddings and the output layer (one vocabulary);
            "decoder" shares the target embedding and the output layer.
        packed: remove the padding of a batch before the first layer, so that no layer computes padding. Outputs and
            gradients stay the same, except zeros at padded targets. The attribute of this name may be changed at any
            time.
        options: ``norm_first``, ``norm``, ``activation``, ``max_len``, ``padding_idx``, ``attention_dropout``,
            ``activation_dropout``, ``checkpoint_activations``, ``scale``, ``positions``; see
            :class:`~transformer_fast.models.Stack`.

    Raises:
        ValueError: if ``heads`` does not divide ``d_model``, or if vocabularies to be tied differ.

    Example:
        >>> model = tfast.Transformer(100, 120, d_model=32, N=2, heads=4, dropout=0.1)
        >>> src, trg = torch.randint(1, 100, (2, 7)), torch.randint(1, 120, (2, 5))
        >>> padding = tfast.AttentionMask.lengths(torch.tensor([7, 4]))
        >>> model(src, trg, padding, tfast.AttentionMask.causal()).shape
        torch.Size([2, 5, 120])
    """

    def __init__(
        self,
        src_vocab: int,
        trg_vocab: int,
        d_model: int,
        N: int | tuple[int, int],
        heads: int | tuple[int, int],
        dropout: float,
        *,
        d_ff: int | tuple[int, int] = 2048,
        tie_weights: bool | str = False,
        packed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if tie_weights not in (False, True, "decoder"):
            raise ValueError(f'tie_weights: expected False, True or "decoder", got {tie_weights!r}')
        if tie_weights is True and src_vocab != trg_vocab:
            raise ValueError(f"tie_weights=True needs one vocabulary, got {src_vocab} and {trg_vocab}")
        self.packed = packed
        layers, heads, d_ff = ((size, size) if isinstance(size, int) else size for size in (N, heads, d_ff))
        self.encoder = Encoder(src_vocab, d_model, layers[0], heads[0], dropout, d_ff=d_ff[0], **options)
        self.decoder = Decoder(trg_vocab, d_model, layers[1], heads[1], dropout, d_ff=d_ff[1], **options)
        self.out = nn.Linear(d_model, trg_vocab)
        if tie_weights:
            self.out.weight = self.decoder.embed.lut.weight
        if tie_weights is True:
            self.encoder.embed.lut.weight = self.decoder.embed.lut.weight

    def forward(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
    ) -> Tensor:
        """Logits for every target position.

        Args:
            src, trg: (B, L_src) and (B, L_trg) token ids.
            src_mask: visible source positions: keep mask (B, 1, L_src), or e.g. ``AttentionMask.lengths(src_lengths)``.
            trg_mask: target positions visible to each target position: keep mask (B, L_trg, L_trg), or e.g.
                ``AttentionMask.causal()``.

        Returns:
            (B, L_trg, trg_vocab), before softmax.

        With ``packed`` the masks give the padding and must hold nothing else: src_mask a keep mask (B, 1, L_src) or an
        AttentionMask of padding; trg_mask an AttentionMask of padding and look-ahead, such as
        ``AttentionMask.lengths(trg_lengths) & AttentionMask.causal()`` (``causal()`` alone: no target is padded), or on
        a CPU an equivalent dense keep mask. Logits of padded targets are 0. If a source has no tokens, attention to it
        gives 0. On a GPU the host waits once, unless the lengths are on the CPU. With ``torch.compile`` and
        ``torch.export`` the number of tokens is symbolic, and dense target masks are refused.

        Raises:
            ValueError: with ``packed``, for a mask with parts other than padding (and, for the target, look-ahead).
        """
        hidden, queries = self._hidden(src, trg, src_mask, trg_mask)
        logits = apply_linear(self.out, hidden)
        return logits if queries is None else unpack(logits, queries)

    def loss(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
        target: Tensor,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Label-smoothed cross entropy of the logits; the full logits are never in memory.

        Args:
            src, trg, src_mask, trg_mask: as for :meth:`forward`.
            target: (B, L_trg) int64, the expected token per target position; positions with ``ignore_index`` are left
                out.
            label_smoothing, ignore_index: as for :func:`transformer_fast.linear_cross_entropy`.
            reduction: "mean" or "sum".

        Returns:
            A scalar in float32 (float64 for float64), for 16-bit models too.

        Raises:
            ValueError: for another reduction.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f'Transformer.loss: reduction must be "mean" or "sum", got {reduction!r}')
        hidden, queries = self._hidden(src, trg, src_mask, trg_mask)
        options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "reduction": reduction,
        }
        target = target if queries is None else take(target, queries)
        if not is_linear(self.out):
            logits = self.out(hidden).flatten(0, -2)
            return nn.functional.cross_entropy(logits.float(), target.flatten(), **options)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return linear_cross_entropy(hidden, self.out.weight, self.out.bias, target, **options, dtype=wide)

    def _hidden(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor | AttentionMask | None,
        trg_mask: Tensor | AttentionMask | None,
    ) -> tuple[Tensor, Packing | None]:
        """The decoder's outputs, and their packing if the model is packed."""
        if self.packed:
            padder = padder_of(src, trg, src_mask, trg_mask)
            trg, src = padder.remove(trg, src)
            own, cross = padder.masks
            e_outputs = self.encoder(src, PackedMask(cross.keys, cross.keys))
            return self.decoder(trg, e_outputs, cross, own), padder.own
        e_outputs = self.encoder(src, src_mask)
        return self.decoder(trg, e_outputs, src_mask, trg_mask), None
