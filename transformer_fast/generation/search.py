"""What greedy and beam search keep of their sentences, and how further sentences join while others are decoded.

The open hypotheses are rows: `tokens` (rows, t), of which the last column is the newest token of every row. A sentence
begins at the column `start` of its rows, where BOS stands; what lies before belongs to older sentences and is not
read. The sentences of one batch all begin at column 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import Decoding, Hypothesis, Request, refuse_nan
from .fused import Several
from .rules import Rules
from .topk import Choice, best_tokens, choose, log_normalizer

MOST_STEPS = 16
"""Taken in one call, during which nobody can interrupt it."""


class SearchState:
    """The sentences of a search, their open hypotheses and their answers. To be used within `evaluating`.

    Args:
        models: whose probabilities decide, see `Decoding`.
        request, rules: of the first sentences.
        config: the options, the same for all sentences.
        rows: how many rows a sentence may have.

    Attributes:
        tokens, log_prob: (rows, t) and (rows,), of the open hypotheses.
        start, limits: (sentences,), the column of BOS, and the most tokens of an answer.
        found: for each sentence the hypotheses recorded so far.
    """

    def __init__(
        self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules, *, rows: int
    ) -> None:
        batch, device = request.src.shape[0], request.src.device
        self.request, self.config, self.rules = request, config, rules
        self._rows = rows
        self.decoding = Decoding(models, request, config, rows=batch * rows)
        self.tokens = torch.full((batch, 1), request.bos, device=device)
        self.log_prob = torch.zeros(batch, device=device)
        self.start = torch.zeros(batch, dtype=torch.long, device=device)
        self.limits = request.limits
        self.found: list[list[Hypothesis]] = [[] for _ in range(batch)]

    def run(self) -> list[list[Hypothesis]]:
        """Decode until no hypothesis is open. Returns the answers of every sentence, the best first."""
        while self.tokens.shape[0]:
            self.step()
        return [self.answers(sentence) for sentence in range(len(self.found))]

    def step(self) -> None:
        """Continue every open hypothesis by one token."""
        raise NotImplementedError

    def _choose(self, k: int) -> Choice:
        """The k best next tokens of every row, by the rules."""
        tokens, shows_nan = self.tokens, self.rules.only_suppress(self.tokens.shape[1])
        choice = self._choice(self.decoding.next_logits(tokens, check=not shows_nan), tokens, k)
        if shows_nan:
            refuse_nan(choice.normalizer, tokens)
        return choice

    def _choice(self, logits: Tensor, tokens: Tensor, k: int) -> Choice:
        """The k best next tokens behind `tokens`, of their logits (rows, vocabulary). A row with a NaN has it in the
        normalizer where the rules only suppress tokens; they then ask no more of `tokens` than how many there are."""
        k, rules = min(k, logits.shape[1]), self.rules
        if rules.only_suppress(tokens.shape[1]):
            return choose(logits, k, rules.suppressed, renormalize=self.config.renormalize)
        allowed, probable = rules.apply(logits, tokens, self.sentences(), self.start)
        return Choice(*best_tokens(allowed, k), log_normalizer(probable))

    def _several(self) -> Several | None:
        """The steps that can be taken at once as far as rules and limits go; None for none."""
        width = self.tokens.shape[1]
        most = self.rules.plain_steps(width, MOST_STEPS)
        if not most:
            return None
        left = int((self.start + self.limits)[self.sentences()].min()) + 1 - width
        return Several(min(most, left), self.request.eos, self.rules.suppressed, self.config.renormalize)

    def answers(self, sentence: int) -> list[Hypothesis]:
        """The `n_best` hypotheses found for a sentence, the best first."""
        raise NotImplementedError

    def sentences(self) -> Tensor:
        """(rows,) the sentence of every open hypothesis."""
        raise NotImplementedError

    def admit(self, request: Request, rules: Rules) -> list[int]:
        """Further sentences join; those without an open hypothesis leave, with their answers.

        Returns the numbers that the sentences which stay had; they now come first, in this order, and the new ones
        behind them. Not for options that read the attention.
        """
        kept = sorted(set(self.sentences().tolist()))
        entries = torch.tensor(kept, dtype=torch.long, device=self.tokens.device)
        batch, last = request.src.shape[0], self.tokens.shape[1] - 1
        unread = int(self.start[entries].min()) if kept else last
        new = self.tokens.new_zeros(batch, last + 1 - unread)
        new[:, -1] = request.bos
        self.decoding.admit(request, rows=(len(kept) + batch) * self._rows)
        self._admit_rows(entries, batch)
        self.tokens = torch.cat([self.tokens[:, unread:], new.repeat_interleave(self._rows_at_first, dim=0)])
        self.log_prob = torch.cat([self.log_prob, self.log_prob.new_zeros(batch * self._rows_at_first)])
        self.start = torch.cat([self.start[entries], self.start.new_full((batch,), last)]) - unread
        self.limits = torch.cat([self.limits[entries], request.limits])
        self.rules.admit(rules, entries)
        self.found = [self.found[sentence] for sentence in kept] + [[] for _ in range(batch)]
        return kept

    @property
    def _rows_at_first(self) -> int:
        """With how many rows a sentence begins."""
        return 1

    def _admit_rows(self, kept: Tensor, batch: int) -> None:
        """Bring up to date what a search keeps besides: these sentences stay, and so many join, with a row each."""
        raise NotImplementedError


def renumber(kept: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Where each of some numbers, all below `count`, stands among those kept."""
    places = torch.zeros(count, dtype=torch.long, device=kept.device)
    places[kept] = torch.arange(len(kept), device=kept.device)
    return places[numbers]
