"""Every option of `generate` against brute force on tiny vocabularies, or a case worked out by hand."""

import math

import pytest
import torch
from generation_oracle import BOS, EOS, Oracle, every_finished, slow_beam, sources

from transformer_fast import GenerationConfig, Transformer, beam_search, generate, greedy, reference

MARKS = {"bos": BOS, "eos": EOS}


def best(model, src, prefix=None, **options):
    """Tokens of every hypothesis, sentence by sentence, and the hypotheses."""
    found = generate(model, src, prefix=prefix, config=GenerationConfig(**options), **MARKS)
    return [[h.tokens for h in hypotheses] for hypotheses in found], found


def test_the_plain_calls_are_the_same_thing():
    model, src = Oracle(6), sources(8)
    given = {"max_length": 9, **MARKS}
    assert [tokens for [tokens] in best(model, src, max_length=9)[0]] == greedy(model, src, **given)
    expected = beam_search(model, src, beam=4, n_best=3, **given)
    assert generate(model, src, config=GenerationConfig(beam=4, n_best=3, max_length=9), **MARKS) == expected
    scores = [found[0].log_prob for found in best(model, src, max_length=9)[1]]
    for source, found, score in zip(src.sum(1).tolist(), best(model, src, max_length=9)[1], scores, strict=True):
        tokens = found[0].tokens + [EOS] * found[0].finished
        assert score == pytest.approx(model.log_prob(source, tokens), abs=1e-4)


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
    got, found = best(model, src, **{"beam": 4**4, "n_best": 5, "max_length": 4, **options})
    for source, tokens, hypotheses in zip(src.sum(1).tolist(), got, found, strict=True):
        expected = [pair for pair in every_finished(model, source, 4, 0.6) if allowed(pair[0])][:5]
        complete = [h for h in hypotheses if h.finished]
        assert tokens[: len(complete)] == [body for body, _ in expected]
        # Probabilities stay the model's own: what is forbidden is not chosen, and nothing else gets its share.
        assert [h.score for h in complete] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_lengths_may_depend_on_the_source():
    never = Oracle(5, edit=lambda logits, prefix: logits - 99 * torch.eye(5)[EOS])
    src, lengths = sources(3, width=6), torch.tensor([6, 2, 3])
    config = GenerationConfig(max_length=(1.5, 1))
    assert [len(h[0].tokens) for h in generate(never, src, src_lengths=lengths, config=config, **MARKS)] == [10, 4, 5]
    always = Oracle(5, edit=lambda logits, prefix: logits + 99 * torch.eye(5)[EOS])
    config = GenerationConfig(min_length=(1.0, 2))
    # EOS counts: an answer of at least n tokens has n - 1 before it.
    assert [len(h[0].tokens) for h in generate(always, src, src_lengths=lengths, config=config, **MARKS)] == [7, 3, 4]


def test_prefixes_of_different_lengths():
    model, src = Oracle(5), sources(3)
    got, found = best(model, src, prefix=[[], [4], [3, 3, 2]], max_length=8)
    for source, [tokens], start, [h] in zip(src.sum(1).tolist(), got, ([], [4], [3, 3, 2]), found, strict=True):
        assert tokens[: len(start)] == start
        assert h.log_prob == pytest.approx(model.log_prob(source, tokens + [EOS] * h.finished), abs=1e-4)


def test_repetition_penalty():
    """Logits 2, 1.5, -1 with a penalty of 2: what was said falls to 1 or to -2, whatever its sign."""
    logits = torch.tensor([-9.0, -9.0, 2.0, 1.5, -1.0])
    model = Oracle(5, edit=lambda _, prefix: logits)
    [[tokens]], [[found]] = best(model, sources(1), max_length=4, repetition_penalty=2.0)
    assert tokens == [2, 3, 2, 2]  # 2 against 1.5, then 1 against 1.5, then 1 against 0.75
    steps = [[-9.0, -9.0, 2.0, 1.5, -1.0], [-9.0, -9.0, 1.0, 1.5, -1.0]] + [[-9.0, -9.0, 1.0, 0.75, -1.0]] * 2
    expected = sum(torch.tensor(row).log_softmax(-1)[t].item() for row, t in zip(steps, tokens, strict=True))
    assert found.log_prob == pytest.approx(expected, abs=1e-5)
    # A negative one is multiplied: -1 falls to -3.
    [[tokens]], _ = best(model, sources(1), max_length=3, repetition_penalty=3.0, suppress=(2, 3), prefix=[[4]])
    [[found]] = best(model, sources(1), max_length=2, repetition_penalty=3.0, prefix=[[4, 4]])[1]
    steps = [[-9.0, -9.0, 2.0, 1.5, -1.0], [-9.0, -9.0, 2.0, 1.5, -3.0]]
    assert found.log_prob == pytest.approx(sum(torch.tensor(r).log_softmax(-1)[4].item() for r in steps), abs=1e-5)


# How hypotheses are ranked and when a sentence ends


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_length_to_a_power(alpha):
    model, src = Oracle(4), sources(3)
    got, _ = best(model, src, beam=64, n_best=4, length_penalty=alpha, length_norm="power", max_length=3)
    for source, tokens in zip(src.sum(1).tolist(), got, strict=True):
        complete = [(body, model.log_prob(source, [*body, EOS])) for body, _ in every_finished(model, source, 3, 0)]
        ranked = sorted(complete, key=lambda pair: -pair[1] / (len(pair[0]) + 1) ** alpha)
        assert tokens == [body for body, _ in ranked[:4]]


@pytest.mark.parametrize("patience", [0.5, 1.0, 2.0])
def test_patience(patience):
    edit = lambda logits, prefix: logits + torch.eye(7)[EOS] * (len(prefix) - 2)  # noqa: E731
    model, src = Oracle(7, edit=edit), sources(12)
    _, found = best(model, src, beam=4, n_best=4, patience=patience, max_length=9)
    counts = set()
    for source, hypotheses in zip(src.sum(1).tolist(), found, strict=True):
        expected = slow_beam(model, source, 4, 9, patience=patience)
        complete = [h.tokens for h in hypotheses if h.finished]
        assert complete == [tokens for tokens, _ in expected[:4]]
        counts.add(len(expected))
    assert max(counts) >= math.ceil(4 * patience)


def test_early_stop_takes_the_first_that_finish():
    # EOS is third best at once, and a longer answer better in the end.
    table = {0: [-9.0, 0.0, 2.0, 1.9], 1: [-9.0, 9.0, 0.0, 0.0]}
    model = Oracle(4, edit=lambda _, prefix: torch.tensor(table[min(len(prefix), 1)]))
    patient, hasty = (best(model, sources(1), beam=3, early_stop=early)[0][0][0] for early in (False, True))
    assert patient == [2] and hasty == []


def test_diverse_groups_against_the_definition():
    """Two groups of two, lists and no tensors: the second pays for every token that the first chose at this step."""
    model, src, strength = Oracle(6), sources(10, seed=2), 1.5

    def slow(source):
        groups, finished = [[((), 0.0)], [((), 0.0)]], [[], []]
        for _ in range(6):
            chosen = []
            for g in (0, 1):
                grown = []
                for tokens, log_prob in groups[g]:
                    step = model.logits(source, tokens).double().log_softmax(-1)
                    for token in range(model.vocab):
                        value = log_prob + step[token].item()
                        grown.append((value - strength * chosen.count(token), value, (*tokens, token)))
                kept = sorted(grown, key=lambda entry: -entry[0])[: 2 - len(finished[g])]
                if g == 0:
                    chosen = [tokens[-1] for _, _, tokens in kept]
                finished[g] += [(value, tokens) for _, value, tokens in kept if tokens[-1] == EOS]
                groups[g] = [(tokens, value) for _, value, tokens in kept if tokens[-1] != EOS]
        return [(v / ((5 + len(t)) / 6) ** 0.6, list(t[:-1])) for part in finished for v, t in part]

    options = {"beam": 4, "n_best": 4, "beam_groups": 2, "max_length": 6}
    got, found = best(model, src, diversity=strength, **options)
    for source, hypotheses in zip(src.sum(1).tolist(), found, strict=True):
        expected = sorted(slow(source), key=lambda pair: -pair[0])
        complete = [h for h in hypotheses if h.finished]
        assert [h.tokens for h in complete] == [tokens for _, tokens in expected]
        assert [h.score for h in complete] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert got != best(model, src, diversity=0.0, **options)[0]


def test_coverage_penalty_is_in_the_score():
    """Recomputed from the attention that came with the answer, padding left out."""
    torch.manual_seed(3)
    model = Transformer(12, 12, 16, 2, 2, 0.0, d_ff=24)
    src, lengths = torch.randint(2, 12, (4, 6)), torch.tensor([6, 1, 4, 3])
    config = GenerationConfig(beam=3, n_best=3, coverage_penalty=0.7, alignments=True, max_length=8, suppress=(7,))
    for hypotheses, length in zip(generate(model, src, src_lengths=lengths, config=config, **MARKS), lengths.tolist()):
        cut = [h for h in hypotheses if not h.finished]  # of these all attention is known
        assert cut
        for h in cut:
            coverage = h.alignment.double().sum(0)[:length].clamp(max=1).log().sum().item()
            expected = h.log_prob / ((5 + len(h.tokens)) / 6) ** 0.6 + 0.7 * coverage
            assert h.score == pytest.approx(expected, abs=1e-4)


def test_alignments_are_the_last_layers_attention():
    """Against a forward pass over the whole answer; the reference's layers, which have no cache, give the same."""
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
    """How often each first token is drawn, of 4,000, from logits 0, -inf, 2, 1, 0.5."""
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
        ({"top_k": 3, "top_p": 0.6}, [0, 0, 1, 0, 0]),  # of what top_k left, the best has 0.63
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
    first = best(model, src, seed=1, **options)[0]
    assert first == best(model, src, seed=1, **options)[0] != best(model, src, seed=2, **options)[0]
    torch.manual_seed(5)
    drawn = best(model, src, **options)[0]
    assert drawn != best(model, src, **options)[0]
    torch.manual_seed(5)
    assert drawn == best(model, src, **options)[0]
    assert len({tuple(tokens) for found in first for tokens in found}) > 6


# Several models


def test_an_ensemble_decides_by_the_mean_probability():
    one, other, src = Oracle(4, seed=0), Oracle(4, seed=1), sources(3)

    class Mean(Oracle):
        def logits(self, source, prefix):
            each = [model.logits(source, prefix).double().softmax(-1) for model in (one, other)]
            return torch.stack(each).mean(0).log()

    got, found = best([one, other], src, beam=4**3, n_best=5, max_length=3)
    for source, tokens, hypotheses in zip(src.sum(1).tolist(), got, found, strict=True):
        expected = every_finished(Mean(4), source, 3, 0.6)[:5]
        assert tokens == [body for body, _ in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert got != best(one, src, beam=4**3, n_best=5, max_length=3)[0]


# Errors

WRONG = {
    "no beam": ({"beam": 0}, "beam must be an int >= 1, got 0"),
    "n_best beyond the beam": ({"beam": 2, "n_best": 3}, "n_best is 3, but a beam of 2"),
    "groups": ({"beam": 5, "beam_groups": 2}, "beam_groups must divide the beam, got 2 groups and beam 5"),
    "penalty": ({"length_penalty": math.nan}, "length_penalty must be a finite number, got nan"),
    "norm": ({"length_norm": "wu"}, 'length_norm must be "gnmt" or "power", got \'wu\''),
    "coverage": ({"coverage_penalty": -1.0}, "coverage_penalty must be a number >= 0, got -1.0"),
    "patience": ({"patience": 0.0}, "patience must be a number > 0, got 0.0"),
    "temperature": ({"temperature": 0}, "temperature must be a number > 0, got 0"),
    "top_p": ({"top_p": 1.2}, r"top_p must be a number in \(0, 1\], got 1.2"),
    "top_k": ({"top_k": 2.0}, "top_k must be an int >= 0, got 2.0"),
    "seed": ({"seed": -1}, "seed must be None or an int >= 0, below 2\\*\\*63, got -1"),
    "max_length": ({"max_length": 0}, "max_length must be an int >= 1"),
    "span": ({"min_length": (1.0,)}, "min_length must be an int >= 0"),
    "suppress": ({"suppress": ("<unk>",)}, "suppress must be target ids"),
    "sample with a beam": ({"sample": True, "beam": 4}, "beam must be 1, got 4"),
    "slots": ({"slots": "open"}, 'slots must be "close" or "keep", got \'open\''),
    "early_stop": ({"early_stop": "never"}, "early_stop must be True, False or \"now\", got 'never'"),
    "now without slots": ({"early_stop": "now"}, 'early_stop "now" needs slots "keep", got slots \'close\''),
    "slots and patience": (
        {"beam": 2, "slots": "keep", "patience": 2.0},
        'slots "keep" has neither groups nor patience',
    ),
    "flag": ({"alignments": 1}, "alignments must be True or False, got 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_cannot_work_are_named(case):
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options)


WRONG_CALLS = {
    "prefix of other sentences": ({"prefix": [[2]]}, {}, "prefix has 1 entries; expected one list .* 2 sentences"),
    "EOS in the prefix": ({"prefix": [[2], [EOS]]}, {}, r"prefix\[1\] has 1; expected target ids, and no EOS"),
    "prefix outside": ({"prefix": [[9], []]}, {}, r"prefix\[0\] has 9"),
    "EOS suppressed": ({}, {"suppress": (EOS,)}, "suppress names token 1: it is EOS"),
    "suppressed outside": ({}, {"suppress": (9,)}, "suppress names token 9"),
    "lengths that cross": ({}, {"min_length": 9, "max_length": 4}, "min_length is 9, more than max_length 4"),
    "no model": ({"model": []}, {}, "model is an empty list"),
    "two vocabularies": ({"model": [Oracle(5), Oracle(6)]}, {}, "target vocabularies of different sizes"),
    "no attention to read": ({}, {"alignments": True}, "has no layers whose attention could be read"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_calls_that_cannot_work_are_named(case):
    change, options, message = WRONG_CALLS[case]
    with pytest.raises(ValueError, match=message):
        generate(**{"model": Oracle(5), "src": sources(2), **MARKS, **change}, config=GenerationConfig(**options))
