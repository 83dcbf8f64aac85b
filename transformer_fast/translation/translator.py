"""A trained run folder as a translator: lines in, lines out, in order, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..generation import GenerationConfig, Hypothesis, generate
from ..generation.generate import length_obstacle, models_obstacle
from ..generation.request import pad_sources
from .errors import ConfigError
from .pair_tokenizer import PairTokenizer
from .parts import SPACE, Part, parts_of
from .tokenizer import Tokenizer
from .words import word_numbers
from .worker_pool import translate_chunks

CHUNK_LINES = 2_000
CHUNK_CHARACTERS = 1_000_000
PART_BITS = 16
"""Bits of a random stream's number for the part of a line; the other bits hold the line number."""
WORKER_LINES = 250
"""Minimum number of lines per chunk; fewer do not fill batches."""

AnyTokenizer = Tokenizer | PairTokenizer
Answers = Iterator[tuple[int, list[Hypothesis] | Exception]]


@dataclass(frozen=True)
class Translation:
    """One translation of a line.

    Attributes:
        text: without a line end, white space as single spaces.
        score, log_prob: as in :class:`~transformer_fast.generation.Hypothesis`; sums, where the line was translated in
            pieces; NaN for a line that could not be translated.
        alignment: (source word, target word) pairs by rising target: for each token of the translation the source
            token that got most of its attention. Words are counted from 0, as ``line.split()`` and ``text.split()``
            have them, whatever parts the line was cut into. None unless alignments were asked for.
    """

    text: str
    score: float = 0.0
    log_prob: float = 0.0
    alignment: tuple[tuple[int, int], ...] | None = None


class Translator:
    """Translates lines of text with a trained model.

    Args:
        model: a `transformer_fast.Transformer`, on the device it shall run on; or several that share the tokenizer,
            the mean of whose probabilities decides.
        tokenizer: the one it was trained with.
        beam: number of hypotheses per sentence; 1 is greedy decoding.
        length_penalty: alpha of `beam_search`.
        config: all options of `generate`, in the place of the two above; `trained.generation` are those of the run.
        batch_tokens: most padded source tokens of a batch, times beam (or n_best, where answers are drawn).
        longest: maximum number of source tokens for reliable output; a longer line is translated in parts.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        tokenizer: AnyTokenizer,
        *,
        beam: int = 5,
        length_penalty: float = 0.6,
        config: GenerationConfig | None = None,
        batch_tokens: int = 8192,
        longest: int = 256,
    ) -> None:
        for name, value, least in (("batch_tokens", batch_tokens, 1), ("longest", longest, 2)):
            if value < least:
                raise ConfigError(f"{name} is {value}; expected a whole number >= {least}")
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.tokenizer = tokenizer
        self.config = config or GenerationConfig(beam=beam, length_penalty=length_penalty, suppress=tokenizer.never)
        self.batch_tokens, self.longest = batch_tokens, longest
        self.device = next(self.models[0].parameters()).device
        if reason := models_obstacle(self.models, self.config):
            raise ConfigError(reason)

    def translate(self, lines: Iterable[str], *, chunk_lines: int = CHUNK_LINES, workers: int = 1) -> Iterator[str]:
        """One translation for every line, in order; a blank line gives an empty one.

        Lines are read `chunk_lines` at a time (fewer if they are long), so memory does not grow with the text.
        workers: number of workers, as in `translations`.
        """
        for found in self.translations(lines, chunk_lines=chunk_lines, workers=workers):
            yield found[0].text

    def translations(
        self,
        lines: Iterable[str | Exception],
        *,
        chunk_lines: int = CHUNK_LINES,
        workers: int = 1,
        on_error: Callable[[int, str], None] | None = None,
    ) -> Iterator[list[Translation]]:
        """The best translations of every line, best first, in the order of the lines; at least one, perhaps empty.

        lines: an exception stands for a line that could not be read.
        workers: number of Python threads that translate at the same time. Each has a share of PyTorch's threads and of
            `chunk_lines`. More than one requires a CPU. Until the last line the models are in evaluation mode.
        on_error: called with number (from 1) and reason for a line that could not be read or translated, which then
            gets an empty translation; without it the first such line raises.

        Raises:
            ValueError, FloatingPointError, torch.OutOfMemoryError: without `on_error`, for such a line.
            ConfigError: for an invalid number of workers.
        """
        if workers < 1:
            raise ConfigError(f"workers is {workers}; expected a whole number >= 1")
        if workers > 1 and self.device.type != "cpu":
            raise ConfigError(f"workers={workers} is for models on a CPU; expected 1 for one on {self.device}")
        if workers > 1:
            chunks = _chunks(lines, max(chunk_lines // (2 * workers), min(chunk_lines, WORKER_LINES)))
            yield from translate_chunks(self.translate_chunk, chunks, self.models, workers=workers, on_error=on_error)
            return
        first = 1
        for chunk in _chunks(lines, chunk_lines):
            yield from self.translate_chunk(chunk, first, on_error)
            first += len(chunk)

    def decode_ids(self, lines: list[str]) -> list[list[int]]:
        """The target ids of each line's translation, without BOS and EOS; every line as one piece."""
        return [found[0].tokens for found in self._decode(self.tokenizer.encode_source(lines))]

    def translate_chunk(
        self, lines: list[str | Exception], first: int, on_error: Callable[[int, str], None] | None
    ) -> Iterator[list[Translation]]:
        """Compute `translations` of lines in memory; first: the number of the first line."""
        reasons = {number: str(line) for number, line in enumerate(lines) if isinstance(line, Exception)}
        if reasons and on_error is None:
            number, reason = next(iter(reasons.items()))
            raise ValueError(f"line {first + number}: {reason}")
        parts, sources = self._parts({n: line for n, line in enumerate(lines) if isinstance(line, str)})
        for (number, _), source in zip(parts, sources, strict=True):
            if reason := length_obstacle(self.config, len(source)):
                if on_error is None:
                    raise ValueError(f"line {first + number}: {reason}")
                reasons.setdefault(number, reason)
        found: list[list[Translation]] = [[] for _ in parts]
        # Longest first: a batch that does not fit into memory shows at once, not after an hour.
        order = [index for index, (number, _) in enumerate(parts) if number not in reasons]
        order.sort(key=lambda index: -len(sources[index]))
        streams = _streams(first + number for number, _ in parts)
        for index, answer in self._decode_batches(order, sources, streams, keep_errors=on_error is not None):
            if isinstance(answer, Exception):
                reasons.setdefault(parts[index][0], str(answer))
            else:
                found[index] = self._texts(parts[index][1], answer)
        of_line: list[list[list[Translation]]] = [[] for _ in lines]
        for (number, _), answers in zip(parts, found, strict=True):
            of_line[number].append(answers)
        for number, answers_of_parts in enumerate(of_line):
            if number in reasons:
                on_error(first + number, reasons[number])
                yield [Translation("", math.nan, math.nan)]
            else:
                yield _join_parts(answers_of_parts)

    def _parts(self, lines: dict[int, str]) -> tuple[list[tuple[int, Part]], list[list[int]]]:
        """Split lines to parts, by number; return each part with its line number, and the source ids of each part."""
        whole = dict(zip(lines, self.tokenizer.encode_source([line.strip() for line in lines.values()])))
        parts: list[tuple[int, Part]] = []
        sources: list[list[int]] = []
        for number, line in lines.items():
            own = parts_of(line, self.tokenizer, self.longest, len(whole[number]) - 1)
            parts += [(number, part) for part in own]
            one = len(own) == 1 and len(whole[number]) <= self.longest
            sources += [whole[number]] if one else self.tokenizer.encode_source([part.text for part in own])
        return parts, sources

    def _decode_batches(
        self, order: list[int], sources: list[list[int]], streams: list[int], *, keep_errors: bool
    ) -> Answers:
        """Decode sources in this order, batch after batch; yield the number and the answer of each."""
        decode = self._decode_or_errors if keep_errors else self._decode
        for batch in self._batches(order, sources):
            given = [sources[index] for index in batch], [streams[index] for index in batch]
            yield from zip(batch, decode(*given), strict=True)

    def _batches(self, order: list[int], sources: list[list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        rows = max(self.config.beam, self.config.n_best)
        for index in order:
            width = len(sources[batch[0] if batch else index])
            if batch and (len(batch) + 1) * width * rows > self.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _decode(self, sources: list[list[int]], streams: list[int] | None = None) -> list[list[Hypothesis]]:
        marks = {"bos": self.tokenizer.bos, "eos": self.tokenizer.eos}
        src, lengths = pad_sources(sources, self.device, self.tokenizer.pad)
        return generate(self.models, src, src_lengths=lengths, streams=streams, config=self.config, **marks)

    def _decode_or_errors(self, sources: list[list[int]], streams: list[int]) -> list[list[Hypothesis] | Exception]:
        """Decode a batch; halve a failing batch until the failing sentence is alone."""
        try:
            return self._decode(sources, streams)
        except (FloatingPointError, torch.OutOfMemoryError) as error:
            if len(sources) == 1:
                return [error]
        half = len(sources) // 2
        first = self._decode_or_errors(sources[:half], streams[:half])
        return first + self._decode_or_errors(sources[half:], streams[half:])

    def _texts(self, part: Part, hypotheses: list[Hypothesis]) -> list[Translation]:
        texts = self.tokenizer.decode([hypothesis.tokens for hypothesis in hypotheses])
        words = part.word_numbers(self.tokenizer) if self.config.alignments else []
        return [
            Translation(SPACE.sub(" ", text).strip(), h.score, h.log_prob, self._alignment(words, h))
            for text, h in zip(texts, hypotheses, strict=True)
        ]

    def _alignment(self, sources: list[int | None], hypothesis: Hypothesis) -> tuple[tuple[int, int], ...] | None:
        """Pairs (source word, target word) of an alignment; a token that produced no text is in no pair."""
        if hypothesis.alignment is None:
            return None
        text, spans = self.tokenizer.decode_spans(hypothesis.tokens)
        written = [(token, span) for token, span in enumerate(spans) if span is not None]
        if not sources or not written:
            return ()
        attended = hypothesis.alignment[:, : len(sources)].argmax(dim=1).tolist()  # EOS at the end is no word
        targets = word_numbers(text, [span for _, span in written])
        found = {(sources[attended[token]], target) for (token, _), target in zip(written, targets)}
        pairs = {(source, target) for source, target in found if source is not None and target is not None}
        return tuple(sorted(pairs, key=lambda pair: pair[::-1]))


def _streams(lines: Iterable[int]) -> list[int]:
    """Random stream per part, from the line number, so that results do not depend on chunks and workers."""
    found: list[int] = []
    for line in lines:
        found.append(found[-1] + 1 if found and found[-1] >> PART_BITS == line else line << PART_BITS)
    return found


def _join_parts(answers_of_parts: list[list[Translation]]) -> list[Translation]:
    """Join the translations of a line's parts: the best of all parts, then the second best of all parts, and so on."""
    if not answers_of_parts:
        return [Translation("", alignment=())]
    if len(answers_of_parts) == 1:
        return answers_of_parts[0]
    joined = []
    for chosen in zip(*answers_of_parts):
        alignment: list[tuple[int, int]] = []
        words = 0
        for answer in chosen:
            alignment += [(source, words + target) for source, target in answer.alignment or ()]
            words += len(answer.text.split())
        text = " ".join(filter(None, (answer.text for answer in chosen)))
        scores = sum(answer.score for answer in chosen), sum(answer.log_prob for answer in chosen)
        joined.append(Translation(text, *scores, None if chosen[0].alignment is None else tuple(alignment)))
    return joined


def _chunks(lines: Iterable[str | Exception], most: int) -> Iterator[list[str | Exception]]:
    chunk: list[str | Exception] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line) if isinstance(line, str) else 0
        if len(chunk) >= most or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
