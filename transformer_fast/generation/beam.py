"""Beam search: the most likely whole translations, not the most likely words.

At every step the `beam` best prefixes of a sentence, by cumulative log-probability, are continued with every
token and the best continuations overall survive. One that ends in EOS is finished: it leaves, and its place
closes with it, so at most `beam` hypotheses finish and a beam of 1 is greedy decoding. Finished ones are ranked by

    score = log P(tokens, EOS | source) / ((5 + length) / 6) ** length_penalty        (EOS counts in the length)

from Wu et al. 2016, "Google's Neural Machine Translation System", section 7, without its coverage term. A
sentence stops as soon as no open hypothesis can still reach a better score, however it might go on, and never
before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .decoding import Decoding, Lengths, Request, check_request, evaluating


@dataclass(frozen=True)
class Hypothesis:
    """One translation. tokens: target ids without BOS and EOS. score: log_prob over the length penalty.
    log_prob: the natural log of its probability. finished: False if max_length cut it off before EOS."""

    tokens: list[int]
    score: float
    log_prob: float
    finished: bool


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
    beam: how many hypotheses a sentence keeps, >= 1. May exceed the vocabulary.
    length_penalty: alpha in the score; 0 ranks by probability alone, more favours longer translations.
    n_best: how many hypotheses to return for each sentence, 1 <= n_best <= beam.

    Returns for each sentence, in the order of src, at most n_best hypotheses (fewer where fewer exist, never
    none): finished ones first, best score first; ones cut off by max_length fill up only where too few finished.
    Scores are fp32 (fp64 for an fp64 model) whatever the model's dtype.
    Raises ValueError for input that cannot be decoded, FloatingPointError if the model answers NaN.
    """
    for name, value in (("beam", beam), ("n_best", n_best)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    if n_best > beam:
        raise ValueError(f"n_best is {n_best}, but a beam of {beam} holds only {beam} hypotheses")
    length_penalty = float(length_penalty)
    if not abs(length_penalty) < float("inf"):
        raise ValueError(f"length_penalty must be a finite number, got {length_penalty}")
    request = check_request(
        model, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=max_length
    )
    if src.shape[0] == 0:
        return []
    with evaluating(model):
        return _Search(model, request, beam, length_penalty, n_best, cache).run()


class _Search:
    """The state of one batch. Rows are the open hypotheses of all sentences, sentence by sentence, best first."""

    def __init__(self, model: nn.Module, request: Request, beam: int, alpha: float, n_best: int, cache: bool) -> None:
        batch, device = request.src.shape[0], request.src.device
        self.request, self.beam, self.alpha, self.n_best = request, beam, alpha, n_best
        self.decoding = Decoding(model, request, rows=batch * beam, cache=cache)
        self.tokens = torch.full((batch, 1), request.bos, device=device)
        self.log_prob = torch.zeros(batch, device=device)
        self.sentence = torch.arange(batch, device=device)
        self.slot = torch.zeros(batch, dtype=torch.long, device=device)
        self.places = torch.full((batch,), beam, device=device)
        self.found: list[list[Hypothesis]] = [[] for _ in range(batch)]

    def run(self) -> list[list[Hypothesis]]:
        while self.tokens.shape[0]:
            self._step()
        for found in self.found:
            found.sort(key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))
        return [found[: self.n_best] for found in self.found]

    def _step(self) -> None:
        length = self.tokens.shape[1]  # of the continuations, BOS aside
        total, parent, token = self._best_continuations()
        # A place that closed stays closed, and -inf is no hypothesis.
        ranks = torch.arange(self.beam, device=total.device)
        valid = (total > -torch.inf) & (ranks < self.places[:, None])
        self._keep_stuck(valid)

        ends = valid & (token == self.request.eos)
        self._record(parent[ends], None, total[ends], length, finished=True)
        self.places -= ends.sum(dim=1)
        alive = valid & ~ends
        alive &= ~self._decided(total.masked_fill(~alive, -torch.inf), length)[:, None]
        cut = alive & (length >= self.request.limits)[:, None]
        self._record(parent[cut], token[cut], total[cut], length, finished=False)
        alive &= ~cut

        rows = parent[alive]
        self.tokens = torch.cat([self.tokens[rows], token[alive][:, None]], dim=1)
        self.log_prob = total[alive]
        self.sentence = self.sentence[rows]
        self.slot = (alive.cumsum(dim=1) - 1)[alive]
        self.decoding.select(rows)

    def _best_continuations(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, beam) each, best first: cumulative log-probability, row it continues, token it adds."""
        log_prob = torch.log_softmax(self.decoding.next_logits(self.tokens), dim=-1)
        # All logits -inf would be NaN after the softmax; such a row has no continuation.
        log_prob = log_prob.masked_fill(log_prob.isnan(), -torch.inf)
        width = min(self.beam, log_prob.shape[1])  # a row gives at most `beam` of the survivors
        best, token = log_prob.topk(width, dim=1)
        total = self.log_prob.to(best.dtype)[:, None] + best
        batch = len(self.found)
        grid = total.new_full((batch, self.beam, width), -torch.inf)
        grid[self.sentence, self.slot] = total
        row = torch.zeros(batch, self.beam, dtype=torch.long, device=total.device)
        row[self.sentence, self.slot] = torch.arange(total.shape[0], device=total.device)
        total, flat = grid.flatten(1).topk(self.beam, dim=1)
        parent = row.gather(1, flat // width)
        return total, parent, token[parent, flat % width]

    def _decided(self, open_log_prob: Tensor, length: int) -> Tensor:
        """(B,) bool: the n_best finished hypotheses are at least as good as all that the open ones can become."""
        # log P only falls, so the best an open hypothesis can do is to keep it and have the kindest length.
        lengths = self.request.limits if self.alpha > 0 else torch.full_like(self.request.limits, length + 1)
        reachable = open_log_prob.amax(dim=1).double() / _penalty(lengths.double(), self.alpha)
        bar = [-torch.inf] * len(self.found)
        for index in set(self.sentence.tolist()):
            scores = sorted((h.score for h in self.found[index] if h.finished), reverse=True)
            if len(scores) >= self.n_best:
                bar[index] = scores[self.n_best - 1]
        bar = torch.tensor(bar, dtype=torch.float64, device=reachable.device)
        return (bar >= reachable) & (bar > -torch.inf)

    def _keep_stuck(self, valid: Tensor) -> None:
        """A sentence none of whose hypotheses can go on keeps them, as cut off."""
        stuck = ~valid.any(dim=1)[self.sentence]
        if bool(stuck.any()):
            rows = stuck.nonzero().squeeze(1)
            self._record(rows, None, self.log_prob[rows], self.tokens.shape[1] - 1, finished=False)

    def _record(self, rows: Tensor, last: Tensor | None, log_prob: Tensor, length: int, *, finished: bool) -> None:
        tokens = self.tokens[rows, 1:]
        tokens = (tokens if last is None else torch.cat([tokens, last[:, None]], dim=1)).tolist()
        for index, ids, value in zip(self.sentence[rows].tolist(), tokens, log_prob.tolist(), strict=True):
            score = value / _penalty(length, self.alpha)
            self.found[index].append(Hypothesis(ids, score, value, finished))


def _penalty(length: Tensor | int, alpha: float) -> Tensor | float:
    return ((5 + length) / 6) ** alpha
