"""Two sentencepiece models, of the source and of the target language, with maps of pieces to ids, as Marian has them.

The ids are those of the maps (`vocab.json`), not of sentencepiece. Results equal those of Hugging Face's
`MarianTokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import sentencepiece

from .errors import CheckpointError
from .words import Span, decoded_spans, encoded_spans

WORD_START = "\u2581"
TAG = re.compile(r">>.*?<<", re.DOTALL)


@dataclass(frozen=True)
class PairFiles:
    """Files of a `PairTokenizer`.

    Attributes:
        source, target: serialised sentencepiece models.
        vocab: the id of every piece; of the source language alone where there is a `target_vocab`.
        target_vocab: the ids of the target language's pieces, where they have ids of their own.
    """

    source: bytes
    target: bytes
    vocab: dict[str, int]
    target_vocab: dict[str, int] | None = None


class PairTokenizer:
    """Text to ids and back; the same methods as `Tokenizer`.

    Args:
        files: the models and maps.
        start: the id that a translation begins with, before its first token.
        special: the pieces "eos", "unk" and "pad". A special piece is read as such where it stands in a text, and left
            out where ids become text.

    Raises:
        CheckpointError: a file is not a sentencepiece model, or a map lacks a special piece or names an id twice.
    """

    lowercase = False

    def __init__(self, files: PairFiles, *, start: int, special: Mapping[str, str]):
        self.files, self.bos, self.special = files, start, dict(special)
        self._source, self._target = _processor(files.source, "source.spm"), _processor(files.target, "target.spm")
        self._vocab = _checked(files.vocab, "vocab.json", self.special)
        self._target_vocab = self._vocab
        if files.target_vocab is not None:
            self._target_vocab = _checked(files.target_vocab, "target_vocab.json", self.special)
        self.eos, self.unk, self.pad = (self._vocab[self.special[name]] for name in ("eos", "unk", "pad"))
        end = self.special["eos"]
        if self._vocab[end] != self._target_vocab[end]:
            ids = f"{self._vocab[end]} and {self._target_vocab[end]}"
            raise CheckpointError(f"vocab.json and target_vocab.json give {end} different ids: {ids}")
        self.never = (self.pad,)  # no training lowered the logit of such a piece
        self._pieces = {id_: piece for piece, id_ in self._target_vocab.items()}
        self._source_pieces = {id_: piece for piece, id_ in self._vocab.items()}
        marks, special = {self.eos, self.unk, self.pad}, set(self.special.values())
        self._written = {id_ for id_, piece in self._pieces.items() if id_ not in marks and piece not in special}
        # With one map for both languages, the source's model also joins the target's pieces.
        self._joining = self._source if files.target_vocab is None else self._target
        self._specials = re.compile("(" + "|".join(re.escape(piece) for piece in self.special.values()) + ")")

    @property
    def model(self) -> bytes:
        """All files as bytes; two tokenizers with equal bytes are equal."""
        files = self.files
        return _bytes([files.vocab, files.target_vocab, self.bos, self.special]) + files.source + files.target

    def __len__(self) -> int:
        """Number of ids of the target language: one more than the greatest."""
        return max(self._target_vocab.values()) + 1

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line, without begin and end of sentence."""
        return [[self._vocab.get(piece, self.unk) for piece in self._split(line)] for line in lines]

    def encode_source(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line as the encoder reads it: closed by `eos`."""
        return [[*ids, self.eos] for ids in self.encode(lines)]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence; it ends at the first `eos`, and special pieces are dropped."""
        bodies = (takewhile(lambda token: token != self.eos, ids) for ids in sequences)
        kept = (self.pieces([token for token in map(int, ids) if token in self._written]) for ids in bodies)
        texts = (self._joining.decode_pieces(pieces) for pieces in kept)
        return [text.replace(WORD_START, " ").strip() for text in texts]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The written form of each target id; a leading U+2581 marks the start of a word."""
        return [self._pieces.get(int(i), self.special["unk"]) for i in ids]

    def source_pieces(self, ids: Sequence[int]) -> list[str]:
        """The written form of each source id."""
        return [self._source_pieces.get(int(i), self.special["unk"]) for i in ids]

    def source_spans(self, line: str) -> list[Span]:
        """Spans of a line, in characters, that its tokens cover."""
        spans: list[Span] = []
        for at, part, whole in self._parts(line):
            if whole:
                spans.append((at, at + len(part)))
            else:
                spans += [(at + begin, at + end) for begin, end in encoded_spans(self._source, part)]
        return spans

    def decode_spans(self, ids: Sequence[int]) -> tuple[str, list[Span | None]]:
        """Decode one sequence, not stripped; also return the span of the text that each id produced, None for dropped
        ids."""
        body = takewhile(lambda token: token != self.eos, map(int, ids))
        pieces = [self._pieces[token] if token in self._written else None for token in body]
        text, spans = decoded_spans(self._joining, pieces)
        return text.replace(WORD_START, " "), spans + [None] * (len(ids) - len(spans))

    def split_tag(self, line: str) -> tuple[str, str]:
        """Split the language tag of a line, such as ">>fr<<" or "", from the rest of the line."""
        tag = TAG.match(line)
        return ("", line) if tag is None else (tag[0], line[tag.end() :])

    def _split(self, line: str) -> list[str]:
        pieces: list[str] = []
        for _, part, whole in self._parts(line):
            pieces += [part] if whole else self._source.encode(part, out_type=str)
        return pieces

    def _parts(self, line: str) -> Iterator[tuple[int, str, bool]]:
        """Yield the place of each part of a line, the part, and whether it is one token: a special piece or a tag."""
        at = 0
        for part in self._specials.split(line):
            special = part in self.special.values()
            tag, text = ("", part) if special else self.split_tag(part)
            if tag:
                yield at, tag, True
            if text:
                yield at + len(tag), text, special
            at += len(part)


def _processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(model) and processor.LoadFromSerializedProto(model)
    except RuntimeError:
        loaded = False
    if not loaded:
        raise CheckpointError(f"{name} is not a sentencepiece model; the file is damaged or of another format")
    return processor


def _checked(vocab: Any, name: str, special: Mapping[str, str]) -> dict[str, int]:
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise CheckpointError(f"{name} is not a map of pieces to ids (a json object of whole numbers)")
    if missing := [piece for piece in special.values() if piece not in vocab]:
        raise CheckpointError(
            f"{name} has no {', '.join(missing)}; expected an id for each of {', '.join(special.values())}"
        )
    if len(set(vocab.values())) < len(vocab):
        seen: dict[int, str] = {}
        for piece, id_ in vocab.items():
            if id_ in seen:
                raise CheckpointError(f"{name} gives the id {id_} to two pieces: {seen[id_]!r} and {piece!r}")
            seen[id_] = piece
    return vocab


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode("utf-8")
