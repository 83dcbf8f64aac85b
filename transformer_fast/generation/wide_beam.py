"""Beam search whose beam stays wide: the slot of a hypothesis that finishes is given to the next best one.

At every step 2 * beam continuations are looked at. Those of the best `beam` that end in EOS, or reach max_length, are
finished; of all finished ones the `beam` with the best scores are kept. The best `beam` of the others go on. A sentence
ends when `beam` have finished and, as `early_stop` says, no open one can beat the worst of them.

This is the beam search of Hugging Face transformers (early_stop "now", False and True are their early_stopping False,
"never" and True), and gives the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .beam import Search
from .config import GenerationConfig
from .decoding import Hypothesis, Request
from .rules import Rules
from .scores import length_penalty


class WideSearch(Search):
    """The state of one batch for slots "keep"; a unit is a sentence."""

    def __init__(self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules) -> None:
        super().__init__(models, request, config, rules)
        self.candidates = 2 * self.width

    @staticmethod
    def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
        return False, -hypothesis.score

    def step(self) -> None:
        total, parent, token = self._best_continuations()
        length = self.tokens.shape[1]
        valid = total > -torch.inf
        self._keep_stuck(valid)

        best = torch.arange(total.shape[1], device=total.device) < self.width
        ends, cut = valid & (token == self.request.eos), valid & (self.limits <= length)[:, None]
        ended, reached = ends & best, cut & best & ~ends
        self._record(parent[ended], None, total[ended], finished=True)
        self._record(parent[reached], token[reached], total[reached], finished=False)
        alive = valid & ~ends & ~cut
        alive &= alive.cumsum(dim=1) <= self.width
        alive &= ~self._done(total.masked_fill(~alive, -torch.inf).amax(dim=1), length)[:, None]

        self._go_on(alive, total, parent, token)

    def _decides(self, units: Tensor) -> bool:
        return any(len(self.found[unit]) >= self.width for unit in units.tolist())

    def _done(self, best_open: Tensor, length: int) -> Tensor:
        """(units,) bool: enough have finished, and no open hypothesis can beat the worst of them. best_open (units,):
        log P of the best open one. Keeps the `beam` best finished ones."""
        for index in set(self.unit.tolist()):
            self.found[index] = sorted(self.found[index], key=self._rank)[: self.width]
        full = [len(found) == self.width for found in self.found]
        worst = [min((hypothesis.score for hypothesis in found), default=-torch.inf) for found in self.found]
        if self.config.early_stop is True:
            return torch.tensor(full, device=best_open.device)
        # log P only falls, so what is in reach has today's, and the length that is penalised least.
        longest = self.config.early_stop is False and self.config.length_penalty > 0
        lengths = self.limits if longest else torch.full_like(self.limits, length)
        reachable = best_open.double() / length_penalty(lengths.double(), self.config)
        bar = torch.tensor(worst, dtype=torch.float64, device=best_open.device)
        return (bar >= reachable) & torch.tensor(full, device=best_open.device)
