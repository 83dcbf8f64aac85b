"""The comparison of quantised weights with fp32: what it writes, and what it calls a loss."""

from __future__ import annotations

import json
from pathlib import Path

import compare_quantized
import pytest

from transformer_fast.translation import train
from transformer_fast.translation.numbers import make_numbers_corpus, numbers_config
from transformer_fast.translation.progress import Silent

TINY = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "batch_tokens": 1024, "max_steps": 20, "warmup": 5}


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_numbers_corpus(tmp_path, train_size=300, held_out=20)
    config = numbers_config(tmp_path, tmp_path / "run", vocab_size=60, valid_every=1000, **TINY)
    train(config, Silent())
    given = ["--model", str(tmp_path / "run"), "--source", str(config.valid_source), "--beams", "1"]
    given += ["--target", str(config.valid_target), "--out", str(tmp_path / "out")]
    assert compare_quantized.main([*given, "--loss", "100"]) == 0
    report = json.loads((tmp_path / "out" / "compare_quantized.json").read_text())
    assert report["sentences"] == 20 and report["model"]["d_ff"] == 32
    exact, int8 = report["results"][:2]
    assert (exact["weights"], exact["same"], int8["weights"]) == ("fp32", 1, "int8")
    assert "| beam 1 | int8 |" in capsys.readouterr().out

    # A type that the CPU does not multiply is left out; one that loses too much is an error.
    monkeypatch.setattr(compare_quantized.extension, "build_info", lambda: {"instruction_set": "avx2"})
    said = iter([["a right line of words"] * 20, ["a wrong one"] * 20])
    monkeypatch.setattr(compare_quantized, "read_lines", lambda _: ["a right line of words"] * 20)
    translate = compare_quantized.Translator.translate

    def answers(self: compare_quantized.Translator, lines: list[str]) -> list[str]:
        list(translate(self, lines[:1]))  # raises for bfloat16
        return next(said)

    monkeypatch.setattr(compare_quantized.Translator, "translate", answers)
    assert compare_quantized.main(given) == 1
    out = capsys.readouterr().out
    assert "bf16 | quantize='bf16' cannot be: it needs AVX512-BF16" in out and "| beam 1 | int8 |" in out
