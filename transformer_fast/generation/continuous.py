"""Continuous batching: the place of a sentence that is finished is taken by the next one that waits.

A batch that is decoded to its end shrinks step by step, and its last steps read all weights for a few rows. Here the
batch is kept full: as soon as a quarter of it can be replaced, the next sentences are encoded together and join the
search beside rows that are at later positions. Each sentence gets the answers that `generate` gives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .config import GenerationConfig
from .decoding import Hypothesis, Request, evaluating, pad_sources
from .forms import cache_obstacle
from .generate import as_models, new_search, prepare
from .rules import Rules
from .search import SearchState

REFILL = 4
"""Sentences join when they will be at least the 1 / REFILL-th part of the batch: an encoder that is given one sentence
at a time is slow."""


@dataclass(frozen=True)
class Sentence:
    """What is to be translated: source ids, at least one, and the target ids that its answers begin with."""

    source: Sequence[int]
    prefix: Sequence[int] = ()


def obstacle(model: nn.Module | Sequence[nn.Module], config: GenerationConfig) -> str | None:
    """Why sentences cannot join a running search of these models with these options, or None."""
    if config.sample:
        return "what is drawn depends on the batch (sample=True)"
    if config.draft_tokens:
        return "drafted tokens are checked for a batch that nobody joins (draft_tokens)"
    if config.graph:
        return "a CUDA graph replays steps in which all rows are at one position (graph=True)"
    if config.reads_attention:
        return "attention maps of different sources do not fit into one tensor (alignments, coverage_penalty)"
    decoders = [getattr(one, "decoder", None) for one in as_models(model)]
    if not config.cache or any(cache_obstacle(decoder) is not None for decoder in decoders):
        return "only a decoder of transformer_fast, with its cache, can have rows at different positions"
    return None


class ContinuousBatch(Iterator[tuple[int, list[Hypothesis]]]):
    """Translates a stream of sentences, and gives the answers of each as soon as it is finished.

    Args:
        model: as in `generate`, one or several; their weights must not change before the end.
        sentences: read no further than to the first one that does not fit. In the order of falling lengths little of
            the encoder's work is padding.
        bos, eos: the target ids that begin and end an answer.
        config: the options; those for which there is no `obstacle`.
        tokens: the most padded source tokens of the batch, times beam: sentences join while (sentences) * (length of
            the longest source) * beam is not more. A sentence that is longer by itself is decoded alone.

    Iterating gives pairs: the number of the sentence, from 0 in the order of the stream, and its hypotheses as
    `generate` returns them. The memory is that of one batch, however long the stream is.

    Raises:
        ValueError: for options with an obstacle; and, when it is read, for a sentence that cannot be decoded.
        FloatingPointError: when iterating, if a model answers NaN. `pending` names the sentences that were in work.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        sentences: Iterable[Sentence],
        *,
        bos: int,
        eos: int,
        config: GenerationConfig,
        tokens: int,
    ) -> None:
        reason = obstacle(model, config)
        if reason is not None:
            raise ValueError(f"these models and options cannot be batched continuously: {reason}")
        if tokens < 1:
            raise ValueError(f"tokens must be an int >= 1, got {tokens!r}")
        self._models, self._config = as_models(model), config
        self._device = next(self._models[0].parameters()).device
        self._bos, self._eos, self._tokens = bos, eos, tokens
        self._sentences = enumerate(sentences)
        self._next = next(self._sentences, None)
        self._taken = 0
        self._joining: list[tuple[int, Sentence]] = []
        self._open: dict[int, int] = {}  # of the sentences in work: by number in the search, number in the stream
        self._widths: dict[int, int] = {}  # and by number in the stream, tokens of the source
        self._search: SearchState | None = None
        self._ready: deque[tuple[int, list[Hypothesis]]] = deque()

    def __next__(self) -> tuple[int, list[Hypothesis]]:
        if not self._ready:
            with evaluating(*self._models):
                while not self._ready and self._fill():
                    self._step()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    @property
    def pending(self) -> list[int]:
        """The numbers of the sentences that were read and have no answer yet."""
        return sorted([*self._open.values(), *(number for number, _ in self._joining)])

    @property
    def taken(self) -> int:
        """How many sentences were taken from the stream: those with an answer and those that are pending."""
        return self._taken

    def _fill(self) -> bool:
        """Let waiting sentences join where enough of them find a place. Returns whether any sentence is in work."""
        widths = [len(sentence.source) for _, sentence in self._joining]
        widths += [self._widths[number] for number in self._open.values()]
        longest = max(widths, default=0)
        while self._next is not None:
            sentences = len(self._open) + len(self._joining) + 1
            longest = max(longest, len(self._next[1].source))
            if sentences > 1 and sentences * self._config.beam * longest > self._tokens:
                break
            self._joining.append(self._next)
            self._taken += 1
            self._next = next(self._sentences, None)
        count = len(self._joining)
        enough = not self._open or self._next is None or REFILL * count >= len(self._open) + count
        if count and enough:
            self._admit()
        return bool(self._open)

    def _admit(self) -> None:
        request, rules = self._prepare([sentence for _, sentence in self._joining])
        kept: list[int] = []
        if self._search is None:
            self._search = new_search(self._models, request, self._config, rules)
        else:
            kept = self._search.admit(request, rules)
        numbers = [self._open[old] for old in kept] + [number for number, _ in self._joining]
        self._open = dict(enumerate(numbers))
        self._widths = {number: self._widths[number] for number in numbers[: len(kept)]}
        self._widths |= {number: len(sentence.source) for number, sentence in self._joining}
        self._joining = []

    def _step(self) -> None:
        search = self._search
        assert search is not None  # there is one as soon as a sentence is in work
        search.step()
        going_on = set(search.sentences().tolist())
        for sentence in [sentence for sentence in self._open if sentence not in going_on]:
            self._ready.append((self._open.pop(sentence), search.answers(sentence)))

    def _prepare(self, sentences: list[Sentence]) -> tuple[Request, Rules]:
        src, lengths = pad_sources([sentence.source for sentence in sentences], self._device)
        prefix = [sentence.prefix for sentence in sentences]
        return prepare(
            self._models, src, src_lengths=lengths, bos=self._bos, eos=self._eos, prefix=prefix, config=self._config
        )
