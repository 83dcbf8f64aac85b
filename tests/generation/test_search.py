"""Greedy and beam search against brute force: every sequence of a tiny vocabulary is scored."""

import itertools
import math

import pytest
import torch
from generation_oracle import (
    BOS,
    EOS,
    MARKS,
    Oracle,
    assert_found,
    every_finished,
    prefer_eos,
    search,
    slow_beam,
    slow_wide_beam,
    sources,
)  # fmt: skip

from transformer_fast import Transformer, reference
from transformer_fast.generation import Hypothesis, beam_search, greedy


@pytest.mark.parametrize(
    ("norm", "alpha"), [*(("gnmt", a) for a in (-0.7, 0, 0.6, 1, 3)), *(("power", a) for a in (0, 1, 2.5))]
)
@pytest.mark.parametrize(("vocab", "longest"), [(3, 5), (4, 4)])
def test_a_wide_beam_equals_brute_force(vocab, longest, norm, alpha):
    model, src = Oracle(vocab), sources(4)
    options = {"beam": vocab**longest, "n_best": 6, "length_norm": norm, "length_penalty": float(alpha)}
    got, found = search(model, src, max_length=longest, **options)
    for source, tokens, hypotheses in zip(src.sum(1).tolist(), got, found, strict=True):
        expected = every_finished(model, source, longest, alpha)
        if norm == "power":
            plain = every_finished(model, source, longest, 0.0)
            expected = sorted(((t, v / (len(t) + 1) ** alpha) for t, v in plain), key=lambda pair: -pair[1])
        assert_found(tokens, hypotheses, expected[:6])
        assert all(h.finished for h in hypotheses)


@pytest.mark.parametrize("alpha", [-0.7, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("beam, n_best", [(1, 1), (2, 1), (3, 3), (5, 1), (5, 2)])
def test_early_stop_changes_nothing(beam, n_best, alpha):
    """A narrow beam finds the winners of a search that never stops early, for a whole batch."""
    model, src = Oracle(7, edit=prefer_eos(7, lambda prefix: len(prefix) - 3)), sources(25, seed=3)
    got = beam_search(model, src, **MARKS, beam=beam, n_best=n_best, length_penalty=alpha, max_length=12)
    stopped_early = 0
    for source, hypotheses in zip(src.sum(1).tolist(), got, strict=True):
        expected = slow_beam(model, source, beam, 12, alpha)[:n_best]
        complete = [h for h in hypotheses if h.finished]
        assert_found([h.tokens for h in complete], complete, expected)
        stopped_early += len(expected) > 0
    assert stopped_early > 15  # the test is about sentences that finish


@pytest.mark.parametrize("patience", [0.5, 1.0, 2.0])
def test_patience(patience):
    model, src = Oracle(7, edit=prefer_eos(7, lambda prefix: len(prefix) - 2)), sources(12)
    _, found = search(model, src, beam=4, n_best=4, patience=patience, max_length=9)
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
    patient, hasty = (search(model, sources(1), beam=3, early_stop=early)[0][0][0] for early in (False, True))
    assert patient == [2] and hasty == []


@pytest.mark.parametrize("early_stop", [False, True, "now"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("beam", [2, 3, 6])
def test_a_beam_that_stays_wide_against_its_definition(beam, alpha, early_stop):
    options = {"beam": beam, "n_best": beam, "slots": "keep", "early_stop": early_stop, "length_norm": "power"}
    src = sources(6)
    for seed in range(3):
        model = Oracle(13, seed=seed, edit=prefer_eos(13, 1.5))
        _, answers = search(model, src, length_penalty=alpha, max_length=7, **options)
        for source, found in zip(src.sum(1).tolist(), answers, strict=True):
            expected = slow_wide_beam(model, source, beam, 7, alpha, early_stop)
            tokens = [(*h.tokens, EOS) if h.finished else tuple(h.tokens) for h in found]
            assert_found(tokens, found, expected)


def test_a_beam_of_one_that_stays_wide_is_greedy():
    kept, closed = (search(Oracle(5), sources(3), slots=slots)[1] for slots in ("keep", "close"))
    assert kept == closed


def test_a_vocabulary_smaller_than_a_beam_that_stays_wide():
    got, _ = search(Oracle(3), sources(2), beam=8, n_best=8, slots="keep", max_length=3)
    assert all(len(set(map(tuple, tokens))) > 3 for tokens in got)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_best_token_and_a_beam_of_one_agrees(seed):
    model, src = Oracle(6, seed), sources(12, seed=seed)
    got = greedy(model, src, **MARKS, max_length=9)
    for source, tokens in zip(src.sum(1).tolist(), got, strict=True):
        expected = []
        while len(expected) < 9:
            token = model.logits(source, tuple(expected)).argmax().item()
            if token == EOS:
                break
            expected.append(token)
        assert tokens == expected
    one = beam_search(model, src, **MARKS, beam=1, length_penalty=2.0, max_length=9)
    assert [hypotheses[0].tokens for hypotheses in one] == got


def test_a_decided_sentence_stops_and_leaves_the_batch():
    # EOS nearly certain at once: nothing can beat it, so the second step must not happen.
    certain = Oracle(5, edit=lambda logits, prefix: torch.eye(5)[EOS] * 20)
    beam_search(certain, sources(3), **MARKS, beam=4, length_penalty=1.0, max_length=50)
    assert certain.rows == [3] and certain.encoded == 1
    # An open hypothesis that could still win under the length penalty keeps its sentence alive.
    flat = Oracle(3, edit=lambda logits, prefix: torch.tensor([-9.0, 0.1, 0.0]))
    beam_search(flat, sources(1), **MARKS, beam=3, length_penalty=5.0, max_length=9)
    assert len(flat.rows) > 1


def test_finished_beams_leave():
    """Three open hypotheses, then EOS takes one slot: two rows continue."""
    table = {0: [-9.0, -99.0, 2.0, 1.9, 1.8], 1: [-9.0, 3.0, 1.0, 1.0, 1.0]}
    model = Oracle(5, edit=lambda logits, prefix: torch.tensor(table.get(len(prefix), table[1])))
    beam_search(model, sources(1), **MARKS, beam=3, length_penalty=8.0, max_length=6, n_best=3)
    assert model.rows[:2] == [1, 3] and all(after <= before for before, after in itertools.pairwise(model.rows[1:]))
    assert len(model.rows) < 6


def test_without_eos_the_answer_ends_at_max_length():
    never = Oracle(5, edit=lambda logits, prefix: logits.index_fill(0, torch.tensor(EOS), -torch.inf))
    src = sources(3)
    assert [len(tokens) for tokens in greedy(never, src, **MARKS, max_length=7)] == [7, 7, 7]
    limits = torch.tensor([2, 5, 3])
    assert [len(tokens) for tokens in greedy(never, src, **MARKS, max_length=limits)] == [2, 5, 3]
    got = beam_search(never, src, **MARKS, beam=3, n_best=2, max_length=limits)
    assert [[len(h.tokens) for h in hypotheses] for hypotheses in got] == [[2, 2], [5, 5], [3, 3]]
    assert not any(h.finished for hypotheses in got for h in hypotheses)
    assert all(first.score >= second.score for first, second in got)
    assert [len(tokens) for tokens in greedy(never, src, **MARKS)] == [2 * 3 + 20] * 3


def test_finished_hypotheses_come_before_cut_ones():
    # EOS is unlikely, so the one finished hypothesis scores worse than all that are cut off.
    table = torch.tensor([-9.0, 0.0, 4.0, 4.5])
    model = Oracle(4, edit=lambda logits, prefix: table)
    [hypotheses] = beam_search(model, sources(1), **MARKS, beam=64, n_best=64, max_length=3)
    kinds = [h.finished for h in hypotheses]
    assert True in kinds and False in kinds and kinds == sorted(kinds, reverse=True)
    assert hypotheses[0].score < max(h.score for h in hypotheses if not h.finished)


def test_eos_as_the_first_token_gives_an_empty_answer():
    model = Oracle(5, edit=lambda logits, prefix: torch.eye(5)[EOS] * 9)
    assert greedy(model, sources(2), **MARKS) == [[], []]
    for [best] in beam_search(model, sources(2), **MARKS):
        assert best.tokens == [] and best.finished and best.score == pytest.approx(best.log_prob)


def test_impossible_tokens_are_never_chosen_and_dead_ends_end():
    def only_even(logits, prefix):
        logits = logits.clone()
        logits[1::2] = -torch.inf  # EOS among them
        return torch.full_like(logits, -torch.inf) if len(prefix) == 3 else logits

    model, src = Oracle(6, edit=only_even), sources(4)
    greedily = greedy(model, src, **MARKS)
    beams = beam_search(model, src, **MARKS, beam=4, n_best=4)
    assert all(len(tokens) == 3 and not any(token % 2 for token in tokens) for tokens in greedily)
    for hypotheses in beams:
        assert len(hypotheses) == 4 and len({tuple(h.tokens) for h in hypotheses}) == 4
        assert all(len(h.tokens) == 3 and not any(t % 2 for t in h.tokens) for h in hypotheses)
        assert all(math.isfinite(h.score) and not h.finished for h in hypotheses)


def test_dead_from_the_start():
    model = Oracle(4, edit=lambda logits, prefix: torch.full((4,), -torch.inf))
    assert greedy(model, sources(2), **MARKS) == [[], []]
    assert beam_search(model, sources(1), **MARKS) == [[Hypothesis([], 0.0, 0.0, False)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_models_score_in_fp32(dtype):
    # Logits all representable in the dtype: the only rounding left is that of the scores.
    edit = lambda logits, prefix: (logits * 8).round() / 8  # noqa: E731
    half, full = Oracle(5, edit=edit, dtype=dtype), Oracle(5, edit=edit)
    src = sources(4) % 50
    got = beam_search(half, src, **MARKS, beam=3, max_length=8)
    expected = beam_search(full, src, **MARKS, beam=3, max_length=8)
    for [one], [other] in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_decodes_like_its_reference(norm_first):
    """Models of both kinds, padding included: equal tokens and scores."""
    options = {"d_ff": 32, "norm_first": norm_first, "norm": "layer"}
    eager = reference.layers.Transformer(20, 15, 16, 2, 4, 0.1, **options)
    with torch.no_grad():  # far from uniform, so that rounding decides nothing
        eager.out.weight.mul_(8)
    fast = Transformer(20, 15, 16, 2, 4, 0.1, **options)
    fast.load_state_dict(eager.state_dict())
    src, lengths = torch.randint(20, (6, 9)), torch.tensor([9, 1, 4, 7, 2, 9])
    arguments = {"src_lengths": lengths, "bos": BOS, "eos": EOS, "max_length": 12}
    assert greedy(fast, src, **arguments) == greedy(eager, src, **arguments)
    got, expected = (beam_search(model, src, beam=4, n_best=4, **arguments) for model in (fast, eager))
    for ours, theirs in zip(got, expected, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-3)
