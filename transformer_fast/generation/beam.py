"""Beam search: the most likely whole translations, not the most likely words.

At every step the `beam` best prefixes of a sentence, by cumulative log-probability, are continued with every token.
The best continuations survive. A hypothesis that ends in EOS is finished: it leaves the beam, and its slot closes.
So at most `beam` hypotheses finish, and a beam of 1 is greedy decoding. Finished hypotheses are ranked by

    score = log P(tokens, EOS | source) / ((5 + length) / 6) ** length_penalty        (EOS counts in the length)

from Wu et al. 2016, "Google's Neural Machine Translation System", section 7; `generate` has the other options. A
sentence stops as soon as no continuation of an open hypothesis can reach a better score.

With slots "keep" the beam stays wide: 2 * beam continuations are considered, and the best `beam` that do not end
continue. Only the best `beam` of the 2 * beam may finish. A sentence stops when `beam` have finished and, depending on
`early_stop`, no open one can beat the worst of them. Slots "keep" give the beam search of Hugging Face transformers,
with the same answers; early_stop "now", False and True are its early_stopping False, "never" and True.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import evaluating, refuse_nan
from .request import Hypothesis, Lengths, Request, check_request
from .rules import Rules
from .scores import length_penalty as length_penalty_of
from .scores import scored_hypothesis
from .search import SearchState
from .topk import use_native


def beam_search(
    model: nn.Module,
    src: Tensor,
    *,
    src_lengths: Tensor | None = None,
    src_mask: Tensor | None = None,
    bos: int,
    eos: int,
    pad: int | None = None,
    beam: int = 5,
    length_penalty: float = 0.6,
    max_length: Lengths = None,
    n_best: int = 1,
    cache: bool = True,
) -> list[list[Hypothesis]]:
    """Translate a batch with beam search (see the top of this file for what it computes).

    model, src, src_lengths, src_mask, bos, eos, pad, max_length, cache: as in `greedy`.
    beam: number of hypotheses per sentence, >= 1. The number may exceed the vocabulary.
    length_penalty: alpha in the score; 0 ranks by probability only, larger values favour longer translations.
    n_best: number of hypotheses to return per sentence, 1 <= n_best <= beam.

    Returns per sentence, in the order of src, one to n_best hypotheses: finished ones first, best score first.
    Hypotheses that max_length cut off are returned only if too few finished.
    Scores are fp32 (fp64 for an fp64 model) whatever the model's dtype.
    Raises ValueError for input that cannot be decoded, FloatingPointError if the model returns NaN.

    Example:
        >>> model = tfast.Transformer(20, 20, d_model=16, N=1, heads=2, dropout=0.0)
        >>> src = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> found = tfast.beam_search(model, src, pad=0, bos=1, eos=2, beam=3, n_best=2, max_length=6)
        >>> [len(hypotheses) for hypotheses in found]
        [2, 2]
    """
    config = GenerationConfig(beam=beam, n_best=n_best, length_penalty=length_penalty, cache=cache)
    request = check_request(
        model, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=max_length
    )
    if src.shape[0] == 0:
        return []
    with evaluating(model):
        return Search([model], request, config, Rules(config, request)).run()


class Search(SearchState):
    """State of a beam search. Rows are the open hypotheses of all sentences, best first. Use the search within
    `evaluating`."""

    def __init__(self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules) -> None:
        super().__init__(models, request, config, rules, rows=config.beam)
        batch, device = len(self.found), request.src.device
        self.width = config.beam  # most open hypotheses of a sentence
        self.keeps_slots = config.slots == "keep"
        self.candidates = 2 * self.width if self.keeps_slots else self.width  # continuations considered
        self.quota = math.inf if self.keeps_slots else math.ceil(config.patience * self.width)
        self.enough = self.width if self.keeps_slots else config.n_best  # finished hypotheses that can end a sentence
        self.sentence = torch.arange(batch, device=device)
        self.slot = torch.zeros(batch, dtype=torch.long, device=device)
        self.finished = torch.zeros(batch, dtype=torch.long, device=device)
        self.attention = torch.zeros(batch, 0, request.src.shape[1], device=device) if config.alignments else None

    def sentences(self) -> Tensor:
        return self.sentence

    def answers(self, sentence: int) -> list[Hypothesis]:
        return sorted(self.found[sentence], key=self._rank)[: self.config.n_best]

    def _rank(self, hypothesis: Hypothesis) -> tuple[bool, float]:
        """Sort key, best first."""
        return not (hypothesis.finished or self.keeps_slots), -hypothesis.score

    def step(self) -> None:
        total, parent, token = self._best_continuations()
        last = self.limits <= self.tokens.shape[1]
        if self._all_continue(total, token, last):
            return self._continue(torch.ones_like(token, dtype=torch.bool), total, parent, token)
        valid = self._may_continue(total, self.finished)
        self._record_stuck(valid)

        best = torch.arange(total.shape[1], device=total.device) < self.width
        ends = valid & (token == self.request.eos)
        finished = ends & best
        self._record(parent[finished], None, total[finished], finished=True)
        self.finished += finished.sum(dim=1)
        alive = valid & ~ends & (self.finished < self.quota)[:, None]
        alive &= alive.cumsum(dim=1) <= self.width
        alive &= ~self._is_decided(total.masked_fill(~alive, -torch.inf), last)[:, None]
        cut = alive & best & last[:, None]
        self._record(parent[cut], token[cut], total[cut], finished=False)
        alive &= ~last[:, None]

        self._continue(alive, total, parent, token)

    def _all_continue(self, total: Tensor, token: Tensor, last: Tensor) -> bool:
        """Return True if all sentences keep all slots, so that there is nothing to record or decide. last
        (sentences,): True where answers may not be longer."""
        if total.shape[1] != self.width:
            return False
        stop = (token == self.request.eos) | (total == -torch.inf) | (last | (self.finished > 0))[:, None]
        return not bool(stop.any())

    def _continue(self, alive: Tensor, total: Tensor, parent: Tensor, token: Tensor) -> None:
        """Make the continuations with `alive` True the open hypotheses."""
        rows = parent[alive]
        self.tokens = torch.cat([self.tokens[rows], token[alive][:, None]], dim=1)
        self.log_prob = total[alive]
        self.sentence = self.sentence[rows]
        self.slot = (alive.cumsum(dim=1) - 1)[alive]
        self.attention = None if self.attention is None else self.attention[rows]
        self.decoding.select(rows)

    def _may_continue(self, total: Tensor, finished: Tensor) -> Tensor:
        """Mask (sentences, candidates), bool: True for continuations that get a slot. A closed slot stays closed, and
        a score of -inf is no hypothesis."""
        if self.keeps_slots:
            return total > -torch.inf
        slots = max(self.quota, self.width) - finished
        return (total > -torch.inf) & (torch.arange(self.width, device=total.device) < slots[:, None])

    def _fused_steps(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Run as many fused steps as possible and return the `_best_continuations` of the last one; None if
        unsupported."""
        width = self.width
        supported = self._candidates_per_row == self.candidates and len(self.sentence) % width == 0
        if not supported or self.attention is not None:
            return None
        sentence = self.sentence.view(-1, width)
        if bool((sentence != sentence[:, :1]).any()) or self._needs_bookkeeping(sentence[:, 0]):
            return None
        most = self._most_steps()
        found = self.decoding.beam(self.tokens, self.log_prob, width, self.candidates, most) if most else None
        if found is None:
            return None
        self.tokens = torch.cat([self.tokens[found.origin], found.history], dim=1)
        self.log_prob = found.reached
        refuse_nan(found.normalizer, self.tokens)
        last = found.total, found.parent, found.token
        if len(sentence) == len(self.found):
            return last
        total = found.total.new_full((len(self.found), found.total.shape[1]), -torch.inf)
        parent, token = (torch.zeros(total.shape, dtype=torch.long) for _ in range(2))
        for whole_one, own in zip((total, parent, token), last, strict=True):
            whole_one[sentence[:, 0]] = own
        return total, parent, token

    def _needs_bookkeeping(self, sentences: Tensor) -> bool:
        """Return True if a step of one of these sentences does more than keep its best continuations, even if none
        ends."""
        return bool((self.finished[sentences] >= (self.width if self.keeps_slots else 1)).any())

    def _best_continuations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Best continuations per sentence, each (sentences, candidates), best first: cumulative log-probability, the
        row that is continued, and the added token."""
        if (found := self._fused_steps()) is not None:
            return found
        best, token, normalizer = self._choose(self._candidates_per_row)
        if self.attention is not None:
            self.attention = torch.cat([self.attention, self.decoding.attention[:, None]], dim=1)
        return self._best_per_sentence((self.log_prob.to(best.dtype) - normalizer)[:, None] + best, token)

    @property
    def _candidates_per_row(self) -> int:
        """Number of continuations considered per row: as many as can survive. `benchmarks/compare_cached.py` uses
        one more."""
        return self.candidates

    def _best_per_sentence(self, total: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Best continuations of the rows, merged per sentence.

        total, token: (rows, width), cumulative log-probability and token of each row's best continuations; the token
        of a -inf is arbitrary.
        """
        width = token.shape[1]
        sentences, candidates = len(self.found), min(self.candidates, self.width * width)
        if use_native(total):
            where = self.sentence, self.slot, sentences, self.width, candidates
            return torch.ops.transformer_fast.choose_continuations(total, token, *where)
        # NaN: all logits of the row are -inf, so it has no continuation.
        grid = total.new_full((sentences, self.width, width), -torch.inf)
        grid[self.sentence, self.slot] = total.masked_fill(total.isnan(), -torch.inf)
        row = torch.zeros(sentences, self.width, dtype=torch.long, device=total.device)
        row[self.sentence, self.slot] = torch.arange(len(total), device=total.device)
        best, flat = grid.flatten(1).topk(candidates, dim=1)
        parent = row.gather(1, flat // width)
        return best, parent, token[parent, flat % width]

    def _is_decided(self, open_log_prob: Tensor, last: Tensor) -> Tensor:
        """Return (sentences,) bool: True if the `enough` best finished hypotheses are at least as good as any
        continuation of the open ones. last (sentences,): True where answers may not be longer.

        A beam that stays wide is not decided in its last step, whose hypotheses are all recorded.
        """
        config = self.config
        bar = [-torch.inf] * len(self.found)
        for index in set(self.sentence.tolist()):
            scores = sorted((h.score for h in self.found[index] if h.finished), reverse=True)
            if len(scores) >= self.enough:
                bar[index] = torch.inf if config.early_stop is True else scores[self.enough - 1]
        # log P only falls. So the best possible score has the current log P, and the length with the smallest penalty.
        lengths = self.limits
        if config.length_penalty <= 0 or config.early_stop == "now":
            lengths = torch.full_like(lengths, self.tokens.shape[1] + (not self.keeps_slots))
        reachable = open_log_prob.amax(dim=1).double() / length_penalty_of(lengths.double(), config)
        least = torch.tensor(bar, dtype=torch.float64, device=reachable.device)
        return (least >= reachable) & (least > -torch.inf) & ~(last & self.keeps_slots)

    def _record_stuck(self, valid: Tensor) -> None:
        """Record the hypotheses of sentences without a possible continuation, as cut off."""
        stuck = ~valid.any(dim=1)[self.sentence]
        if bool(stuck.any()):
            rows = stuck.nonzero().squeeze(1)
            self._record(rows, None, self.log_prob[rows], finished=False, stuck=True)

    def _record(
        self, rows: Tensor, last: Tensor | None, log_prob: Tensor, *, finished: bool, stuck: bool = False
    ) -> None:
        """Record the hypotheses of some rows, with a last token or, at the end, EOS; hypotheses without a
        continuation have neither."""
        if not len(rows):
            return
        tokens = self.tokens[rows]
        answers = (tokens if last is None else torch.cat([tokens, last[:, None]], dim=1)).tolist()
        maps = [None] * len(answers) if self.attention is None else self.attention[rows].unbind()
        known = self.sentence[rows].tolist(), log_prob.tolist()
        length = self.tokens.shape[1] - stuck
        for index, value, ids, attention in zip(*known, answers, maps, strict=True):
            self.found[index].append(scored_hypothesis(self.config, ids[1:], value, length, finished, attention))
