"""Words, parts and alignments of any text: every index is that of a word, nothing is lost, no part is empty or too
long."""

from __future__ import annotations

import re
from typing import Any

import marian_folders
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from examples import examples
from transformer_fast.generation import GenerationConfig, Hypothesis
from transformer_fast.translation.pair_tokenizer import PairFiles, PairTokenizer
from transformer_fast.translation.parts import parts_of
from transformer_fast.translation.tokenizer import Tokenizer
from transformer_fast.translation.translator import AnyTokenizer, Translator
from transformer_fast.translation.words import word_numbers

SPECIAL = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def _learnt(lowercase: bool) -> Tokenizer:
    return Tokenizer.train(["One two three twenty-two forty hundred. Seven!"] * 30, 60, lowercase=lowercase)


def _pair(separate: bool) -> PairTokenizer:
    source, target = marian_folders.sentencepieces()
    vocab = marian_folders.vocabulary([source] if separate else [source, target])
    own = marian_folders.vocabulary([target]) if separate else None
    return PairTokenizer(PairFiles(source, target, vocab, own), start=vocab["<pad>"], special=SPECIAL)


TOKENIZERS: dict[str, AnyTokenizer] = {
    "learnt": _learnt(False),
    "learnt, lower case": _learnt(True),
    "imported": _pair(False),
    "imported, two maps": _pair(True),
}
SNIPPETS = [
    *("two", "Forty", "hundred", "x", "é", "e\u0301", "\u0301", "ǅ", "İ", "ΑΣ", "ﬁ", "…", "\ufdfa", "\u00a8", "½"),
    *(
        "😀",
        "👨\u200d👩\u200d👧",
        "👍🏽",
        "🇩🇪",
        "\u200b",
        "\u200d",
        "\u2060",
        "\ufeff",
        "\u00ad",
        "字",
        "漢字",
        "ไทย",
        "שלום",
    ),
    *("مرحبا", "\u200f", ">>deu<<", ">>xx<<", "</s>", "<unk>", "<pad>", "▁", "⁇", ".", "!", "-", "<", ">"),
    *(" ", "  ", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x1c", "\x0b"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.characters(exclude_categories=["Cs"])), max_size=60).map(
    "".join
)
LINES = st.one_of(TEXTS, TEXTS.map(">>deu<< {}".format), TEXTS.map(">>deu<<{}".format)).filter(lambda t: "\n" not in t)
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@every_tokenizer
@examples(60)
@given(line=LINES)
def test_a_token_has_a_span_and_its_word_is_there(tokenizer: AnyTokenizer, line: str) -> None:
    (ids,) = tokenizer.encode([line])
    spans = tokenizer.source_spans(line)
    assert len(spans) == len(ids)
    assert all(0 <= begin <= end <= len(line) for begin, end in spans)
    numbers, words = word_numbers(line, spans), line.split()
    assert all(number is None if not words else 0 <= number < len(words) for number in numbers)
    assert numbers == sorted(numbers, key=lambda number: -1 if number is None else number)
    for (begin, end), number in zip(spans, numbers, strict=True):
        if line[begin:end].strip():
            first = begin + len(line[begin:end]) - len(line[begin:end].lstrip())
            assert len(line[: first + 1].split()) - 1 == number


@every_tokenizer
@examples(60)
@given(line=LINES, data=st.data())
def test_a_token_of_a_translation_has_the_word_that_it_wrote(
    tokenizer: AnyTokenizer, line: str, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    (text,) = tokenizer.decode([ids])
    raw, spans = tokenizer.decode_spans(ids)
    assert len(spans) == len(ids) and raw.strip() == text.strip()
    written = [span for span in spans if span is not None]
    assert all(
        number is None if not text.split() else number < len(text.split()) for number in word_numbers(raw, written)
    )


@every_tokenizer
@examples(60)
@given(line=LINES, longest=st.integers(24, 60))
@example(line=">>deu<< " + "字" * 60, longest=24)
@example(line="one" + "…" * 50 + "1", longest=64)
@example(line=">>deu<<", longest=24)
@example(line="\u200b", longest=24)
def test_parts_lose_nothing_and_are_neither_empty_nor_too_long(
    tokenizer: AnyTokenizer, line: str, longest: int
) -> None:
    (ids,) = tokenizer.encode([line.strip()])
    parts = parts_of(line, tokenizer, longest, len(ids))
    tag = tokenizer.split_tag(line.strip())[0]
    least = len(tokenizer.encode([tag])[0]) if tag else 0
    for part in parts:
        (own,) = tokenizer.encode([part.text])
        assert part.text.startswith(tag) and len(own) > least
        assert len(own) < longest or part.end - part.begin == 1
    assert bool(parts) == (len(ids) > least and line.strip() != tag) or not re.sub(r"\s", "", line.strip()[len(tag) :])
    joined = "".join("".join(line[part.begin : part.end].split()) for part in parts)
    if len(parts) == 1 or all(len(tokenizer.encode([c])[0]) for c in set("".join(line.split()))):
        assert not parts or joined == "".join(line.strip()[len(tag) :].split())
    numbers = [number for part in parts for number in part.word_numbers(tokenizer)[least:]]
    assert all(number is not None and number < len(line.split()) for number in numbers)
    assert numbers == sorted(numbers)
    assert all(number == 0 for part in parts for number in part.word_numbers(tokenizer)[:least])


class Echo(nn.Module):
    """Empty model, for a search that gives fixed answers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def translator_that_says(
    monkeypatch: pytest.MonkeyPatch, tokenizer: AnyTokenizer, answers: Any, longest: int = 256
) -> Translator:
    """Return a translator whose search gives each source ``answers(source)``: ids, and the source token of each."""

    def search(models: Any, src: torch.Tensor, *, src_lengths: torch.Tensor, **_: Any) -> list[list[Hypothesis]]:
        found = []
        for row, length in zip(src.tolist(), src_lengths.tolist(), strict=True):
            tokens, attended = answers(row[:length])
            alignment = nn.functional.one_hot(torch.tensor(attended, dtype=torch.long), src.shape[1]).float()
            found.append([Hypothesis(tokens, 0.0, 0.0, True, alignment.view(len(tokens), src.shape[1]))])
        return found

    monkeypatch.setattr("transformer_fast.translation.translator.generate", search)
    return Translator(Echo(), tokenizer, config=GenerationConfig(alignments=True), longest=longest)


def copying(source: list[int]) -> tuple[list[int], list[int]]:
    return source[:-1], list(range(len(source) - 1))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("two\u00e9two two", [0, 0, 0, 1]),  # a character that the vocabulary lacks
        ("tw😀o two", [0, 1]),
        ("two\u200btwo two", [0, 1]),
        ("two\u00a8two two", [0, 1]),
        ("two  two", [0, 1]),
    ],
)
def test_words_are_those_of_the_text_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, line: str, words: list[int]
) -> None:
    tokenizer = TOKENIZERS["learnt"]
    [[found]] = translator_that_says(monkeypatch, tokenizer, copying).translations([line])
    assert {source for source, _ in found.alignment} == set(words)
    assert all(target < len(found.text.split()) for _, target in found.alignment)


def test_a_token_that_decoding_leaves_out_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["imported"]
    two = tokenizer.encode(["two"])[0]

    def answers(source: list[int]) -> tuple[list[int], list[int]]:
        ids = [*two, tokenizer.unk, *two, tokenizer.unk, *two]
        return ids, [0] * len(ids)

    [[found]] = translator_that_says(monkeypatch, tokenizer, answers).translations(["two"])
    assert {target for _, target in found.alignment} == set(range(len(found.text.split()))) == {0, 1, 2}


def test_a_tag_is_one_word_whatever_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """21 words, the first of them a tag that each part repeats: word numbers are those of the line."""
    tokenizer = TOKENIZERS["imported"]
    line = ">>deu<< " + " ".join(["two forty hundred seven"] * 5)
    translator = translator_that_says(monkeypatch, tokenizer, lambda s: (s[1:-1], list(range(1, len(s) - 1))), 24)
    [[found]] = translator.translations([line])
    assert len(line.split()) == 21 and len(found.text.split()) == 20
    assert {source for source, _ in found.alignment} == set(range(1, 21))
    assert all(source == target + 1 for source, target in found.alignment)


def test_no_part_is_the_tag_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["imported"]
    seen: list[list[int]] = []
    translator = translator_that_says(monkeypatch, tokenizer, lambda s: (seen.append(s), ([], []))[1], 24)
    list(translator.translations([">>deu<< " + "字" * 60, ">>deu<<", "  ", ">>deu<<  "]))
    assert all(len(source) > 2 for source in seen)
    assert sum(source.count(tokenizer.unk) for source in seen) > 0
