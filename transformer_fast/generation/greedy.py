"""Decoding without a beam: at every step the most likely token, or a drawn one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import evaluating, refuse_nan
from .request import Hypothesis, Lengths, Request, check_request
from .rules import Rules
from .sampling import Sampler
from .scores import scored_hypothesis
from .search import SearchState
from .topk import Choice, log_normalizer


def greedy(
    model: nn.Module,
    src: Tensor,
    *,
    src_lengths: Tensor | None = None,
    src_mask: Tensor | None = None,
    bos: int,
    eos: int,
    pad: int | None = None,
    max_length: Lengths = None,
    cache: bool = True,
) -> list[list[int]]:
    """Translate a batch with the most likely token at every step.

    model: `transformer_fast.Transformer`, or any module with `encoder(src, src_mask)`,
        `decoder(trg, memory, src_mask, trg_mask)` and `out`, or The Annotated Transformer's `EncoderDecoder` with its
        `generator`. The model runs in evaluation mode without gradients; its own mode is restored.
    src: (B, S) integer source ids on the model's device. B = 0 gives [].
    src_lengths: (B,) lengths, or src_mask: bool (B, 1, S), True = read; or pad: the id of padding, which is not read.
        Without these three every position is read.
    bos, eos: the target ids that begin and end an answer.
    max_length: largest number of tokens of an answer, EOS included: one int, or one per sentence. Default
        2 * (source length) + 20. An answer of that length is returned without EOS.
    cache: keep keys and values between the steps, if the decoder is one of this package, or The Annotated
        Transformer's after `accelerate`. False runs the decoder over the whole prefix at every step. The answers are
        the same.

    Returns B lists of target ids, in the order of src, without BOS and EOS.
    Raises ValueError for input that cannot be decoded, FloatingPointError if the model returns NaN.

    Example:
        >>> model = tfast.Transformer(20, 20, d_model=16, N=1, heads=2, dropout=0.0)
        >>> src = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> len(tfast.greedy(model, src, pad=0, bos=1, eos=2, max_length=6))
        2
    """
    request = check_request(
        model, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=max_length
    )
    if src.shape[0] == 0:
        return []
    config = GenerationConfig(cache=cache)
    with evaluating(model):
        found = GreedySearch([model], request, config, Rules(config, request), scored=False).run()
    return [hypotheses[0].tokens for hypotheses in found]


class GreedySearch(SearchState):
    """Search that chooses one token at a time, the most likely one or a drawn one. Use the search within `evaluating`.

    Without `scored`, all scores are NaN.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        request: Request,
        config: GenerationConfig,
        rules: Rules,
        *,
        scored: bool = True,
    ) -> None:
        copies = config.n_best
        super().__init__(models, request, config, rules, rows=copies)
        rows, device = len(self.found) * copies, request.src.device
        self._row = torch.arange(rows, device=device)  # number of each answer, for the draws
        self._sentence = self._row // copies
        if copies > 1:
            self.decoding.select(self._sentence)
            self.tokens = self.tokens[self._sentence]
        self._draw = Sampler(config, request.streams) if config.sample else None
        self._scored = scored
        self.log_prob = torch.full((rows,), 0.0 if scored else torch.nan, dtype=torch.float64, device=device)
        self._attention = torch.zeros(rows, 0, request.src.shape[1], device=device) if config.alignments else None

    def sentences(self) -> Tensor:
        return self._sentence

    def answers(self, sentence: int) -> list[Hypothesis]:
        return sorted(self.found[sentence], key=lambda hypothesis: -hypothesis.score)

    def step(self) -> None:
        sentence = self._sentence
        token, log_prob, stuck = self._next_tokens()
        if self._scored:
            for each in log_prob[:, :-1].unbind(1):
                self.log_prob += each
            self.log_prob += torch.where(stuck, 0.0, log_prob[:, -1].double())
        if self._attention is not None:
            self._attention = torch.cat([self._attention, self.decoding.attention[:, None]], dim=1)
        self.tokens = torch.cat([self.tokens, token], dim=1)
        ended = stuck | (token[:, -1] == self.request.eos)
        closed = ended | (self.limits[sentence] < self.tokens.shape[1])
        if bool(closed.any()):
            self._record_answers(closed.nonzero().squeeze(1), ended, stuck)
            rows = (~closed).nonzero().squeeze(1)
            self._row, self._sentence, self.tokens = self._row[rows], sentence[rows], self.tokens[rows]
            self.log_prob = self.log_prob[rows]
            self._attention = None if self._attention is None else self._attention[rows]
            self.decoding.select(rows)

    def _next_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the next steps and their log-probabilities, each (rows, steps); and True for rows without a
        possible token in the last step, (rows,).

        There is one step or several. Only the last of these steps may end a row. If every token is impossible (all
        logits -inf), the answer ends without a last token.
        """
        if self._draw is None:
            choice = self._choose_fused_steps()
            best, token, normalizer = self._choose(1) if choice is None else choice
            return token, best - normalizer.view_as(best), best[:, -1] == -torch.inf
        tokens = self.tokens
        allowed, logits = self.rules.apply(self.decoding.next_logits(tokens), tokens, self._sentence)
        token = self._draw(allowed, self._row)
        log_prob = logits.gather(1, token[:, None]).squeeze(1) - log_normalizer(logits)
        return token[:, None], log_prob[:, None], allowed.amax(dim=1) == -torch.inf

    def _choose_fused_steps(self) -> Choice | None:
        """Run as many fused steps as possible; return the choices of each, (rows, steps). None if unsupported."""
        most = self._most_steps() if self._attention is None else 0
        found = self.decoding.greedy(self.tokens, most) if most else None
        if found is not None:
            refuse_nan(found.normalizer[:, -1], torch.cat([self.tokens, found.token[:, :-1]], dim=1))
        return found

    def _record_answers(self, leaving: Tensor, ended: Tensor, stuck: Tensor) -> None:
        """Record the answers of the rows that end. ended, stuck (rows,): True for rows with EOS, and for rows
        without a last token."""
        maps = [None] * len(leaving) if self._attention is None else self._attention[leaving].unbind()
        columns = (t[leaving].tolist() for t in (self._sentence, self.tokens[:, 1:], ended, stuck, self.log_prob))
        for index, ids, without_last, was_stuck, value, weights in zip(*columns, maps, strict=True):
            body, length = ids[:-1] if without_last else ids, len(ids) - was_stuck
            finished = without_last and not was_stuck
            self.found[index].append(scored_hypothesis(self.config, body, value, length, finished, weights))
