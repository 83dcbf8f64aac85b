"""Both sides of benchmarks/train_multi30k.py train the same model, and its record can be written at any time."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import train_multi30k

from transformer_fast import reference
from transformer_fast.translation.numbers import make_numbers_corpus

RECIPE = """
[training]
d_model = 16
heads = 2
layers = 1
d_ff = 32
norm_first = false
dropout = 0.3
attention_dropout = 0.0
vocab_size = 80
max_length = 60
batch_tokens = 300
warmup = 4
max_steps = 45
valid_every = 0
bleu_sentences = 0
average_last = 2

[translation]
beam = 2
length_norm = "power"
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("elementwise_keep", "attention_keep"):  # which a side may replace for its process
        monkeypatch.setattr(reference.dropout, name, getattr(reference.dropout, name))
    threads = torch.get_num_threads()
    yield train_multi30k
    torch.set_num_threads(threads)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    paths = make_numbers_corpus(tmp_path, train_size=150, held_out=10)
    for path, name in zip(paths.values(), ("train.en.gz", "train.de.gz", "val.en.gz", "val.de.gz"), strict=True):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "small.toml").write_text(RECIPE)
    folders = {"--data": tmp_path, "--out": tmp_path / "runs", "--results": tmp_path / "results"}
    return [str(x) for pair in {**folders, "--recipe": tmp_path / "small.toml"}.items() for x in pair]


@pytest.mark.slow("trains both sides in turn")
def test_both_sides_train_one_thing(script: ModuleType, flags: list[str], tmp_path: Path) -> None:
    """With equal dropout masks, one seed gives equal losses on both sides, and another seed others."""
    args = script.arguments([*flags, "--same-dropout", "--seeds", "0", "5"])
    before = script.write_record(args)
    assert not before["finished"] and before["results"]["fast"]["5"]["updates"] == 0
    for seed in args.seeds:
        script.run_side(args, "fast", seed)
    half = script.write_record(args)
    assert not half["finished"] and half["results"]["fast"]["5"]["updates"] == 45
    assert half["summary"]["valid_loss"] is None and not half["summary"]["tokens_a_cpu_second_fast_over_eager"]
    for seed in args.seeds:
        script.run_side(args, "eager", seed)
    record = script.write_record(args)
    assert record == json.loads((tmp_path / "results" / "train_multi30k.json").read_text())
    assert record["finished"] and (tmp_path / "results" / "train_multi30k.png").stat().st_size > 5_000
    of_seed = {}
    for seed in ("0", "5"):
        fast, eager = (record["results"][side][seed] for side in script.SIDES)
        for curve in ("train", "valid"):
            ours, theirs = ([(point[0], point[2]) for point in run["curve"][curve]] for run in (fast, eager))
            assert len(ours) >= 1 and [step for step, _ in ours] == [step for step, _ in theirs]
            assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=2e-3)
        assert fast["parameters"] == eager["parameters"] and "case:lc" in fast["bleu_lowercased_signature"]
        assert fast["target_tokens"] == eager["target_tokens"]
        of_seed[seed] = ours[-1][1]
    assert abs(of_seed["0"] - of_seed["5"]) > 2e-2, "seeds differ by more than sides"
    summary = record["summary"]
    assert len(summary["tokens_a_cpu_second_fast_over_eager"]) == 2 and 45 in summary["updates"]
    assert summary["valid_loss"]["eager"] == [of_seed["0"], of_seed["5"]] and summary["ranges_of_valid_loss_overlap"]
    script.print_table(record)


def test_a_seed_given_twice_is_refused(script: ModuleType, flags: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script.arguments([*flags, "--seeds", "1", "1"])
    assert "expected each seed once" in capsys.readouterr().err


def test_eager_draws_with_pytorchs_generator_unless_told_otherwise(script: ModuleType, flags: list[str]) -> None:
    counted = reference.dropout.elementwise_keep
    script.run_side(script.arguments(flags), "eager", 0)
    assert reference.dropout.elementwise_keep is not counted
    kept = reference.dropout.elementwise_keep(torch.tensor([1]), 0.25, 2000, 50)
    assert kept.dtype == torch.bool and float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
