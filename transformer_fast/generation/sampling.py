"""Drawing the next token: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.dropout import MASK32, philox
from .config import GenerationConfig

STEPS_AHEAD = 64
"""Steps whose random numbers are drawn at once, because one number takes as long."""


class Sampler:
    """Sampler that inverts the cumulative distribution at one uniform number per answer and step.

    The numbers are Philox 4x32-10 of the seed, the stream of the sentence, the number of the answer and the step. So
    the draws of a sentence do not depend on the other sentences of the batch.

    Args:
        config: options with `sample`; without a seed, one is drawn from torch's random state.
        streams: (sentences,) int64, the stream of each sentence.
    """

    def __init__(self, config: GenerationConfig, streams: Tensor) -> None:
        self._config = config
        self._seed = int(torch.randint(2**63 - 1, ())) if config.seed is None else config.seed
        stream = streams.cpu().repeat_interleave(config.n_best)[:, None]
        answer = torch.arange(config.n_best).repeat(len(streams))[:, None]
        self._where = answer, stream & MASK32, (stream >> 32) & MASK32
        self._step = 0
        self._numbers = torch.empty(0, 0, dtype=torch.float64)

    def __call__(self, logits: Tensor, row: Tensor) -> Tensor:
        """Draw tokens (n,) from logits (n, vocabulary) for n answers, which are numbered over all sentences."""
        at = self._step % STEPS_AHEAD
        if at == 0:
            self._numbers = self._uniform(self._step).to(logits.device)
        self._step += 1
        # The largest logit is subtracted first, so that a small temperature causes no overflow.
        temperature = max(self._config.temperature, torch.finfo(logits.dtype).tiny)
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature
        values, tokens = most_likely(scaled, self._config.top_k, self._config.top_p)
        cumulative = values.double().softmax(dim=-1).cumsum(dim=-1)
        wanted = self._numbers[row, at, None] * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, wanted, right=True).clamp(max=values.shape[1] - 1)
        return (index if tokens is None else tokens.gather(1, index)).squeeze(1)

    def _uniform(self, first: int) -> Tensor:
        """Uniform numbers (answers, STEPS_AHEAD) of 53 bits in [0, 1), for the steps from `first` on."""
        steps = torch.arange(first, first + STEPS_AHEAD)
        high, low, _, _ = philox((steps, *self._where), self._seed)
        return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def most_likely(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Candidates for a draw: logits, -inf for excluded tokens, and their tokens (None: in the order of the
    vocabulary).

    top_p applies to the tokens that top_k leaves. The most likely token always stays.
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
