"""Keys and values for steps that compute several positions per sentence, whose tokens are known already.

`SpanCache` is a `DecoderCache` with one hypothesis per sentence; sentences may hold different numbers of positions.
A step has `span` rows per sentence, its newest positions: each row sees the keys of the rows before it. `hold` sets
the number of held positions before every step, so that those of rejected tokens are overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..masks import AttentionMask
from .cache import DecoderCache


class SpanCache(DecoderCache):
    """Cache of one batch, for a decoder of `transformer_fast`; arguments as for `DecoderCache`.

    Rows of a step are ordered by sentence, and then by position.
    """

    def hold(self, lengths: Tensor, span: int) -> None:
        """Set the next step: `span` rows per sentence, after `lengths` (sentences,) positions."""
        self.span, self.length = span, int(lengths.max())
        self._positions = lengths[:, None] + torch.arange(span, device=lengths.device)

    def keys(self) -> Tensor:
        return (self._positions + 1).int()

    def position(self, rows: int) -> tuple[Tensor, int]:
        return self._positions.flatten(), self.length + self.span

    def attend_own(self, layer: int, q: Tensor, states: Tensor) -> Tensor:
        slots, at = q.shape[0] // self.span, self._positions
        own = self.own(slots)[layer, :slots]
        own[torch.arange(slots, device=q.device)[:, None], :, :, at] = states.unflatten(0, at.shape)
        queries = q.squeeze(2).unflatten(0, at.shape).transpose(1, 2)
        k, v = own[:, :, :, : self.length + self.span].unbind(1)
        out = ops.attention(queries, k, v, AttentionMask.lengths(self.keys()))
        return out.transpose(1, 2).reshape(q.shape)

    def select(self, rows: list[int]) -> None:
        """Keep these sentences. Indices must be ascending."""
        kept = torch.tensor(rows, dtype=torch.long, device=self.cross.device)
        if self._states is not None:
            known = self.length + self.span  # including those of the last step
            self._states[:, : len(rows), :, :, :known] = self._states[:, kept, :, :, :known]
        self.cross = self.cross[:, kept]
        self._set_mask(None if self._mask is None else self._mask[kept])
