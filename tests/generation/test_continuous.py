"""Continuous batching: how full a batch is, how far the stream is read, and what is refused; test_answers.py has its
answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_transformer import MARKS, answers, assert_same, batch, tiny
from torch import Tensor

from transformer_fast import GenerationConfig
from transformer_fast.generation.continuous import ContinuousBatch, Sentence, obstacle
from transformer_fast.generation.greedy import GreedySearch


def test_rows_stay_within_the_limit_and_the_stream_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows, chosen = 0, [], 0
    src = batch(30, 6)[0]
    given = [Sentence(ids) for ids in src.tolist()]
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
    found = answers(tiny(), (src, None), max_length=(1.0, 2))
    expected = sum(len(h[0].tokens) + h[0].finished for h in found)
    monkeypatch.setattr(GreedySearch, "_next_tokens", next_tokens)
    answered = 0
    for _ in ContinuousBatch(tiny(), stream(), config=config, tokens=4 * 6, **MARKS):
        answered += 1
        assert read <= answered + 4 + 1  # the first that does not fit is known
    assert answered == read == 30 and max(rows) == rows[0] == 4
    assert chosen == expected


def test_a_sentence_too_long_for_the_batch_is_decoded_alone() -> None:
    model, given, config = tiny(), batch(4), GenerationConfig(max_length=5)
    each = [Sentence(ids[:n]) for ids, n in zip(given[0].tolist(), given[1].tolist(), strict=True)]
    found = dict(ContinuousBatch(model, iter(each), config=config, tokens=1, **MARKS))
    assert_same([found[number] for number in range(4)], answers(model, given, max_length=5))
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
