"""Batches of about equally long sentences, bounded by tokens. The order of the batches is a pure function of (seed,
epoch), so two integers suffice to resume in the middle of an epoch.
"""

from __future__ import annotations

import math
import operator
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .errors import DataError
from .text import ParallelText
from .tokenizer import BOS, EOS, PAD, Tokenizer

ENCODE_CHUNK = 10_000


class TokenStore:
    """Many short id sequences in one flat array: 4 bytes per token instead of 36 in a Python list."""

    def __init__(self) -> None:
        self._ids, self._ends = array("i"), array("q", [0])

    def append(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        """Sequence `index` as int32 `(length,)`, a view of the store; while the view exists, appending is not
        possible."""
        start, length = self._ends[index], self.length(index)
        if not length:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(self._ids, dtype=torch.int32, offset=start * self._ids.itemsize, count=length)

    def length(self, index: int) -> int:
        return self._ends[index + 1] - self._ends[index]


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, right padded with `pad`.

    Attributes:
        source: `(B, S)` int64, each row closed by `eos`.
        source_lengths, target_lengths: `(B,)` int32, `bos` or `eos` counted; they stay on the CPU, where a packed
            batch needs them.
        target_in: `(B, T)` int64, input of the decoder: `bos` and the sentence.
        target_out: `(B, T)` int64, expected output: the sentence and `eos`.
        tokens: number of the `B * T` targets that are not padding.
    """

    source: Tensor
    source_lengths: Tensor
    target_lengths: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name) for name in ("source", "target_in", "target_out")}
        return replace(self, **{name: t.pin_memory().to(device, non_blocking=True) for name, t in moved.items()})


class Corpus:
    """Encoded sentence pairs that are short enough to train on.

    Args:
        text: aligned sentences.
        tokenizer: the joint tokenizer.
        max_length: longest sentence kept, in tokens, `eos` counted. None keeps all.

    Attributes:
        empty: pairs left out because a side has no token.
        too_long: pairs left out because a side is longer than `max_length`.

    Raises:
        DataError: no pair is left.
    """

    def __init__(self, text: ParallelText, tokenizer: Tokenizer, max_length: int | None = None):
        self.empty = self.too_long = 0
        self._sides = TokenStore(), TokenStore()
        self._encode(text, tokenizer, max_length or math.inf)
        if not len(self):
            raise DataError(
                f"no sentence pair to use out of {len(text):,}: {self.empty:,} have an empty side,"
                f" {self.too_long:,} are longer than {max_length} tokens"
            )

    def _encode(self, text: ParallelText, tokenizer: Tokenizer, limit: float) -> None:
        for start in range(0, len(text), ENCODE_CHUNK):
            part = slice(start, start + ENCODE_CHUNK)
            sides = tokenizer.encode(text.source[part]), tokenizer.encode(text.target[part])
            for pair in zip(*sides, strict=True):
                if not all(pair):
                    self.empty += 1
                elif max(map(len, pair)) + 1 > limit:
                    self.too_long += 1
                else:
                    for store, ids in zip(self._sides, pair, strict=True):
                        store.append(ids)

    def __len__(self) -> int:
        return len(self._sides[0])

    def lengths(self, index: int) -> tuple[int, int]:
        """Source and target length of pair `index`, each with its `eos` (or `bos`)."""
        return self._sides[0].length(index) + 1, self._sides[1].length(index) + 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Batch of the pairs `indices`, padded to the longest pair."""
        eos, bos = torch.tensor([EOS], dtype=torch.int32), torch.tensor([BOS], dtype=torch.int32)
        source = [torch.cat((self._sides[0][i], eos)) for i in indices]
        target = [self._sides[1][i] for i in indices]
        return Batch(
            source=_pad(source),
            source_lengths=torch.tensor([len(s) for s in source], dtype=torch.int32),
            target_lengths=torch.tensor([len(t) + 1 for t in target], dtype=torch.int32),
            target_in=_pad([torch.cat((bos, t)) for t in target]),
            target_out=_pad([torch.cat((t, eos)) for t in target]),
            tokens=sum(len(t) + 1 for t in target),
        )


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=PAD).long()


def plan_batches(corpus: Corpus, batch_tokens: int, order: Sequence[int]) -> list[list[int]]:
    """Cut `order`, sorted by length, into batches of at most `batch_tokens` padded tokens on either side.

    The sort is stable, so `order` decides which sentences of equal length meet in a batch.
    """
    by_length = sorted(order, key=lambda i: corpus.lengths(i)[::-1])
    batches: list[list[int]] = []
    widest = 0
    for index in by_length:
        length = max(corpus.lengths(index))
        widest = max(widest, length)
        if not batches or (len(batches[-1]) + 1) * widest > batch_tokens:
            batches.append([])
            widest = length
        batches[-1].append(index)
    return batches


class TokenBatches:
    """Endless stream of training batches with the position `(epoch, position)`.

    Args:
        corpus: the encoded pairs.
        batch_tokens: maximum number of padded tokens per batch, on either side.
        seed: decides the order of batches, together with the epoch.
    """

    def __init__(self, corpus: Corpus, batch_tokens: int, seed: int):
        self.corpus, self.batch_tokens, self.seed = corpus, batch_tokens, seed
        self.epoch = self.position = 0
        self._plan = self.plan(0)

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of one epoch, as lists of pair indices; each pair occurs once."""
        # A string seed goes through SHA-512, so that neighbouring epochs and seeds are unrelated, on every platform.
        rng = random.Random(f"transformer_fast batches {self.seed} {epoch}")
        order = list(range(len(self.corpus)))
        rng.shuffle(order)
        batches = plan_batches(self.corpus, self.batch_tokens, order)
        rng.shuffle(batches)
        return batches

    def next_batch(self, rank: int = 0, world_size: int = 1) -> tuple[Batch, int]:
        """Rows of the next batch for this process, and the number of targets in the whole batch. A process without rows
        gets one row whose targets are all padding."""
        if self.position == len(self._plan):
            self.seek(self.epoch + 1, 0)
        self.position += 1
        indices = self._plan[self.position - 1]
        tokens = sum(self.corpus.lengths(i)[1] for i in indices)
        if rows := indices[rank::world_size]:
            return self.corpus.batch(rows), tokens
        batch = self.corpus.batch(indices[:1])
        return replace(batch, target_out=torch.full_like(batch.target_out, PAD), tokens=0), tokens

    @property
    def epochs_done(self) -> int:
        """Epochs whose every batch has been given out."""
        return self.epoch + (self.position == len(self._plan))

    def seek(self, epoch: int, position: int) -> None:
        """Continue with batch `position` of `epoch`.

        Raises:
            ValueError, TypeError: there is no such batch.
        """
        self._plan = self.plan(operator.index(epoch))
        if not 0 <= position <= len(self._plan):
            raise ValueError(f"position is {position!r}; expected 0 to {len(self._plan)}, the batches of an epoch")
        self.epoch, self.position = epoch, position
