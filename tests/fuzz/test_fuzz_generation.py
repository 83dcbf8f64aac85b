"""A fixed part of the random options of tests/fuzz/fuzz_generation.py: equal answers with and without a cache."""

import pytest

from tests.fuzz import fuzz_generation as fuzz


@pytest.mark.cover(1)
@pytest.mark.parametrize("part", range(4))
def test_twenty_five_configurations(part):
    sentences = ties = 0
    for number in range(25 * part, 25 * part + 25):
        counted = fuzz.check(fuzz.config(1, number))
        sentences, ties = sentences + counted[0], ties + counted[1]
    assert sentences > 100 and ties <= 0.1 * sentences


def test_the_share_has_everything_in_it():
    chosen = [fuzz.config(1, number) for number in range(100)]
    assert chosen[17] == fuzz.config(1, 17) != fuzz.config(2, 17)
    assert {c.dtype for c in chosen} == {"fp32", "bf16"} and {c.models for c in chosen} == {1, 2}
    for option in (
        "sample",
        "beam_groups",
        "no_repeat_ngram",
        "suppress",
        "coverage_penalty",
        "alignments",
        "slots",
        "force_eos",
    ):
        assert len({c.options.get(option) for c in chosen}) > 1, option
    assert {c.padded for c in chosen} == {"lengths", "mask", "none"} and any(c.prefixed for c in chosen)


def test_a_difference_that_is_no_tie_is_found(monkeypatch):
    """Change an answer of the cached search, as a mask at the wrong place would."""
    every = (fuzz.config(1, number) for number in range(100))
    chosen = next(c for c in every if c.options.get("beam") == 3 and c.dtype == "fp32" and c.sentences > 1)
    real = fuzz.generate

    def wrong(*arguments, config, **given):
        found = real(*arguments, config=config, **given)
        return found if not config.cache else [[*found[-1]], *found[:-1]]

    monkeypatch.setattr(fuzz, "generate", wrong)
    with pytest.raises(AssertionError, match="sentence 0"):
        fuzz.check(chosen)
