"""The comparison of ways to translate a text: that they translate the same, and what it records."""

import json

import pytest

from transformer_fast.translation import train
from transformer_fast.translation.numbers import make_numbers_corpus, numbers_config
from transformer_fast.translation.progress import Silent

pytest.importorskip("ctranslate2")
import compare_translate


@pytest.mark.slow("trains a model and starts four programs")
def test_all_sides_translate_alike(tmp_path, monkeypatch, capsys):
    paths = make_numbers_corpus(tmp_path, train_size=300, held_out=20)
    sizes = {
        "d_model": 32,
        "heads": 2,
        "layers": 1,
        "d_ff": 64,
        "max_steps": 80,
        "vocab_size": 60,
        "warmup": 5,
        "lr": 1e-2,
    }
    train(numbers_config(tmp_path, tmp_path / "run", valid_every=1000, **sizes), Silent())
    monkeypatch.setattr(compare_translate, "PEER_TOKENS", (64,))
    monkeypatch.setattr(compare_translate, "MOST_TOKENS", 12)
    given = {"--model": tmp_path / "run", "--source": paths["test_source"], "--target": paths["test_target"]}
    given |= {"--lines": 45, "--rounds": 2, "--threads": 2, "--out": tmp_path}
    compare_translate.main([str(part) for option in given.items() for part in option])
    record = json.loads((tmp_path / "compare_translate.json").read_text())
    results = {(found["search"], found["precision"], found["side"]): found for found in record["results"]}
    assert len(results) == 2 * 2 * 5 and record["lines"] == 45
    assert all(len(found["seconds"]) == 2 and min(found["seconds"]) > 0 for found in results.values())
    for search in ("greedy", "beam 5"):
        assert results[search, "fp32", "ours, kept full"]["same"] == 1.0
        assert results[search, "fp32", "ours, 2 workers"]["same"] == 1.0
        assert results[search, "fp32", "CTranslate2, 1 x 64 tokens"]["same"] >= 0.9  # ties by rounding aside
        assert results[search, "fp32", "CTranslate2, 2 x 64 tokens"]["same"] >= 0.9
    assert "| greedy | fp32 | ours | " in capsys.readouterr().out
