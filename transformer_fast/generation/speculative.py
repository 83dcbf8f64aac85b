"""Greedy decoding with several tokens per step: the model with int8 weights drafts them, and the fp32 model checks
them all at once.

A step of few rows takes as long as reading the weights, so a step of several positions takes little longer than a
step of one. The method is that of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding", for the most likely token, with quantised weights of the same model as the draft. The answers are those of
`GreedySearch`, whatever is drafted, since each token is the one that the fp32 model chooses after the tokens before
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import CachedDecoding, refuse_nan
from .request import Hypothesis, Request
from .rules import Rules
from .scores import scored_hypothesis
from .search import SearchState
from .topk import Choice


@dataclass
class Answer:
    """Open answer. tokens: BOS and the chosen tokens; drafted: number of positions that the draft's cache holds."""

    sentence: int
    tokens: list[int]
    log_prob: float = 0.0
    drafted: int = 0


class SpeculativeSearch(SearchState):
    """Greedy decoding with `config.draft_tokens`. Use the search within `evaluating`. Each open answer is a row; its
    tokens are at the right of `tokens`, from the column `start` of its sentence on."""

    def __init__(self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules) -> None:
        super().__init__(models, request, config, rules, rows=1)
        model = self.decoding
        assert isinstance(model, CachedDecoding) and model.draft is not None  # `start` refuses other models
        self._model, self._draft = model, model.draft
        self._open = [Answer(sentence, [request.bos]) for sentence in range(len(self.found))]

    def sentences(self) -> Tensor:
        return torch.tensor([answer.sentence for answer in self._open], dtype=torch.long)

    def answers(self, sentence: int) -> list[Hypothesis]:
        return self.found[sentence]

    def step(self) -> None:
        limits = self.limits[self.sentences()].tolist()
        left = max(limit + 1 - len(answer.tokens) for limit, answer in zip(limits, self._open, strict=True))
        count = min(self.config.draft_tokens, left - 1)  # nothing is drafted past the end of all answers
        tokens = self._with_drafts(count)
        held = torch.tensor([len(answer.tokens) - 1 for answer in self._open])
        best, token, normalizer = self._choose_each(self._model.span_logits(tokens[:, -count - 1 :], held), tokens)
        best = best.squeeze(2)
        # -inf where every token is impossible: the answer ends there, without a last token.
        log_prob = torch.where((best == -torch.inf) & ~normalizer.isnan(), -torch.inf, best - normalizer).tolist()
        drafts = tokens[:, tokens.shape[1] - count :].tolist()
        rows = zip(self._open, limits, token.squeeze(2).tolist(), log_prob, drafts, strict=True)
        open_rows = [row for row, given in enumerate(rows) if not self._extend(*given)]
        if len(open_rows) < len(self._open):
            self._open = [self._open[row] for row in open_rows]
            self.decoding.select(torch.tensor(open_rows, dtype=torch.long))
        self._set_tokens()

    def _extend(self, answer: Answer, limit: int, chosen: list[int], log_probs: list[float], drafts: list[int]) -> bool:
        """Add the chosen tokens, up to the first one that was not drafted. Returns True if the answer ends with these
        tokens."""
        held = len(answer.tokens) - 1
        for position, (token, log_prob) in enumerate(zip(chosen, log_probs, strict=True)):
            if math.isnan(log_prob):
                refuse_nan(torch.tensor(log_prob), torch.tensor([answer.tokens]))
            stuck = log_prob == -math.inf
            if not stuck:
                answer.tokens.append(token)
                answer.log_prob += log_prob
            if stuck or token == self.request.eos or len(answer.tokens) > limit:
                self._record(answer, finished=not stuck and token == self.request.eos)
                return True
            if drafts[position : position + 1] != [token]:
                break
        answer.drafted = min(held + len(drafts), len(answer.tokens) - 1)
        return False

    def _record(self, answer: Answer, *, finished: bool) -> None:
        body = answer.tokens[1:-1] if finished else answer.tokens[1:]
        length, index = len(answer.tokens) - 1, answer.sentence
        found = scored_hypothesis(self.config, self.request, index, body, answer.log_prob, length, finished, None)
        self.found[index].append(found)

    def _with_drafts(self, count: int) -> Tensor:
        """Return `tokens` with `count` drafted tokens after them."""
        tokens = self.tokens
        lengths = torch.tensor([len(answer.tokens) for answer in self._open])
        # If all drafts of a row were right, the draft has not read the last of them; then all rows read two tokens.
        unread = max(len(answer.tokens) - answer.drafted for answer in self._open)
        while (drafted := tokens.shape[1] - self.tokens.shape[1]) < count:
            held = lengths + drafted - unread
            several = self._draft_steps(tokens, held, count - drafted) if unread == 1 else None
            if several is None:
                logits = self._draft.span_logits(tokens[:, -unread:], held, newest=True)
                several = self._choose_each(logits, tokens).token.squeeze(2)
            tokens, unread = torch.cat([tokens, several], dim=1), 1
        return tokens

    def _draft_steps(self, tokens: Tensor, held: Tensor, most: int) -> Tensor | None:
        """Return tokens (rows, steps) that the draft chooses after `tokens`, at most `most` per row; None if the
        draft cannot run several steps at once."""
        most = self.rules.plain_steps(tokens.shape[1], most)
        return self._draft.span_steps(tokens[:, -1], held, most) if most else None

    def _choose_each(self, logits: Tensor, tokens: Tensor) -> Choice:
        """Choose the most likely tokens by the rules, (rows, span, 1), from logits (rows, span, vocabulary) after
        each of the last tokens; also return the normalizers (rows, span)."""
        span, width = logits.shape[1], tokens.shape[1]
        if self.rules.only_suppress(width):
            choice = self._choice(logits.flatten(0, 1), tokens, 1)
            return Choice(*(found.unflatten(0, logits.shape[:2]) for found in choice))
        each = [self._choice(logits[:, i], tokens[:, : width - span + 1 + i], 1) for i in range(span)]
        best, token, normalizer = (torch.stack(parts, dim=1) for parts in zip(*each, strict=True))
        return Choice(best, token, normalizer.masked_fill(logits.isnan().any(dim=2), torch.nan))

    def _set_tokens(self) -> None:
        """Set `tokens` and `start` of the open answers."""
        width = max((len(answer.tokens) for answer in self._open), default=0)
        before = [width - len(answer.tokens) for answer in self._open]
        rows = [[self.request.bos] * n + answer.tokens for n, answer in zip(before, self._open, strict=True)]
        self.tokens = torch.tensor(rows, dtype=torch.long).view(len(rows), width)
        self.start[self.sentences()] = torch.tensor(before, dtype=torch.long)
