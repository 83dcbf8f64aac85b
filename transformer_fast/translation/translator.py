"""A trained run folder as a translator: lines in, lines out, in order, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from ..generation import beam_search, greedy
from .errors import ConfigError
from .tokenizer import Tokenizer

CHUNK_LINES = 2_000
CHUNK_CHARACTERS = 1_000_000
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+")
SPACE = re.compile(r"\s+")


class Translator:
    """Translates lines of text with a trained model.

    Args:
        model: a `transformer_fast.Transformer`, on the device it shall run on.
        tokenizer: the one it was trained with.
        beam: hypotheses a sentence keeps; 1 is greedy decoding.
        length_penalty: alpha of `beam_search`.
        batch_tokens: most padded source tokens of a batch, times beam.
        longest: source tokens the model can be trusted with; a longer line is translated in pieces.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        beam: int = 5,
        length_penalty: float = 0.6,
        batch_tokens: int = 8192,
        longest: int = 256,
    ) -> None:
        for name, value, least in (("beam", beam, 1), ("batch_tokens", batch_tokens, 1), ("longest", longest, 2)):
            if value < least:
                raise ConfigError(f"{name} is {value}; expected a whole number >= {least}")
        self.model, self.tokenizer = model, tokenizer
        self.beam, self.length_penalty = beam, length_penalty
        self.batch_tokens, self.longest = batch_tokens, longest
        self.device = next(model.parameters()).device

    def translate(self, lines: Iterable[str], *, chunk_lines: int = CHUNK_LINES) -> Iterator[str]:
        """One translation for every line, in order; a blank line gives an empty one.

        Lines are read `chunk_lines` at a time (fewer if they are long), so memory does not grow with the text.
        """
        for chunk in _chunks(lines, chunk_lines):
            yield from self._translate_chunk(chunk)

    def decode_ids(self, lines: list[str]) -> list[list[int]]:
        """The target ids of each line's translation, without BOS and EOS; every line as one piece."""
        return self._decode(self.tokenizer.encode_source(lines))

    def _translate_chunk(self, lines: list[str]) -> list[str]:
        pieces = [(number, piece) for number, line in enumerate(lines) for piece in self._pieces(line)]
        sources = self.tokenizer.encode_source([piece for _, piece in pieces])
        translated: list[str] = [""] * len(pieces)
        # Longest first: a batch that does not fit into memory shows at once, not after an hour.
        order = sorted(range(len(pieces)), key=lambda i: -len(sources[i]))
        for batch in self._batches(order, sources):
            texts = self.tokenizer.decode(self._decode([sources[i] for i in batch]))
            for index, text in zip(batch, texts, strict=True):
                translated[index] = SPACE.sub(" ", text).strip()
        joined: list[list[str]] = [[] for _ in lines]
        for (number, _), text in zip(pieces, translated, strict=True):
            joined[number].append(text)
        return [" ".join(filter(None, texts)) for texts in joined]

    def _pieces(self, line: str) -> list[str]:
        def fits(text: str) -> bool:
            # A token has at least one character, so most lines need no count.
            return len(text) < self.longest or len(self.tokenizer.encode([text])[0]) < self.longest

        return split_text(line.strip(), fits) if line.strip() else []

    def _batches(self, order: list[int], sources: list[list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:
            width = len(sources[batch[0] if batch else index])
            if batch and (len(batch) + 1) * width * self.beam > self.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _decode(self, sources: list[list[int]]) -> list[list[int]]:
        width = max(map(len, sources))
        marks = {"bos": self.tokenizer.bos, "eos": self.tokenizer.eos}
        src = torch.tensor([ids + [self.tokenizer.pad] * (width - len(ids)) for ids in sources], device=self.device)
        lengths = torch.tensor([len(ids) for ids in sources], device=self.device)
        if self.beam == 1:
            return greedy(self.model, src, src_lengths=lengths, **marks)
        found = beam_search(
            self.model, src, src_lengths=lengths, beam=self.beam, length_penalty=self.length_penalty, **marks
        )
        return [hypotheses[0].tokens for hypotheses in found]


def _chunks(lines: Iterable[str], most: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line)
        if len(chunk) >= most or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Cut a text into pieces that fit, near the middle: at the end of a sentence if it has one, else between
    words, else anywhere. Nothing but white space at the cuts is lost."""
    if len(text) <= 1 or fits(text):
        return [text]
    middle = len(text) // 2
    for pattern in (SENTENCE_END, SPACE):
        cuts = [match.span() for match in pattern.finditer(text)]
        if cuts:
            start, end = min(cuts, key=lambda span: abs(span[0] - middle))
            break
    else:
        start = end = middle
    return split_text(text[:start], fits) + split_text(text[end:], fits)
