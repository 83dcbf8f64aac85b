"""Keys and values for steps that compute several positions of each sentence: a run of tokens that are known already.

`SpanCache` is a `DecoderCache` with one hypothesis a sentence. A step has `span` rows for each, its newest positions:
each row sees the keys of the rows before it. How many positions are held is said anew before every step (`hold`), so
that those of tokens which were not taken after all are written over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import DecoderCache


class SpanCache(DecoderCache):
    """The cache of one batch, for a decoder of `transformer_fast`; arguments as for `DecoderCache`.

    Rows of a step are ordered by sentence, and then by position.
    """

    def hold(self, lengths: Tensor, span: int) -> None:
        """The next step has so many rows for each sentence, the first behind this many positions, (sentences,)."""
        self.span, self.length = span, int(lengths.max())
        self._positions = lengths[:, None] + torch.arange(span, device=lengths.device)

    def positions(self) -> Tensor:
        return self._positions

    def select(self, rows: list[int]) -> None:
        """Keep these sentences, which rise."""
        kept = torch.tensor(rows, dtype=torch.long, device=self.cross.device)
        if self._states is not None:
            known = self.length + self.span  # and those of the last step
            self._states[:, : len(rows), :, :, :known] = self._states[:, kept, :, :, :known]
        self.cross = self.cross[:, kept]
        self._set_mask(None if self._mask is None else self._mask[kept])
