"""Split lines longer than the model's limit: between sentences, between words, or between characters.

Each part begins with the language tag of its line (">>fr<<").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .words import Span, word_numbers

SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+")
SPACE = re.compile(r"\s+")
JOINER = "\u200d"


class SourceTokenizer(Protocol):
    """The methods of a tokenizer that say how a source line is cut into tokens."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]: ...

    def source_spans(self, line: str) -> list[Span]: ...

    def split_tag(self, line: str) -> tuple[str, str]: ...


@dataclass(frozen=True)
class Part:
    """A part of a line, or the whole of it.

    Attributes:
        line: the line as it was typed.
        tag: begin and end of the language tag in the line, or (0, 0).
        begin, end: position of the part's text in the line, without the tag.
        gap: white space between the tag and the text of a line that is one part.
    """

    line: str
    tag: Span
    begin: int
    end: int
    gap: int = 0

    @property
    def text(self) -> str:
        """The tag, and the text of the part."""
        return self.line[slice(*self.tag)] + self.line[self.begin - self.gap : self.end]

    def word_numbers(self, tokenizer: SourceTokenizer) -> list[int | None]:
        """The word of the line that each token of the part belongs to."""
        tag, shift = self.tag[1] - self.tag[0], self.begin - self.gap
        spans = [
            (self.tag[0] + begin, self.tag[0] + end) if begin < tag else (shift + begin - tag, shift + end - tag)
            for begin, end in tokenizer.source_spans(self.text)
        ]
        return word_numbers(self.line, spans)


def parts_of(line: str, tokenizer: SourceTokenizer, longest: int, count: int) -> list[Part]:
    """The parts of a line, each of fewer than `longest` tokens, and with at least one token besides the tag's.

    Args:
        line: as it was typed; a blank line, and one with nothing but a tag, has no part.
        count: the number of tokens of the whole line.

    A single character of more tokens is a part.
    """
    text = line.strip()
    before = len(line) - len(line.lstrip())
    tag_text, body = tokenizer.split_tag(text)
    tag = (before, before + len(tag_text)) if tag_text else (0, 0)
    end = before + len(text)
    begin = end - len(body.lstrip())
    least = len(tokenizer.encode([tag_text])[0]) if tag_text else 0
    if begin >= end or count <= least:
        return []
    if count < longest:
        return [Part(line, tag, begin, end, len(body) - (end - begin))]

    def tokens(first: int, last: int) -> int:
        return len(tokenizer.encode([Part(line, tag, first, last).text])[0])

    spans = split_spans(line[begin:end], lambda first, last: tokens(begin + first, begin + last) < longest)
    parts = [Part(line, tag, begin + first, begin + last) for first, last in spans]
    return [part for part in parts if tokens(part.begin, part.end) > least]


def split_spans(text: str, fits: Callable[[int, int], bool]) -> list[Span]:
    """Cut a text into spans that fit. A span that is too long is cut near its middle: at the end of a sentence, else
    between words, else between two characters that are not combined. Only white space at the cuts is lost."""

    def cut(begin: int, end: int) -> list[Span]:
        if end - begin <= 1 or fits(begin, end):
            return [(begin, end)]
        middle = (begin + end) // 2
        for pattern in (SENTENCE_END, SPACE):
            spaces = [match.span() for match in pattern.finditer(text, begin, end)]
            spaces = [(first, last) for first, last in spaces if begin < first and last < end]
            if spaces:
                left, right = min(spaces, key=lambda span: abs(span[0] - middle))
                return cut(begin, left) + cut(right, end)
        near = (at for away in range(end - begin) for at in (middle - away, middle + away) if begin < at < end)
        at = next((at for at in near if _may_cut_before(text, at)), middle)
        return cut(begin, at) + cut(at, end)

    return cut(0, len(text))


def _may_cut_before(text: str, at: int) -> bool:
    """Return True if a text may be cut before this character: it is no combining mark and no joiner connects it."""
    character = text[at]
    joined = character == JOINER or text[at - 1] == JOINER or "\U0001f3fb" <= character <= "\U0001f3ff"
    return not joined and not unicodedata.category(character).startswith("M")
