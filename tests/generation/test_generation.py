"""Greedy and beam search against brute force: every sequence of a tiny vocabulary, scored one by one."""

import itertools
import math

import pytest
import torch
from generation_oracle import BOS, EOS, Oracle, every_finished, slow_beam, sources
from torch import nn

from transformer_fast import Transformer, reference
from transformer_fast.generation import Hypothesis, beam_search, greedy


@pytest.mark.parametrize("alpha", [-0.7, 0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("vocab, longest", [(3, 5), (4, 4)])
def test_a_wide_beam_equals_brute_force(vocab, longest, alpha):
    model, src = Oracle(vocab), sources(4)
    wide = vocab**longest
    got = beam_search(model, src, bos=BOS, eos=EOS, beam=wide, length_penalty=alpha, max_length=longest, n_best=6)
    for source, hypotheses in zip(src.sum(1).tolist(), got, strict=True):
        expected = every_finished(model, source, longest, alpha)[:6]
        assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert all(h.finished for h in hypotheses)


@pytest.mark.parametrize("alpha", [-0.7, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("beam, n_best", [(1, 1), (2, 1), (3, 3), (5, 1), (5, 2)])
def test_early_stop_changes_nothing(beam, n_best, alpha):
    """A narrow beam against the definition that never stops early: same winners, for a whole batch at once."""
    edit = lambda logits, prefix: logits + torch.eye(7)[EOS] * (len(prefix) - 3)  # noqa: E731
    model, src = Oracle(7, edit=edit), sources(25, seed=3)
    got = beam_search(model, src, bos=BOS, eos=EOS, beam=beam, n_best=n_best, length_penalty=alpha, max_length=12)
    stopped_early = 0
    for source, hypotheses in zip(src.sum(1).tolist(), got, strict=True):
        expected = slow_beam(model, source, beam, 12, alpha)[:n_best]
        complete = [h for h in hypotheses if h.finished]
        assert [h.tokens for h in complete] == [tokens for tokens, _ in expected]
        assert [h.score for h in complete] == pytest.approx([score for _, score in expected], abs=1e-4)
        stopped_early += len(expected) > 0
    assert stopped_early > 15  # the test is about sentences that finish


def test_a_decided_sentence_stops_and_leaves_the_batch():
    # EOS nearly certain at once: nothing can beat it, so the second step must not happen.
    certain = Oracle(5, edit=lambda logits, prefix: torch.eye(5)[EOS] * 20)
    beam_search(certain, sources(3), bos=BOS, eos=EOS, beam=4, length_penalty=1.0, max_length=50)
    assert certain.rows == [3] and certain.encoded == 1
    # An open hypothesis that could still win under the length penalty keeps its sentence alive.
    flat = Oracle(3, edit=lambda logits, prefix: torch.tensor([-9.0, 0.1, 0.0]))
    beam_search(flat, sources(1), bos=BOS, eos=EOS, beam=3, length_penalty=5.0, max_length=9)
    assert len(flat.rows) > 1


def test_finished_beams_leave():
    """Three open hypotheses, then a step at which EOS takes one place: two rows go on."""
    table = {0: [-9.0, -99.0, 2.0, 1.9, 1.8], 1: [-9.0, 3.0, 1.0, 1.0, 1.0]}
    model = Oracle(5, edit=lambda logits, prefix: torch.tensor(table.get(len(prefix), table[1])))
    beam_search(model, sources(1), bos=BOS, eos=EOS, beam=3, length_penalty=8.0, max_length=6, n_best=3)
    assert model.rows[:2] == [1, 3] and all(after <= before for before, after in itertools.pairwise(model.rows[1:]))
    assert len(model.rows) < 6


@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_best_token_and_a_beam_of_one_agrees(seed):
    model, src = Oracle(6, seed), sources(12, seed=seed)
    got = greedy(model, src, bos=BOS, eos=EOS, max_length=9)
    for source, tokens in zip(src.sum(1).tolist(), got, strict=True):
        expected = []
        while len(expected) < 9:
            token = model.logits(source, tuple(expected)).argmax().item()
            if token == EOS:
                break
            expected.append(token)
        assert tokens == expected
    one = beam_search(model, src, bos=BOS, eos=EOS, beam=1, length_penalty=2.0, max_length=9)
    assert [hypotheses[0].tokens for hypotheses in one] == got


@pytest.mark.parametrize("decode", ["greedy", "beam"])
def test_a_sentence_does_not_depend_on_its_batch(decode):
    def run(rows, lengths):
        if decode == "greedy":
            return greedy(model, rows, src_lengths=lengths, bos=BOS, eos=EOS)
        return beam_search(model, rows, src_lengths=lengths, bos=BOS, eos=EOS, beam=3)

    model, src = Oracle(5, spread=2.0), sources(8, width=6, seed=5)
    lengths = torch.tensor([6, 1, 4, 2, 6, 3, 5, 1])
    together = run(src, lengths)
    alone = [run(src[i : i + 1, :n], lengths[i : i + 1])[0] for i, n in enumerate(lengths.tolist())]
    assert together == alone
    assert len({str(answer) for answer in together}) > 4  # they do differ from one another


def test_the_three_ways_to_say_what_to_read_agree():
    model = Oracle(5)
    src = torch.tensor([[5, 9, 4, 3], [7, 8, 3, 3]])
    lengths = torch.tensor([3, 2])
    mask = (torch.arange(4) < lengths[:, None]).unsqueeze(1)
    expected = greedy(model, src, src_lengths=lengths, bos=BOS, eos=EOS)
    assert greedy(model, src, src_mask=mask, bos=BOS, eos=EOS) == expected
    assert greedy(model, src, src_mask=mask.int(), bos=BOS, eos=EOS) == expected
    assert greedy(model, src, pad=3, bos=BOS, eos=EOS) == expected
    assert greedy(model, src, bos=BOS, eos=EOS) != expected


def test_without_eos_the_answer_ends_at_max_length():
    never = Oracle(5, edit=lambda logits, prefix: logits.index_fill(0, torch.tensor(EOS), -torch.inf))
    src = sources(3)
    assert [len(tokens) for tokens in greedy(never, src, bos=BOS, eos=EOS, max_length=7)] == [7, 7, 7]
    limits = torch.tensor([2, 5, 3])
    assert [len(tokens) for tokens in greedy(never, src, bos=BOS, eos=EOS, max_length=limits)] == [2, 5, 3]
    got = beam_search(never, src, bos=BOS, eos=EOS, beam=3, n_best=2, max_length=limits)
    assert [[len(h.tokens) for h in hypotheses] for hypotheses in got] == [[2, 2], [5, 5], [3, 3]]
    assert not any(h.finished for hypotheses in got for h in hypotheses)
    assert all(first.score >= second.score for first, second in got)
    assert [len(tokens) for tokens in greedy(never, src, bos=BOS, eos=EOS)] == [2 * 3 + 20] * 3


def test_finished_hypotheses_come_before_cut_ones():
    # EOS is unlikely, so the one finished hypothesis scores worse than all that are cut off.
    table = torch.tensor([-9.0, 0.0, 4.0, 4.5])
    model = Oracle(4, edit=lambda logits, prefix: table)
    [hypotheses] = beam_search(model, sources(1), bos=BOS, eos=EOS, beam=64, n_best=64, max_length=3)
    kinds = [h.finished for h in hypotheses]
    assert True in kinds and False in kinds and kinds == sorted(kinds, reverse=True)
    assert hypotheses[0].score < max(h.score for h in hypotheses if not h.finished)


def test_eos_as_the_first_token_gives_an_empty_answer():
    model = Oracle(5, edit=lambda logits, prefix: torch.eye(5)[EOS] * 9)
    assert greedy(model, sources(2), bos=BOS, eos=EOS) == [[], []]
    for [best] in beam_search(model, sources(2), bos=BOS, eos=EOS):
        assert best.tokens == [] and best.finished and best.score == pytest.approx(best.log_prob)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_decodes_like_its_reference(norm_first):
    """Real models of both kinds, padding included: same tokens, same scores."""
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


def test_impossible_tokens_are_never_chosen_and_dead_ends_end():
    def only_even(logits, prefix):
        logits = logits.clone()
        logits[1::2] = -torch.inf  # EOS among them
        return torch.full_like(logits, -torch.inf) if len(prefix) == 3 else logits

    model, src = Oracle(6, edit=only_even), sources(4)
    greedily = greedy(model, src, bos=BOS, eos=EOS)
    beams = beam_search(model, src, bos=BOS, eos=EOS, beam=4, n_best=4)
    assert all(len(tokens) == 3 and not any(token % 2 for token in tokens) for tokens in greedily)
    for hypotheses in beams:
        assert len(hypotheses) == 4 and len({tuple(h.tokens) for h in hypotheses}) == 4
        assert all(len(h.tokens) == 3 and not any(t % 2 for t in h.tokens) for h in hypotheses)
        assert all(math.isfinite(h.score) and not h.finished for h in hypotheses)


def test_dead_from_the_start():
    model = Oracle(4, edit=lambda logits, prefix: torch.full((4,), -torch.inf))
    assert greedy(model, sources(2), bos=BOS, eos=EOS) == [[], []]
    assert beam_search(model, sources(1), bos=BOS, eos=EOS) == [[Hypothesis([], 0.0, 0.0, False)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_models_score_in_fp32(dtype):
    # Logits all representable in the dtype: the only rounding left is that of the scores.
    edit = lambda logits, prefix: (logits * 8).round() / 8  # noqa: E731
    half, full = Oracle(5, edit=edit, dtype=dtype), Oracle(5, edit=edit)
    src = sources(4) % 50
    got = beam_search(half, src, bos=BOS, eos=EOS, beam=3, max_length=8)
    expected = beam_search(full, src, bos=BOS, eos=EOS, beam=3, max_length=8)
    for [one], [other] in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and one.score == pytest.approx(other.score, abs=1e-5)


def test_evaluation_mode_and_back():
    model = Oracle(5)
    model.train()
    model.out.eval()  # a module someone froze stays frozen
    greedy(model, sources(2), bos=BOS, eos=EOS)
    beam_search(model, sources(2), bos=BOS, eos=EOS)
    assert model.modes == {(False, False)}
    assert model.training and model.dropout.training and not model.out.training

    broken = Oracle(5, edit=lambda logits, prefix: logits * torch.nan)
    broken.train()
    for decode in (greedy, beam_search):
        with pytest.raises(FloatingPointError, match="logits for token 1 are NaN"):
            decode(broken, sources(1), bos=BOS, eos=EOS)
    assert broken.training and broken.dropout.training


def test_an_empty_batch():
    model, none = Oracle(5), torch.zeros(0, 7, dtype=torch.long)
    assert greedy(model, none, bos=BOS, eos=EOS) == []
    assert beam_search(model, none, src_lengths=torch.zeros(0, dtype=torch.long), bos=BOS, eos=EOS) == []


WRONG = {
    "float src": ({"src": torch.zeros(2, 3)}, r"src must be an integer tensor .* torch.float32 \(2, 3\)"),
    "one-dimensional src": ({"src": torch.zeros(3, dtype=torch.long)}, r"\(batch, length\).*\(3,\)"),
    "list src": ({"src": [[1, 2]]}, "src must be an integer tensor .* got list"),
    "no positions": ({"src": torch.zeros(2, 0, dtype=torch.long)}, "2 sentences but no positions"),
    "other device": ({"src": torch.zeros(2, 3, dtype=torch.long, device="meta")}, "src is on meta .* cpu"),
    "bos too large": ({"bos": 5}, "bos is token 5, outside the model's target vocabulary of 5"),
    "eos negative": ({"eos": -1}, "eos must be a token id"),
    "mask and lengths": (
        {"src_lengths": torch.tensor([1, 1]), "src_mask": torch.ones(2, 1, 3, dtype=torch.bool)},
        "src_lengths or src_mask, not both",
    ),
    "mask without its query axis": ({"src_mask": torch.ones(2, 3, dtype=torch.bool)}, r"\(2, 1, 3\), got .* \(2, 3\)"),
    "float mask": ({"src_mask": torch.ones(2, 1, 3)}, "bool keep mask .* got torch.float32"),
    "too many lengths": ({"src_lengths": torch.tensor([1, 1, 1])}, "2 integers"),
    "length past the width": ({"src_lengths": torch.tensor([1, 4])}, r"lie in \[0, 3\]"),
    "no room for an answer": ({"max_length": 0}, "max_length must be an int >= 1"),
    "limits for other sentences": ({"max_length": [3, 4, 5]}, "max_length must be .* 2 of them"),
    "no beam": ({"beam": 0}, "beam must be an int >= 1, got 0"),
    "fractional beam": ({"beam": 2.5}, "beam must be an int >= 1, got 2.5"),
    "n_best beyond the beam": ({"beam": 2, "n_best": 3}, "n_best is 3, but a beam of 2"),
    "infinite penalty": ({"length_penalty": math.inf}, "length_penalty must be a finite number"),
    "no transformer": ({"model": nn.Linear(2, 2)}, "Linear has no encoder, decoder, out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(case):
    change, message = WRONG[case]
    arguments = {"model": Oracle(5), "src": sources(2), "bos": BOS, "eos": EOS, **change}
    with pytest.raises(ValueError, match=message):
        beam_search(**arguments)
    if not {"beam", "n_best", "length_penalty"} & set(change):
        with pytest.raises(ValueError, match=message):
            greedy(**arguments)
