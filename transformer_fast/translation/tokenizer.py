"""One subword vocabulary for both languages: byte-pair encoding through the sentencepiece library.

Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016);
Kudo, Richardson, "SentencePiece" (2018). A joint vocabulary lets the source embedding, the target embedding
and the output layer share one matrix (Press, Wolf 2017).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

import sentencepiece

from .errors import CheckpointError, ConfigError, DataError
from .words import Span, decoded_spans, encoded_spans, lowered_spans

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIALS = 4


class Tokenizer:
    """Text to ids and back. Ids 0..3 are always padding, unknown, begin and end of sentence.

    Args:
        model: a serialised sentencepiece model, as `Tokenizer.train(...).model` or a `tokenizer.model` file holds it.
        lowercase: lower-case all text before it is encoded, as it was before the vocabulary was learnt.

    Raises:
        CheckpointError: `model` is not a sentencepiece model, or one with other special ids.
    """

    pad, unk, bos, eos = PAD, UNK, BOS, EOS
    never: tuple[int, ...] = ()
    """Target ids that a search must be kept from choosing; a model trained here has learnt which."""

    def __init__(self, model: bytes, *, lowercase: bool = False):
        self.model, self.lowercase = model, lowercase
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = bool(model) and self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            loaded = False
        if not loaded:
            raise CheckpointError(
                "the tokenizer is not a sentencepiece model; the file is damaged or of another format"
            )
        found = tuple(getattr(self._processor, f"{name}_id")() for name in ("pad", "unk", "bos", "eos"))
        if found != (PAD, UNK, BOS, EOS):
            raise CheckpointError(
                f"the tokenizer has pad, unk, bos, eos = {found}; expected {(PAD, UNK, BOS, EOS)}:"
                " it was not trained by transformer_fast"
            )

    @classmethod
    def train(cls, sentences: Iterable[str], vocab_size: int, *, lowercase: bool = False) -> Tokenizer:
        """Learn a vocabulary of at most `vocab_size` pieces (specials included) from `sentences`, lower-cased or not.

        A corpus too small for `vocab_size` pieces gives the largest vocabulary it supports; look at `len()`.

        Raises:
            ConfigError: `vocab_size` is too small to hold every character of the text once.
            DataError: there is no text to learn from.
        """
        lines = [line.lower() if lowercase else line for line in sentences if line.strip()]
        if not lines:
            raise DataError("no text to learn a vocabulary from: every line is empty")
        try:
            return cls(_train_bpe(lines, vocab_size), lowercase=lowercase)
        except RuntimeError as error:
            needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
            if not needed:
                raise
            raise ConfigError(
                f"vocab_size {vocab_size} is too small for this text: its characters and the {SPECIALS} special pieces"
                f" need at least {needed[1]}"
            ) from None

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line, without begin and end of sentence."""
        lines = [line.lower() if self.lowercase else line for line in lines]
        if len(lines) == 1:  # a call for several lines starts threads, which takes ten times as long as a sentence
            return [self._processor.encode(lines[0], out_type=int)]
        return self._processor.encode(lines, out_type=int)

    def encode_source(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line as the encoder reads it: closed by `eos`, so that even an empty line has one token."""
        return [[*ids, EOS] for ids in self.encode(lines)]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence; it ends at the first `eos`, and padding and `bos` are dropped."""
        bodies = (takewhile(lambda token: token != EOS, ids) for ids in sequences)
        # One by one, because a call for several starts threads, which takes a hundred times as long as a sentence.
        return [self._processor.decode_ids([int(token) for token in ids if token not in (PAD, BOS)]) for ids in bodies]

    def source_spans(self, line: str) -> list[Span]:
        """Spans of a line, in characters, that its tokens cover."""
        if not self.lowercase:
            return encoded_spans(self._processor, line)
        return lowered_spans(line, encoded_spans(self._processor, line.lower()))

    def decode_spans(self, ids: Sequence[int]) -> tuple[str, list[Span | None]]:
        """Decode one sequence; also return the span of the text that each id produced, None for dropped ids."""
        body = takewhile(lambda token: token != EOS, map(int, ids))
        text, spans = decoded_spans(self._processor, [None if token in (PAD, BOS) else token for token in body])
        return text, spans + [None] * (len(ids) - len(spans))

    def split_tag(self, line: str) -> tuple[str, str]:
        """Return the tag to repeat before each part of a line, here none, and the line."""
        return "", line

    def source_pieces(self, ids: Sequence[int]) -> list[str]:
        """Pieces of source ids; both languages share the vocabulary, so this is `pieces`."""
        return self.pieces(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The written form of each id, for pictures and logs; a leading U+2581 marks the start of a word."""
        return [self._processor.id_to_piece(int(i)) for i in ids]


def _train_bpe(lines: list[str], vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
