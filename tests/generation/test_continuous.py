"""Continuous batching against sentence by sentence: the same answers, whoever is beside a sentence."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tiny_transformer import EOS, MARKS, VOCAB, tiny
from torch import Tensor

from transformer_fast import GenerationConfig, generate
from transformer_fast.generation.continuous import ContinuousBatch, Sentence, obstacle
from transformer_fast.generation.greedy import GreedySearch


def sentences(count: int = 12, seed: int = 0, prefixed: bool = False) -> list[Sentence]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        source = [chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 12))]
        found.append(Sentence(source, [chance.randrange(2, VOCAB) for _ in range(chance.randint(0, 2) * prefixed)]))
    return found


def alone(model: object, given: list[Sentence], config: GenerationConfig) -> list:
    return [
        generate(model, torch.tensor([list(one.source)]), prefix=[one.prefix], config=config, **MARKS)[0]
        for one in given
    ]


def continuous(model: object, given: list[Sentence], config: GenerationConfig, tokens: int) -> list:
    found = dict(ContinuousBatch(model, iter(given), config=config, tokens=tokens, **MARKS))
    assert sorted(found) == list(range(len(given)))
    return [found[number] for number in range(len(given))]


def assert_same(got: list, expected: list) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert [(h.tokens, h.finished) for h in ours] == [(h.tokens, h.finished) for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-3)
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-3)


OPTIONS = {
    "greedy": {},
    "beam": {"beam": 5},
    "n-best": {"beam": 4, "n_best": 4},
    "wide beam": {"beam": 3, "n_best": 2, "slots": "keep", "early_stop": "now", "max_length": (1.0, 3)},
    "groups": {"beam": 4, "beam_groups": 2, "n_best": 2, "max_length": (1.0, 3)},
    "lengths": {"beam": 3, "min_length": (0.5, 2), "max_length": (1.0, 3), "suppress": (4, 5)},
    "forced end": {"max_length": (1.0, 2), "force_eos": True, "renormalize": True, "suppress": (7,)},
    "repeats": {"beam": 2, "no_repeat_ngram": 2, "repetition_penalty": 1.5, "max_length": (1.0, 4)},
    "no token twice": {"no_repeat_ngram": 1, "repetition_penalty": 2.0, "max_length": (1.0, 4)},
    "patience": {"beam": 3, "patience": 2.0, "early_stop": True, "max_length": (1.0, 4)},
}


@pytest.mark.parametrize("prefixed", [False, True], ids=["free", "prefix"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_answers_are_those_of_a_sentence_alone(options: str, prefixed: bool) -> None:
    model, given = tiny(), sentences(prefixed=prefixed)
    config = GenerationConfig(**OPTIONS[options])
    expected = alone(model, given, config)
    assert_same(continuous(model, given, config, 30 * config.beam), expected)
    assert len({len(answers[0].tokens) for answers in expected}) > 3  # sentences end at different steps


@pytest.mark.parametrize("options", [{}, {"beam": 3, "n_best": 2}], ids=["greedy", "beam"])
def test_the_modules_are_the_oracle_of_the_fused_step(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    """Past a block of the cache, with post-norm layers, and by two models."""
    models, given = [tiny(1, norm_first=False), tiny(2, norm_first=False)], sentences(8, seed=1)
    config = GenerationConfig(max_length=(1.0, 64), suppress=(EOS + 1,), **options)
    fused = continuous(models, given, config, 30 * config.beam)
    monkeypatch.setattr("transformer_fast.generation.steps.fused_step", lambda *_: None)
    assert_same(fused, continuous(models, given, config, 30 * config.beam))
    assert_same(fused, alone(models, given, config))


def test_rows_stay_within_the_limit_and_the_stream_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows, chosen = 0, [], 0
    given = [Sentence([*one.source * 6][:6]) for one in sentences(30)]
    forward = GreedySearch._next_tokens

    def next_tokens(search: GreedySearch) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal chosen
        found = forward(search)
        rows.append(len(found[0]))
        chosen += found[0].numel()
        return found

    def stream() -> Iterator[Sentence]:
        nonlocal read
        for one in given:
            read += 1
            yield one

    config = GenerationConfig(max_length=(1.0, 2))
    expected = sum(len(h[0].tokens) + h[0].finished for h in alone(tiny(), given, config))
    monkeypatch.setattr(GreedySearch, "_next_tokens", next_tokens)
    answered = 0
    for _ in ContinuousBatch(tiny(), stream(), config=config, tokens=4 * 6, **MARKS):
        answered += 1
        assert read <= answered + 4 + 1  # the first that does not fit is known
    assert answered == read == 30 and max(rows) == rows[0] == 4
    assert chosen == expected


def test_a_sentence_too_long_for_the_batch_is_decoded_alone() -> None:
    model, given, config = tiny(), sentences(4), GenerationConfig(max_length=5)
    assert_same(continuous(model, given, config, 1), alone(model, given, config))
    assert list(ContinuousBatch(model, [], config=config, tokens=1, **MARKS)) == []


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"sample": True}, "sample=True"),
        ({"graph": True}, "graph=True"),
        ({"alignments": True}, "alignments"),
        ({"coverage_penalty": 0.2}, "coverage_penalty"),
        ({"cache": False}, "with its cache"),
    ],
)
def test_options_that_need_a_batch_are_refused(options: dict, reason: str) -> None:
    config = GenerationConfig(**options)
    assert reason in obstacle(tiny(), config) and obstacle(tiny(), GenerationConfig(beam=3)) is None
    with pytest.raises(ValueError, match=f"cannot be batched continuously: .*{reason}"):
        ContinuousBatch(tiny(), [], config=config, tokens=1, **MARKS)
