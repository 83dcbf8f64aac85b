"""The two sides of benchmarks/train_multi30k.py train one thing, and its record can be had at any time."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from transformer_fast import reference
from transformer_fast.translation.numbers import make_numbers_corpus

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "train_multi30k.py"
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
    spec = importlib.util.spec_from_file_location("train_multi30k", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("elementwise_keep", "attention_keep"):  # which a side may replace for its process
        monkeypatch.setattr(reference.dropout, name, getattr(reference.dropout, name))
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    paths = make_numbers_corpus(tmp_path, train_size=150, held_out=10)
    for path, name in zip(paths.values(), ("train.en.gz", "train.de.gz", "val.en.gz", "val.de.gz"), strict=True):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "small.toml").write_text(RECIPE)
    folders = {"--data": tmp_path, "--out": tmp_path / "runs", "--results": tmp_path / "results"}
    return [str(x) for pair in {**folders, "--recipe": tmp_path / "small.toml"}.items() for x in pair]


def test_both_sides_train_one_thing(script: ModuleType, flags: list[str], tmp_path: Path) -> None:
    args = script.arguments([*flags, "--same-dropout"])
    before = script.write_record(args)
    assert not before["finished"] and before["results"]["fast"]["updates"] == 0
    script.run_side(args, "fast")
    half = script.write_record(args)
    assert not half["finished"] and half["results"]["fast"]["updates"] == 45
    script.run_side(args, "eager")
    record = script.write_record(args)
    assert record == json.loads((tmp_path / "results" / "train_multi30k.json").read_text())
    assert record["finished"] and (tmp_path / "results" / "train_multi30k.png").stat().st_size > 5_000
    fast, eager = (record["results"][side] for side in script.SIDES)
    for curve in ("train", "valid"):
        ours, theirs = ([(point[0], point[2]) for point in row["curve"][curve]] for row in (fast, eager))
        assert len(ours) >= 1 and [step for step, _ in ours] == [step for step, _ in theirs]
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=2e-3)
    assert fast["parameters"] == eager["parameters"] and "case:lc" in fast["bleu_lowercased_signature"]
    assert fast["target_tokens"] == eager["target_tokens"]


def test_eager_draws_with_pytorchs_generator_unless_told_otherwise(script: ModuleType, flags: list[str]) -> None:
    counted = reference.dropout.elementwise_keep
    script.run_side(script.arguments(flags), "eager")
    assert reference.dropout.elementwise_keep is not counted
    kept = reference.dropout.elementwise_keep(torch.tensor([1]), 0.25, 2000, 50)
    assert kept.dtype == torch.bool and float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
