"""Comparisons with a recurrent model: both sides learn from the same data for the same time, and are drawn."""

import itertools
import types

import compare_rnn
import pytest
import race_rnn
import torch

from transformer_fast.translation.numbers import english, german, sample_numbers
from transformer_fast.translation.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def spelling():
    numbers = sample_numbers(60, held_out=False)
    tokenizer = Tokenizer.train([spell(n) for n in numbers for spell in (english, german)], vocab_size=120)
    return tokenizer, numbers, compare_rnn.make_batches(tokenizer, numbers, 30)


def test_both_transformers_start_alike(spelling):
    tokenizer, _, batches = spelling
    recurrent, eager, fast = compare_rnn.make_models(len(tokenizer), 16, 0).values()
    src, lengths, trg = batches[0]
    for model in (eager, fast):
        model.eval()
    assert torch.allclose(eager(src, trg, lengths)[0], fast(src, trg, lengths)[0], atol=1e-4)
    assert recurrent(src, trg, lengths)[0].shape == fast(src, trg, lengths)[0].shape


@pytest.mark.parametrize("index", range(3), ids=["GRU", "eager", "fast"])
def test_a_contestant_learns_and_spells(spelling, index):
    tokenizer, numbers, batches = spelling
    model = list(compare_rnn.make_models(len(tokenizer), 16, 0).values())[index]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = [compare_rnn.train_epoch(model, optimizer, batches, [0, 1]) for _ in range(4)]
    assert losses[-1] < losses[0] - 0.3
    assert 0.0 <= compare_rnn.exact(model, tokenizer, numbers[:10]) <= 1.0


def test_the_recurrent_models_attention_does_not_read_padding(spelling):
    tokenizer, _, batches = spelling
    recurrent = compare_rnn.make_models(len(tokenizer), 16, 0)["GRU with attention"].eval()
    src, lengths, trg = batches[0]
    memory, hidden = recurrent.encoder(src, lengths)
    poisoned = memory.masked_fill((torch.arange(src.shape[1]) >= lengths[:, None]).unsqueeze(-1), 100.0)
    states = (recurrent.decoder.init_state((outputs, hidden), lengths) for outputs in (memory, poisoned))
    expected, found = (recurrent.decoder(trg[:, :3], state)[0] for state in states)
    assert not torch.equal(memory, poisoned) and torch.equal(found, expected)


@pytest.fixture(scope="module")
def task():
    numbers = sample_numbers(80, held_out=False)
    sides = [[spell(n) for n in numbers] for spell in (english, german)]
    tokenizer = Tokenizer.train(sides[0] + sides[1], vocab_size=120)
    return tokenizer, race_rnn.make_batches(tokenizer, *sides, 20, 99)


def contestants(task, seed=0):
    tokenizer, batches = task
    models = race_rnn.make_models(len(tokenizer), 16, seed)
    return [race_rnn.Contestant(name, models[name], batches, 0.01, 4, seed) for name in race_rnn.CONTESTANTS]


def test_the_race(task, tmp_path, monkeypatch):
    """The clock advances a fixed step per reading, so a slow machine gives the same race."""
    clock = itertools.count(step=0.02)
    monkeypatch.setattr(race_rnn, "time", types.SimpleNamespace(process_time=lambda: next(clock)))
    _, batches = task
    both = contestants(task)
    before = [c.validate(batches) for c in both]
    race_rnn.race(both, batches, seconds=1.5, turn=0.5)
    for c, loss in zip(both, before, strict=True):
        track = c.track
        assert 1.5 <= track.seconds < 1.6 and len(track.curve) >= 3
        assert [point[1] for point in track.curve] == sorted({point[1] for point in track.curve})
        assert track.curve[-1][4] < loss - 0.3 and track.tokens == track.curve[-1][2] > track.updates
        assert (
            race_rnn.time_to(track, track.curve[-1][4]) <= track.curve[-1][0] and race_rnn.time_to(track, -1.0) is None
        )
    race_rnn.draw([c.track for c in both], tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 10_000


def test_both_see_the_same_batches_in_the_same_order(task):
    _, batches = task
    first, second, other = (race_rnn.endless(batches, seed) for seed in (1, 1, 2))
    rounds = [[next(order)[2] for _ in range(3 * len(batches))] for order in (first, second, other)]
    assert all(a is b for a, b in zip(*rounds[:2], strict=True))
    assert any(a is not b for a, b in zip(rounds[0], rounds[2], strict=True))


def test_validation_sees_neither_padding_nor_what_follows(task):
    _, batches = task
    src, lengths, trg = batches[-1]
    longer = src, lengths, torch.nn.functional.pad(trg, (0, 4))
    changed = trg.clone()
    changed[:, 5:] = 7
    for c in contestants(task):
        c.model.eval()
        assert race_rnn.loss_of(c.model, longer).item() == pytest.approx(
            race_rnn.loss_of(c.model, batches[-1]).item(), rel=1e-4
        )
        first, second = (c.model(src, target[:, :-1], lengths)[0][:, :5] for target in (trg, changed))
        torch.testing.assert_close(first, second)
