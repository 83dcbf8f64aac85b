"""The comparison with a recurrent model: what it compares is comparable, and every contestant learns."""

import importlib.util
from pathlib import Path

import pytest
import torch

from transformer_fast.translation.numbers import english, german, sample_numbers
from transformer_fast.translation.tokenizer import Tokenizer

spec = importlib.util.spec_from_file_location(
    "compare_rnn", Path(__file__).parents[2] / "benchmarks" / "compare_rnn.py"
)
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


@pytest.fixture(scope="module")
def task():
    numbers = sample_numbers(60, held_out=False)
    tokenizer = Tokenizer.train([spell(n) for n in numbers for spell in (english, german)], vocab_size=120)
    return tokenizer, numbers, compare.make_batches(tokenizer, numbers, 30)


def test_both_transformers_start_alike(task):
    tokenizer, _, batches = task
    recurrent, eager, fast = compare.make_models(len(tokenizer), 16, 0).values()
    src, lengths, trg = batches[0]
    for model in (eager, fast):
        model.eval()
    assert torch.allclose(eager(src, trg, lengths)[0], fast(src, trg, lengths)[0], atol=1e-4)
    assert recurrent(src, trg, lengths)[0].shape == fast(src, trg, lengths)[0].shape


@pytest.mark.parametrize("index", range(3), ids=["GRU", "eager", "fast"])
def test_a_contestant_learns_and_spells(task, index):
    tokenizer, numbers, batches = task
    model = list(compare.make_models(len(tokenizer), 16, 0).values())[index]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = [compare.train_epoch(model, optimizer, batches, [0, 1]) for _ in range(4)]
    assert losses[-1] < losses[0] - 0.3
    assert 0.0 <= compare.exact(model, tokenizer, numbers[:10]) <= 1.0


def test_the_recurrent_models_attention_does_not_read_padding(task):
    tokenizer, _, batches = task
    recurrent = compare.make_models(len(tokenizer), 16, 0)["GRU with attention"].eval()
    src, lengths, trg = batches[0]
    memory, hidden = recurrent.encoder(src, lengths)
    poisoned = memory.masked_fill((torch.arange(src.shape[1]) >= lengths[:, None]).unsqueeze(-1), 100.0)
    states = (recurrent.decoder.init_state((outputs, hidden), lengths) for outputs in (memory, poisoned))
    expected, found = (recurrent.decoder(trg[:, :3], state)[0] for state in states)
    assert not torch.equal(memory, poisoned) and torch.equal(found, expected)
