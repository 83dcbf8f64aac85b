"""Mapping of sentencepiece pieces to the words of a text, for encoding and decoding.

Words are separated by white space in the original text: ``text.split()``. sentencepiece normalises a text before it
cuts it (a no-break space, a zero-width space or a diaeresis becomes a space, an ellipsis three characters), and writes
an unknown piece with spaces around it. So counting pieces that begin a word would be wrong. sentencepiece gives the
bytes of the text that a piece covers; the piece belongs to the word at its first non-space character.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import sentencepiece

Span = tuple[int, int]
WORD = re.compile(r"\S+")


def encoded_spans(processor: sentencepiece.SentencePieceProcessor, text: str) -> list[Span]:
    """Spans of a text, in characters, that its pieces cover: begin and end in the original text."""
    return _in_characters(text, _pieces(processor.encode(text, out_type="serialized_proto"))[1])


def decoded_spans(
    processor: sentencepiece.SentencePieceProcessor, tokens: Sequence[int | str | None]
) -> tuple[str, list[Span | None]]:
    """Decode ids, or pieces, to a text; also return the span of the text that each of them produced.

    tokens: ids or pieces; None for a token that produces no text and has no span.
    """
    written = [token for token in tokens if token is not None]
    text, spans = _pieces(processor.decode(written, out_type="serialized_proto") if written else b"")
    decoded = text.decode("utf-8")
    found = iter(_in_characters(decoded, spans))
    return decoded, [None if token is None else next(found) for token in tokens]


def word_numbers(text: str, spans: Sequence[Span]) -> list[int | None]:
    """Index in ``text.split()`` of the word of each span: the word at the span's first non-space character.

    An empty span, or a span of white space, belongs to the next word, or else to the last word; None if the text has no
    word.
    """
    ends = [match.end() for match in WORD.finditer(text)]
    return [min(bisect_right(ends, begin), len(ends) - 1) if ends else None for begin, _ in spans]


def lowered_spans(text: str, spans: Sequence[Span]) -> list[Span]:
    """Convert spans of ``text.lower()`` to spans of the text; some letters have a lower case of two characters."""
    if len(text.lower()) == len(text):
        return list(spans)
    origin = [index for index, letter in enumerate(text) for _ in letter.lower()]
    origin.append(len(text))
    return [(origin[begin], origin[end - 1] + 1 if end > begin else origin[begin]) for begin, end in spans]


def _in_characters(text: str, spans: Sequence[Span]) -> list[Span]:
    """Convert spans in UTF-8 bytes to spans in characters."""
    if text.isascii():
        return list(spans)
    numbers = [number for number, character in enumerate(text) for _ in character.encode("utf-8")]
    numbers.append(len(text))
    return [(numbers[begin], numbers[end]) for begin, end in spans]


def _pieces(data: bytes) -> tuple[bytes, list[Span]]:
    """The text and the spans, in bytes, of a serialised ``SentencePieceText``.

    The fields of the message are 1: the text, and 2: the pieces, each with 4: begin and 5: end. Read here, because
    Google's protobuf is no dependency of sentencepiece, and the classes that sentencepiece has for it change with its
    versions.
    """
    text, spans = b"", []
    for field, value in _fields(data):
        if field == 1:
            text = bytes(value)
        elif field == 2:
            piece = dict(_fields(value))
            spans.append((piece.get(4, 0), piece.get(5, 0)))
    return text, spans


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, each with its number; those of a fixed width are left out."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif kind == 2:
            size, at = _varint(data, at)
            yield key >> 3, data[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
