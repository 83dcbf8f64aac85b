"""Keys and values for steps that compute several positions of each sentence: a run of tokens that are known already.

`SpanCache` is a `DecoderCache` with one hypothesis a sentence. A step has `span` rows for each, its newest positions:
each row sees the keys of the rows before it. How many positions are held is said anew before every step (`hold`), so
that those of tokens which were not taken after all are written over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..masks import AttentionMask
from .cache import DecoderCache


class SpanCache(DecoderCache):
    """The cache of one batch, for a decoder of `transformer_fast`; arguments as for `DecoderCache`.

    Rows of a step are ordered by sentence, and then by position.
    """

    def hold(self, lengths: Tensor, span: int) -> None:
        """The next step has so many rows for each sentence, the first behind this many positions, (sentences,)."""
        self.span = span
        self._set_lengths(lengths)

    def select(self, rows: list[int]) -> None:
        """Keep these sentences, which rise."""
        kept = torch.tensor(rows, dtype=torch.long, device=self.cross.device)
        if self._states is not None:
            known = self.length + self.span  # and those of the last step
            self._states[:, : len(rows), :, :, :known] = self._states[:, kept, :, :, :known]
        self.cross = self.cross[:, kept]
        self._set_mask(None if self._mask is None else self._mask[kept])

    def stepped(self) -> None:
        """Nothing: what is held is said by `hold`."""

    def keys(self) -> Tensor:
        return (self._positions() + 1).int()

    def position(self, rows: int) -> tuple[int | Tensor, int]:
        return self._positions().flatten(), self.length + self.span

    def own_in_cells(self, rows: int) -> tuple[Tensor, Tensor | None]:
        return self.own(rows), None

    def attend_own(self, layer: int, q: Tensor, states: Tensor) -> Tensor:
        rows, heads, _, width = q.shape
        sentences = self.cross.shape[1]
        own = self.own(sentences)[layer, :sentences]
        sentence = torch.arange(sentences, device=q.device)[:, None]
        own[sentence, :, :, self._positions()] = states.unflatten(0, (sentences, self.span))
        q = q.view(sentences, self.span, heads, width).transpose(1, 2)
        k, v = own[:, :, :, : self.length + self.span].unbind(1)
        out = ops.attention(q, k, v, AttentionMask.lengths(self.keys()))
        return out.transpose(1, 2).reshape(rows, heads, 1, width)

    def attend_source(self, layer: int, q: Tensor) -> Tensor:
        return super().attend_source(layer, q.view(-1, self.span, *q.shape[2:]))

    def _positions(self) -> Tensor:
        """(sentences, span)"""
        sentences, device = self.cross.shape[1], self.cross.device
        held = torch.full((sentences,), self.length, device=device) if self.lengths is None else self.lengths
        return held[:, None] + torch.arange(self.span, device=device)
