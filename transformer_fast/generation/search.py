"""State that greedy and beam search share.

The open hypotheses are rows: `tokens` (rows, t), of which the last column is the newest token of every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import refuse_nan, start
from .request import Hypothesis, Request
from .rules import Rules
from .topk import Choice, best_tokens, choose, log_normalizer

MOST_STEPS = 16
"""Largest number of steps per call, since a call cannot be interrupted."""


class SearchState:
    """Sentences of a search, their open hypotheses and their answers. Use a search within `evaluating`.

    Args:
        models: as in `decoding.start`.
        request, config, rules: the batch, the options, and the tokens that they allow.
        rows: largest number of rows per sentence.

    Attributes:
        tokens, log_prob: (rows, t) and (rows,), of the open hypotheses.
        limits: (sentences,) largest number of tokens of an answer.
        found: recorded hypotheses per sentence.
    """

    def __init__(
        self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules, *, rows: int
    ) -> None:
        batch, device = request.src.shape[0], request.src.device
        self.request, self.config, self.rules = request, config, rules
        self.decoding = start(models, request, config, rows=batch * rows)
        self.tokens = torch.full((batch, 1), request.bos, device=device)
        self.log_prob = torch.zeros(batch, device=device)
        self.limits = request.limits
        self.found: list[list[Hypothesis]] = [[] for _ in range(batch)]

    def run(self) -> list[list[Hypothesis]]:
        """Decode until no hypothesis is open. Returns the answers of every sentence, best first."""
        while self.tokens.shape[0]:
            self.step()
        return [self.answers(sentence) for sentence in range(len(self.found))]

    def step(self) -> None:
        """Continue every open hypothesis by one token."""
        raise NotImplementedError

    def _choose(self, k: int) -> Choice:
        """Choose the k best next tokens of every row by the rules."""
        tokens, rules = self.tokens, self.rules
        only_suppress = rules.only_suppress(tokens.shape[1])
        logits = self.decoding.next_logits(tokens, check=not only_suppress)
        k = min(k, logits.shape[1])
        if only_suppress:
            choice = choose(logits, k, rules.suppressed, renormalize=self.config.renormalize)
            refuse_nan(choice.normalizer, tokens)
            return choice
        allowed, probable = rules.apply(logits, tokens, self.sentences())
        return Choice(*best_tokens(allowed, k), log_normalizer(probable))

    def _most_steps(self) -> int:
        """Largest number of steps that rules and limits allow in one call; 0 if they allow no such call."""
        width = self.tokens.shape[1]
        most = self.rules.plain_steps(width, MOST_STEPS)
        return min(most, int(self.limits[self.sentences()].min()) + 1 - width) if most else 0

    def answers(self, sentence: int) -> list[Hypothesis]:
        """The `n_best` hypotheses of a sentence, best first."""
        raise NotImplementedError

    def sentences(self) -> Tensor:
        """Sentence of every open hypothesis, (rows,)."""
        raise NotImplementedError
