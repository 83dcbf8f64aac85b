"""Drawing the next token: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GenerationConfig


class Sampler:
    """Draws by inverting the cumulative distribution at one uniform number a row and step.

    Every one of the rows that the batch began with gets its number at every step, whether it still goes on or not, so
    that what one row draws does not depend on when others end.
    """

    def __init__(self, config: GenerationConfig, rows: int) -> None:
        self._config, self._rows = config, rows
        self._generator = None if config.seed is None else torch.Generator().manual_seed(config.seed)

    def __call__(self, logits: Tensor, row: Tensor) -> Tensor:
        """(n, vocabulary) logits and the n rows they are of -> (n,) tokens."""
        uniform = torch.rand(self._rows, dtype=torch.float64, generator=self._generator).to(logits.device)[row]
        values, tokens = most_likely(logits / self._config.temperature, self._config.top_k, self._config.top_p)
        cumulative = values.double().softmax(dim=-1).cumsum(dim=-1)
        wanted = uniform[:, None] * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, wanted, right=True).clamp(max=values.shape[1] - 1)
        return (index if tokens is None else tokens.gather(1, index)).squeeze(1)


def most_likely(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """What may be drawn: logits, -inf for the rest, and their tokens (None: in the vocabulary's own order).

    top_p counts within what top_k leaves. The most likely token always stays.
    """
    if not 0 < top_k < logits.shape[1] and top_p == 1.0:
        return logits, None
    values, tokens = logits.topk(min(top_k, logits.shape[1])) if top_k else logits.sort(dim=-1, descending=True)
    if top_p < 1.0:
        share = values.double().softmax(dim=-1)
        before = share.cumsum(dim=-1) - share
        before[:, 0] = 0
        values = values.masked_fill(before >= top_p, -torch.inf)
    return values, tokens
