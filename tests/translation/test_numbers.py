"""Task of number names: both languages are right, training and test never overlap, and the recipe fits the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_fast.translation import ConfigError, read_parallel
from transformer_fast.translation.numbers import (
    english,
    german,
    is_held_out,
    make_numbers_corpus,
    numbers_config,
    sample_numbers,
)

SPELLINGS = [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (11, "eleven", "elf"),
    (12, "twelve", "zwölf"),
    (16, "sixteen", "sechzehn"),
    (17, "seventeen", "siebzehn"),
    (20, "twenty", "zwanzig"),
    (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"),
    (66, "sixty-six", "sechsundsechzig"),
    (77, "seventy-seven", "siebenundsiebzig"),
    (100, "one hundred", "einhundert"),
    (101, "one hundred one", "einhunderteins"),
    (111, "one hundred eleven", "einhundertelf"),
    (1000, "one thousand", "eintausend"),
    (1001, "one thousand one", "eintausendeins"),
    (2041, "two thousand forty-one", "zweitausendeinundvierzig"),
    (21000, "twenty-one thousand", "einundzwanzigtausend"),
    (101000, "one hundred one thousand", "einhunderteintausend"),
    (201101, "two hundred one thousand one hundred one", "zweihunderteintausendeinhunderteins"),
    (
        999999,
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
]


@pytest.mark.parametrize(("number", "in_english", "in_german"), SPELLINGS)
def test_spelling(number: int, in_english: str, in_german: str) -> None:
    assert english(number) == in_english
    assert german(number) == in_german


def values(words: str, first: int, step: int) -> dict[str, int]:
    return {word: first + step * place for place, word in enumerate(words.split())}


ENGLISH_VALUES = {
    **values("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen", 0, 1),
    **values("fifteen sixteen seventeen eighteen nineteen", 15, 1),
    **values("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10),
}


def read_english(words: str) -> int:
    """Parse an English number name from left to right, independently of the generator."""
    total = current = 0
    for word in re.split("[ -]", words):
        if word == "thousand":
            total, current = 1000 * current, 0
        elif word == "hundred":
            current *= 100
        else:
            current += ENGLISH_VALUES[word]
    return total + current


UNITS = {"eins": 1, **values("ein zwei drei vier fünf sechs sieben acht neun", 1, 1)}
TEENS = values("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn", 10, 1)
TENS = values("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10)
BELOW_1000 = re.compile(
    "(?:(?P<hundreds>{u})hundert)?(?:(?P<teen>{t})|(?:(?P<ones>{u})und)?(?P<tens>{z})|(?P<unit>{u}))?".format(
        u="|".join(sorted(UNITS, key=len, reverse=True)), t="|".join(TEENS), z="|".join(TENS)
    )
)


def read_german(word: str) -> int:
    """Parse a German number name by a regular expression; a wrong form of 1 is an error."""
    if word == "null":
        return 0
    head, thousand, tail = word.rpartition("tausend")
    assert not head.endswith("eins")
    assert not re.search("einsund|einshundert", word)
    assert not tail.endswith("ein")
    return 1000 * read_below_1000(head) + read_below_1000(tail) if thousand else read_below_1000(tail)


def read_below_1000(word: str) -> int:
    match = BELOW_1000.fullmatch(word)
    assert match, word
    part = {name: text or "" for name, text in match.groupdict().items()}
    return (
        100 * UNITS.get(part["hundreds"], 0)
        + TEENS.get(part["teen"], 0)
        + UNITS.get(part["ones"], 0)
        + TENS.get(part["tens"], 0)
        + UNITS.get(part["unit"], 0)
    )


@given(st.integers(0, 999_999))
@settings(max_examples=500, deadline=None)
def test_both_languages_read_back(number: int) -> None:
    assert read_english(english(number)) == number
    assert read_german(german(number)) == number


def test_first_thousands_read_back_and_differ() -> None:
    numbers = [*range(3000), *range(99_000, 102_000)]
    assert [read_english(english(n)) for n in numbers] == numbers
    assert [read_german(german(n)) for n in numbers] == numbers


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_numbers_out_of_range(number: int) -> None:
    for spell in (english, german):
        with pytest.raises(ValueError, match=f"number {number} is outside 0..999,999"):
            spell(number)


def test_split_never_overlaps() -> None:
    train, test = sample_numbers(20_000, held_out=False, seed=3), sample_numbers(2_000, held_out=True, seed=3)
    assert len(set(train)) == 20_000
    assert len(set(test)) == 2_000
    assert not set(train) & set(test)
    assert set(range(100)) <= set(train)
    assert all(is_held_out(n, 3) for n in test)
    for digits in (3, 4, 5, 6):
        assert sum(10 ** (digits - 1) <= n < 10**digits for n in train) > 500
        assert sum(10 ** (digits - 1) <= n < 10**digits for n in test) > 50


def test_sample_is_deterministic_and_follows_the_seed() -> None:
    assert sample_numbers(500, held_out=True, seed=1) == sample_numbers(500, held_out=True, seed=1)
    assert sample_numbers(500, held_out=True, seed=1) != sample_numbers(500, held_out=True, seed=2)


@pytest.mark.parametrize(("count", "held_out"), [(0, True), (20_001, True), (200_001, False)])
def test_sample_size_is_bounded(count: int, held_out: bool) -> None:
    with pytest.raises(ConfigError, match=r"expected 1\.\."):
        sample_numbers(count, held_out=held_out)


@pytest.mark.slow("looks at every number")
def test_largest_test_sample_exists() -> None:
    assert len(sample_numbers(20_000, held_out=True)) == 20_000


def test_numbers_corpus(tmp_path: Path) -> None:
    paths = make_numbers_corpus(tmp_path / "corpus", train_size=300, held_out=50, seed=1)
    train = read_parallel(paths["train_source"], paths["train_target"])
    test = read_parallel(paths["test_source"], paths["test_target"])
    assert (len(train), len(test)) == (300, 50)
    for text in (train, test):
        assert [read_english(s) for s in text.source] == [read_german(t) for t in text.target]
    assert not set(train.source) & set(test.source)
    before = {name: path.read_bytes() for name, path in paths.items()}
    assert make_numbers_corpus(tmp_path / "corpus", train_size=300, held_out=50, seed=1) == paths
    assert {name: path.read_bytes() for name, path in paths.items()} == before


def test_numbers_config_is_a_recipe_for_the_corpus(tmp_path: Path) -> None:
    paths = make_numbers_corpus(tmp_path, train_size=200, held_out=20)
    config = numbers_config(tmp_path, tmp_path / "run", max_steps=7)
    assert (config.source, config.valid_target) == (str(paths["train_source"]), str(paths["test_target"]))
    assert (config.max_steps, config.cooldown) == (7, 2)
    assert numbers_config(tmp_path, tmp_path / "run", dropout=0.2).dropout == 0.2
