"""From files to batches: reading, the joint vocabulary, batches limited by tokens."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from transformer_fast.translation import ConfigError, DataError, Tokenizer, read_lines, read_parallel
from transformer_fast.translation.batching import Corpus, TokenBatches, TokenStore
from transformer_fast.translation.errors import CheckpointError
from transformer_fast.translation.numbers import english, german, sample_numbers
from transformer_fast.translation.text import ParallelText
from transformer_fast.translation.tokenizer import BOS, EOS, PAD, UNK

# Files


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


READ = {
    "line feeds alone": ("t", "a\u2028b\r\n\x0cc\x85d\n\nlast".encode(), ["a\u2028b", "\x0cc\x85d", "", "last"]),
    "a final line feed": ("t", b"a\nb\n", ["a", "b"]),
    "two of them": ("t", b"a\n\n", ["a", ""]),
    "the mark of UTF-8": ("t", b"\xef\xbb\xbfa\nb", ["a", "b"]),
    "gzip": ("t.gz", gzip.compress("ä\nö\n".encode()), ["ä", "ö"]),
    "gzip by its content": ("t.txt", gzip.compress("ä\nö\n".encode()), ["ä", "ö"]),
}


@pytest.mark.parametrize("case", READ)
def test_lines_of_a_file(tmp_path: Path, case: str) -> None:
    name, data, lines = READ[case]
    assert read_lines(write(tmp_path / name, data)) == lines


BAD_FILES = {
    "empty": (b"", "t.gz is empty; expected one sentence per line"),
    "only blank lines": (gzip.compress(b"\n \n\n"), "is empty; expected one sentence per line"),
    "not gzip": (b"plain text\n", "ends in .gz but is not a gzip file"),
    "cut gzip": (gzip.compress(b"some text\n" * 50)[:-12], "damaged or truncated gzip"),
    "altered gzip": (gzip.compress(b"some text\n")[:-8] + bytes(8), "damaged or truncated gzip"),
    "invalid UTF-8": (
        gzip.compress(b"good\nb\xff" + b"ad\n"),
        r"t.gz, line 2: not valid UTF-8 \(byte 0xff at column 2\)",
    ),
    "UTF-16": (gzip.compress("text\n".encode("utf-16")), "line 1: not valid UTF-8"),
    "cut character": (gzip.compress("x\nä".encode()[:-1]), "line 2: not valid UTF-8"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path: Path, case: str) -> None:
    data, message = BAD_FILES[case]
    with pytest.raises(DataError, match=message):
        read_lines(write(tmp_path / "t.gz", data))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist"):
        read_lines(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="is a folder"):
        read_lines(tmp_path)


def test_unequal_line_counts_are_both_named(tmp_path: Path) -> None:
    left, right = write(tmp_path / "l", b"x\n" * 1200), write(tmp_path / "r", b"y\n" * 3)
    with pytest.raises(DataError, match=r"not aligned: .*l has 1,200 lines, .*r has 3"):
        read_parallel(left, right)


def test_fingerprint_follows_the_text_not_the_file(tmp_path: Path) -> None:
    plain = read_parallel(write(tmp_path / "a", b"x\ny\n"), write(tmp_path / "b", b"u\nv\n"))
    packed = read_parallel(write(tmp_path / "c", gzip.compress(b"x\ny\n")), write(tmp_path / "d", b"u\nv"))
    moved = read_parallel(write(tmp_path / "e", b"x\ny\n"), write(tmp_path / "f", b"u\nw\n"))
    assert plain.fingerprint == packed.fingerprint != moved.fingerprint


# Vocabulary


@pytest.fixture(scope="module")
def numbers() -> ParallelText:
    sample = sample_numbers(1500, held_out=False)
    return ParallelText([english(n) for n in sample], [german(n) for n in sample], "")


@pytest.fixture(scope="module")
def tokenizer(numbers: ParallelText) -> Tokenizer:
    return Tokenizer.train((*numbers.source, *numbers.target), 120)


def test_vocabulary_has_the_asked_size_and_fixed_specials(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == 120
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert tokenizer.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "<unk>", "<s>", "</s>"]


def test_text_comes_back(tokenizer: Tokenizer, numbers: ParallelText) -> None:
    for side in (numbers.source, numbers.target):
        ids = tokenizer.encode(side)
        assert all(token > EOS for row in ids for token in row)
        assert tokenizer.decode(ids) == side


def test_source_ends_with_eos_and_decode_stops_there(tokenizer: Tokenizer) -> None:
    (plain,), (closed,) = tokenizer.encode(["forty-one"]), tokenizer.encode_source(["forty-one"])
    assert closed == [*plain, EOS]
    assert tokenizer.encode_source([""]) == [[EOS]]
    assert tokenizer.decode([[BOS, *plain, EOS, *plain, PAD]]) == ["forty-one"]


def test_training_is_deterministic_and_its_bytes_are_all(tokenizer: Tokenizer, numbers: ParallelText) -> None:
    again = Tokenizer.train((*numbers.source, *numbers.target), 120)
    assert again.model == tokenizer.model
    assert Tokenizer(again.model).encode(numbers.source[:9]) == tokenizer.encode(numbers.source[:9])


def test_small_text_gives_the_vocabulary_it_supports() -> None:
    small = Tokenizer.train(["hello world", "hallo welt"], 8000)
    assert 4 + 9 < len(small) < 8000
    assert small.decode(small.encode(["hello world"])) == ["hello world"]


def test_unknown_character_is_unk(tokenizer: Tokenizer) -> None:
    assert UNK in tokenizer.encode(["你"])[0]


def test_too_small_a_vocabulary_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size 6 is too small .* need at least 14"):
        Tokenizer.train(["hello world", "hallo welt"], 6)
    assert len(Tokenizer.train(["hello world", "hallo welt"], 14)) == 14


def test_no_text_to_learn_from() -> None:
    with pytest.raises(DataError, match="every line is empty"):
        Tokenizer.train(["", "  "], 100)


@pytest.mark.parametrize("data", [b"", b"not a model" * 10])
def test_bytes_that_are_no_tokenizer(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        Tokenizer(data)


def test_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 5),
        model_prefix=str(tmp_path / "foreign"),
        vocab_size=15,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(CheckpointError, match=r"pad, unk, bos, eos = \(-1, 0, 1, 2\); expected \(0, 1, 2, 3\)"):
        Tokenizer((tmp_path / "foreign.model").read_bytes())


# Batches


@pytest.fixture(scope="module")
def corpus(numbers: ParallelText, tokenizer: Tokenizer) -> Corpus:
    return Corpus(numbers, tokenizer)


def test_token_store_keeps_every_sequence() -> None:
    rows = [[5, 6, 7], [], [70_000]]
    store = TokenStore()
    for row in rows:
        store.append(row)
    assert len(store) == 3
    assert [store[i].tolist() for i in range(3)] == rows
    assert [store.length(i) for i in range(3)] == [3, 0, 1]


@pytest.mark.parametrize("budget", [60, 500, 100_000])
def test_an_epoch_has_every_pair_once_within_the_budget(corpus: Corpus, budget: int) -> None:
    plan = TokenBatches(corpus, budget, seed=5).plan(2)
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(corpus)))
    for indices in plan:
        batch = corpus.batch(indices)
        assert max(batch.source.numel(), batch.target_in.numel()) <= budget


def test_batches_hold_little_padding(corpus: Corpus) -> None:
    batches = [corpus.batch(indices) for indices in TokenBatches(corpus, 1000, seed=0).plan(0)]
    assert sum(b.tokens for b in batches) > 0.9 * sum(b.target_out.numel() for b in batches)


def test_plan_is_a_function_of_seed_and_epoch(corpus: Corpus) -> None:
    first, second = (TokenBatches(corpus, 300, seed=7) for _ in range(2))
    assert first.plan(3) == second.plan(3)
    assert first.plan(3) != first.plan(4)
    assert first.plan(3) != TokenBatches(corpus, 300, seed=8).plan(3)
    assert {frozenset(b) for b in first.plan(3)} != {frozenset(b) for b in first.plan(4)}


def test_seek_continues_the_stream(corpus: Corpus) -> None:
    stream = TokenBatches(corpus, 400, seed=1)
    per_epoch = len(stream.plan(0))
    places, batches = [], []
    for _ in range(2 * per_epoch + 3):
        batches.append(stream.next_batch()[0])
        places.append((stream.epoch, stream.position))
    assert places[-1] == (2, 3)
    for at in (0, per_epoch - 1, per_epoch, per_epoch + 5):
        resumed = TokenBatches(corpus, 400, seed=1)
        resumed.seek(*places[at])
        following = resumed.next_batch()[0]
        assert torch.equal(following.source, batches[at + 1].source)
        assert torch.equal(following.target_out, batches[at + 1].target_out)


@pytest.mark.parametrize("place", [(0, -1), (0, 10_000), (0.5, 0)])
def test_there_are_no_batches_at_wrong_places(corpus: Corpus, place: tuple[Any, int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        TokenBatches(corpus, 400, seed=1).seek(*place)


def test_batch_layout(corpus: Corpus, tokenizer: Tokenizer, numbers: ParallelText) -> None:
    indices = [3, 1400, 17]
    batch = corpus.batch(indices)
    assert batch.source.dtype == batch.target_in.dtype == batch.target_out.dtype == torch.int64
    for row, index in enumerate(indices):
        (source,), (target,) = (tokenizer.encode([side[index]]) for side in (numbers.source, numbers.target))
        for tensor, ids in (
            (batch.source, [*source, EOS]),
            (batch.target_in, [BOS, *target]),
            (batch.target_out, [*target, EOS]),
        ):
            assert tensor[row].tolist() == ids + [PAD] * (tensor.shape[1] - len(ids))
        assert batch.source_lengths[row] == len(source) + 1
    assert batch.tokens == int((batch.target_out != PAD).sum())


def test_the_longest_length_counts_the_end_and_is_kept(tokenizer: Tokenizer) -> None:
    text = ParallelText(["one two"], ["eins zwei"], "")
    longest = max(len(tokenizer.encode(side)[0]) for side in (text.source, text.target)) + 1
    assert len(Corpus(text, tokenizer, max_length=longest)) == 1
    with pytest.raises(DataError, match="1 are longer"):
        Corpus(text, tokenizer, max_length=longest - 1)


def test_empty_and_long_pairs_are_left_out_and_counted(tokenizer: Tokenizer) -> None:
    text = ParallelText(["one", "", "two", "six" * 9], ["eins", "zwei", "", "dreihundert"], "")
    corpus = Corpus(text, tokenizer, max_length=8)
    assert (len(corpus), corpus.empty, corpus.too_long) == (1, 2, 1)
    with pytest.raises(DataError, match="no sentence pair to use out of 1: 1 have an empty side"):
        Corpus(ParallelText([""], ["x"], ""), tokenizer)
