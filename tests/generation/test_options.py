"""Every option of `generate` against brute force on tiny vocabularies, or a case computed by hand."""

import math

import pytest
import torch
from generation_oracle import EOS, MARKS, Oracle, assert_found, every_finished, prefer_eos, search, sources

from transformer_fast import GenerationConfig, Transformer, beam_search, generate, greedy, reference


def test_the_plain_calls_are_the_same_thing():
    model, src = Oracle(6), sources(8)
    got, answers = search(model, src, max_length=9)
    assert [tokens for [tokens] in got] == greedy(model, src, max_length=9, **MARKS)
    expected = beam_search(model, src, beam=4, n_best=3, max_length=9, **MARKS)
    assert search(model, src, beam=4, n_best=3, max_length=9)[1] == expected
    for source, [h] in zip(src.sum(1).tolist(), answers, strict=True):
        assert h.log_prob == pytest.approx(model.log_prob(source, h.tokens + [EOS] * h.finished), abs=1e-4)


# Options that choose among the answers: a beam wide enough for all of them against a filter on all of them


def repeats(tokens, n):
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(grams) > len(set(grams))


FILTERS = {
    "min_length": ({"min_length": 3}, lambda tokens: len(tokens) + 1 >= 3),
    "max_length": ({"max_length": 3}, lambda tokens: len(tokens) + 1 <= 3),
    "suppress": ({"suppress": (2,)}, lambda tokens: 2 not in tokens),
    "no repeated token": ({"no_repeat_ngram": 1}, lambda tokens: not repeats(tokens, 1)),
    "no repeated pair": ({"no_repeat_ngram": 2}, lambda tokens: not repeats(tokens, 2)),
    "prefix": ({"prefix": [[3, 2]] * 3}, lambda tokens: tokens[:2] == [3, 2]),
    "prefix breaks rules": (
        {"prefix": [[2, 2]] * 3, "suppress": (2,), "no_repeat_ngram": 1},
        lambda tokens: tokens[:2] == [2, 2] and 2 not in tokens[2:] and not repeats(tokens[1:], 1),
    ),
}


@pytest.mark.parametrize("case", FILTERS)
def test_what_may_be_said_against_a_filter_on_everything(case):
    options, allowed = FILTERS[case]
    model, src = Oracle(4), sources(3)
    got, found = search(model, src, **{"beam": 4**4, "n_best": 5, "max_length": 4, **options})
    for source, tokens, hypotheses in zip(src.sum(1).tolist(), got, found, strict=True):
        expected = [pair for pair in every_finished(model, source, 4, 0.6) if allowed(pair[0])][:5]
        complete = [h for h in hypotheses if h.finished]
        # Probabilities are the model's: a forbidden token is not chosen, and its probability is not redistributed.
        assert_found(tokens[: len(complete)], complete, expected)


def test_lengths_may_depend_on_the_source():
    src, lengths = sources(3, width=6), torch.tensor([6, 2, 3])
    # EOS counts: an answer of at least n tokens has n - 1 before it.
    for by, options, expected in (
        (-99, {"max_length": (1.5, 1)}, [10, 4, 5]),
        (99, {"min_length": (1.0, 2)}, [7, 3, 4]),
    ):
        model, config = Oracle(5, edit=prefer_eos(5, by)), GenerationConfig(**options)
        found = generate(model, src, src_lengths=lengths, config=config, **MARKS)
        assert [len(h[0].tokens) for h in found] == expected


def test_prefixes_of_different_lengths():
    model, src = Oracle(5), sources(3)
    got, found = search(model, src, prefix=[[], [4], [3, 3, 2]], max_length=8)
    for source, [tokens], start, [h] in zip(src.sum(1).tolist(), got, ([], [4], [3, 3, 2]), found, strict=True):
        assert tokens[: len(start)] == start
        assert h.log_prob == pytest.approx(model.log_prob(source, tokens + [EOS] * h.finished), abs=1e-4)


def test_repetition_penalty():
    """Logits 2, 1.5, -1 with a penalty of 2: a token of the prefix falls to 1 or to -2, depending on its sign."""
    logits = torch.tensor([-9.0, -9.0, 2.0, 1.5, -1.0])
    model = Oracle(5, edit=lambda _, prefix: logits)
    [[tokens]], [[found]] = search(model, sources(1), max_length=4, repetition_penalty=2.0)
    assert tokens == [2, 3, 2, 2]  # 2 against 1.5, then 1 against 1.5, then 1 against 0.75
    steps = [[-9.0, -9.0, 2.0, 1.5, -1.0], [-9.0, -9.0, 1.0, 1.5, -1.0]] + [[-9.0, -9.0, 1.0, 0.75, -1.0]] * 2
    expected = sum(torch.tensor(row).log_softmax(-1)[t].item() for row, t in zip(steps, tokens, strict=True))
    assert found.log_prob == pytest.approx(expected, abs=1e-5)
    # A negative one is multiplied: -1 falls to -3.
    [[tokens]], _ = search(model, sources(1), max_length=3, repetition_penalty=3.0, suppress=(2, 3), prefix=[[4]])
    [[found]] = search(model, sources(1), max_length=2, repetition_penalty=3.0, prefix=[[4, 4]])[1]
    steps = [[-9.0, -9.0, 2.0, 1.5, -1.0], [-9.0, -9.0, 2.0, 1.5, -3.0]]
    assert found.log_prob == pytest.approx(sum(torch.tensor(r).log_softmax(-1)[4].item() for r in steps), abs=1e-5)


def test_a_forced_end_is_certain():
    """The last token is EOS, and log P is that of the tokens before it."""
    never, src = Oracle(4, edit=prefer_eos(4, -99)), sources(3)
    for options in ({}, {"beam": 3}, {"beam": 3, "slots": "keep"}):
        _, found = search(never, src, max_length=4, force_eos=True, **options)
        for source, (first, *_) in zip(src.sum(1).tolist(), found, strict=True):
            assert len(first.tokens) == 3 and first.finished
            assert first.log_prob == pytest.approx(never.log_prob(source, first.tokens), abs=1e-4)


def test_renormalized_probabilities_are_of_what_may_follow():
    model, src = Oracle(4), sources(3)
    _, found = search(model, src, max_length=3, suppress=(2,), renormalize=True)
    without = Oracle(4, edit=lambda logits, prefix: logits.index_fill(0, torch.tensor(2), -torch.inf))
    for source, (first, *_) in zip(src.sum(1).tolist(), found, strict=True):
        said = [*first.tokens, *([EOS] if first.finished else [])]
        assert first.log_prob == pytest.approx(without.log_prob(source, said), abs=1e-4)


# Weights that come with an answer


def test_alignments_are_the_last_layers_attention():
    """Compare with a forward pass over the whole answer; the reference's layers, without a cache, must agree."""
    torch.manual_seed(4)
    fast = Transformer(12, 12, 16, 2, 2, 0.0, d_ff=24, norm="layer")
    eager = reference.layers.Transformer(12, 12, 16, 2, 2, 0.0, d_ff=24, norm="layer")
    eager.load_state_dict(fast.state_dict())
    src, lengths = torch.randint(2, 12, (3, 6)), torch.tensor([6, 2, 4])
    for beam in (1, 3):
        config = GenerationConfig(beam=beam, alignments=True, max_length=7)
        ours, theirs = (generate(m, src, src_lengths=lengths, config=config, **MARKS) for m in (fast, eager))
        for [one], [other], length in zip(ours, theirs, lengths.tolist(), strict=True):
            assert one.tokens == other.tokens and one.alignment.shape == (len(one.tokens), 6)
            torch.testing.assert_close(one.alignment, other.alignment, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(one.alignment.sum(1), torch.ones(len(one.tokens)))
            assert not one.alignment[:, length:].any()


# Drawing


def shares(**options):
    """Return how often each first token is drawn in 4,000 draws from logits 0, -inf, 2, 1, 0.5."""
    logits = torch.tensor([0.0, -math.inf, 2.0, 1.0, 0.5])
    model = Oracle(5, edit=lambda _, prefix: logits)
    config = GenerationConfig(sample=True, n_best=4000, max_length=1, seed=7, **options)
    [found] = generate(model, sources(1), config=config, **MARKS)
    counts = torch.bincount(torch.tensor([h.tokens[0] for h in found]), minlength=5) / 4000
    assert all(h.log_prob == pytest.approx(logits.log_softmax(-1)[h.tokens[0]].item(), abs=1e-5) for h in found)
    return counts


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1, 0, math.e**2, math.e, math.e**0.5]),
        ({"temperature": 0.5}, [1, 0, math.e**4, math.e**2, math.e]),
        ({"top_k": 2}, [0, 0, math.e**2, math.e, 0]),
        ({"top_p": 0.8}, [0, 0, math.e**2, math.e, math.e**0.5]),  # 0.58 + 0.21 < 0.8: the third is needed
        ({"top_p": 0.75}, [0, 0, math.e**2, math.e, 0]),
        ({"top_p": 0.01}, [0, 0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0, 0, 1, 0, 0]),  # the best of the tokens that top_k leaves has 0.63
        ({"suppress": (2,)}, [1, 0, 0, math.e, math.e**0.5]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options, weights):
    expected = torch.tensor(weights, dtype=torch.float64)
    expected /= expected.sum()
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert ((shares(**options) - expected).abs() <= 4.5 * deviation).all()


def test_seeds_reproduce_and_rows_are_independent():
    model, src = Oracle(6), sources(4)
    options = {"sample": True, "n_best": 3, "max_length": 8}
    first = search(model, src, seed=1, **options)[0]
    assert first == search(model, src, seed=1, **options)[0] != search(model, src, seed=2, **options)[0]
    torch.manual_seed(5)
    drawn = search(model, src, **options)[0]
    assert drawn != search(model, src, **options)[0]
    torch.manual_seed(5)
    assert drawn == search(model, src, **options)[0]
    assert len({tuple(tokens) for found in first for tokens in found}) > 6


# Several models


def test_an_ensemble_decides_by_the_mean_probability():
    one, other, src = Oracle(4, seed=0), Oracle(4, seed=1), sources(3)

    class Mean(Oracle):
        def logits(self, source, prefix):
            each = [model.logits(source, prefix).double().softmax(-1) for model in (one, other)]
            return torch.stack(each).mean(0).log()

    got, found = search([one, other], src, beam=4**3, n_best=5, max_length=3)
    for source, tokens, hypotheses in zip(src.sum(1).tolist(), got, found, strict=True):
        expected = every_finished(Mean(4), source, 3, 0.6)[:5]
        assert_found(tokens, hypotheses, expected)
    assert got != search(one, src, beam=4**3, n_best=5, max_length=3)[0]
