"""The comparison of padded with packed updates: what it counts, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import compare_training
import pytest
import torch

from transformer_fast.translation import Tokenizer, read_parallel
from transformer_fast.translation.batching import Corpus, TokenBatches
from transformer_fast.translation.environment import multiplies_bf16
from transformer_fast.translation.numbers import make_numbers_corpus
from transformer_fast.translation.tokenizer import PAD

RECIPE = """
[training]
d_model = 16
heads = 2
layers = 1
d_ff = 32
vocab_size = 60
max_length = 60
device = "cpu"
"""


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_numbers_corpus(tmp_path, train_size=100, held_out=5)
    (tmp_path / "small.toml").write_text(RECIPE)
    given = ["--source", str(paths["train_source"]), "--target", str(paths["train_target"]), "--updates", "2"]
    given += ["--recipe", str(tmp_path / "small.toml"), "--batch-tokens", "200", "1000", "--out", str(tmp_path / "out")]
    threads = torch.get_num_threads()
    try:
        assert compare_training.main([*given, "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "out" / "compare_training.json").read_text())
    small, large = report["results"]
    assert (small["batch_tokens"], large["batch_tokens"], report["threads"]) == (200, 1000, 1)
    sides = ["padded", "packed", *(["packed, bf16"] if multiplies_bf16() else [])]
    for result in (small, large):
        assert list(result["tokens_per_second"]) == sides and min(result["tokens_per_second"].values()) > 0
        assert 0 <= result["target_padding"] < 0.5 and 0 < result["source_padding"] < 0.8
    text = read_parallel(paths["train_source"], paths["train_target"])
    corpus = Corpus(text, Tokenizer.train((*text.source, *text.target), 60), 60)
    batches = TokenBatches(corpus, 200, seed=0)
    batches.next_batch()  # which warms up
    timed = torch.cat([batches.next_batch()[0].source.flatten() for _ in range(2)])
    assert small["source_padding"] == pytest.approx(float((timed == PAD).float().mean()))
    assert f"| 1000 | {large['source_padding']:.1%} |" in capsys.readouterr().out
