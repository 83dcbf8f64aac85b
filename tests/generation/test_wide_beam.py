"""A beam that stays wide, against its definition; ends that are forced, and probabilities of what may follow."""

from __future__ import annotations

import pytest
import torch
from generation_oracle import EOS, Oracle, sources

from transformer_fast import GenerationConfig, generate

MARKS = {"bos": 0, "eos": EOS}


def slow_wide_beam(model, source, beam, longest, alpha, early_stop):
    """The definition, with lists: (tokens with their EOS, score) of the finished ones, best first."""
    survivors, finished = [((), 0.0)], []
    for length in range(1, longest + 1):
        grown = []
        for tokens, log_prob in survivors:
            step = model.logits(source, tokens).double().log_softmax(-1)
            grown += [((*tokens, token), log_prob + step[token].item()) for token in range(model.vocab)]
        best = sorted(grown, key=lambda pair: -pair[1])[: 2 * beam]
        ended = [tokens[-1] == EOS or length == longest for tokens, _ in best]
        finished += [(t, value / length**alpha) for (t, value), end in zip(best[:beam], ended, strict=False) if end]
        finished = sorted(finished, key=lambda pair: -pair[1])[:beam]
        survivors = [pair for pair, end in zip(best, ended, strict=True) if not end][:beam]
        reach = longest if early_stop is False and alpha > 0 else length
        if not survivors or len(finished) < beam:
            continue
        if early_stop is True or finished[-1][1] >= survivors[0][1] / reach**alpha:
            break
    return finished


@pytest.mark.parametrize("early_stop", [False, True, "now"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("beam", [2, 3, 6])
def test_against_the_definition(beam, alpha, early_stop):
    config = GenerationConfig(
        beam=beam,
        n_best=beam,
        slots="keep",
        early_stop=early_stop,
        length_norm="power",
        length_penalty=alpha,
        max_length=7,
    )
    src = sources(6)
    for seed in range(3):
        model = Oracle(13, seed=seed, edit=lambda logits, prefix: logits + 1.5 * torch.eye(13)[EOS])
        for source, found in zip(src.sum(1).tolist(), generate(model, src, config=config, **MARKS), strict=True):
            expected = slow_wide_beam(model, source, beam, 7, alpha, early_stop)
            assert [(*h.tokens, EOS) if h.finished else tuple(h.tokens) for h in found] == [t for t, _ in expected]
            assert [h.score for h in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_a_beam_of_one_is_greedy():
    model, src = Oracle(5), sources(3)
    kept, closed = (generate(model, src, config=GenerationConfig(slots=slots), **MARKS) for slots in ("keep", "close"))
    assert kept == closed


def test_a_vocabulary_smaller_than_the_beam():
    found = generate(
        Oracle(3), sources(2), config=GenerationConfig(beam=8, n_best=8, slots="keep", max_length=3), **MARKS
    )
    assert all(len({tuple(h.tokens) for h in hypotheses}) > 3 for hypotheses in found)


def test_a_forced_end_is_certain():
    """The last token is EOS, and log P is that of the tokens before it."""
    never = Oracle(4, edit=lambda logits, prefix: logits - 99 * torch.eye(4)[EOS])
    src = sources(3)
    for options in ({}, {"beam": 3}, {"beam": 3, "slots": "keep"}):
        found = generate(never, src, config=GenerationConfig(max_length=4, force_eos=True, **options), **MARKS)
        for source, (first, *_) in zip(src.sum(1).tolist(), found, strict=True):
            assert len(first.tokens) == 3 and first.finished
            assert first.log_prob == pytest.approx(never.log_prob(source, first.tokens), abs=1e-4)


def test_renormalized_probabilities_are_of_what_may_follow():
    model, src = Oracle(4), sources(3)
    config = GenerationConfig(max_length=3, suppress=(2,), renormalize=True)
    for source, (first, *_) in zip(src.sum(1).tolist(), generate(model, src, config=config, **MARKS), strict=True):
        said = [*first.tokens, *([EOS] if first.finished else [])]
        expected = 0.0
        for step, token in enumerate(said):
            logits = model.logits(source, tuple(said[:step])).double()
            logits[2] = -torch.inf
            expected += logits.log_softmax(-1)[token].item()
        assert first.log_prob == pytest.approx(expected, abs=1e-4)
