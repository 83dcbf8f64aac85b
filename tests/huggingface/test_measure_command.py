"""`transformer-fast measure`: a model of transformers and its tokenizer from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")
import sentence_models  # noqa: E402

from transformer_fast import cli  # noqa: E402
from transformer_fast.cli import measure  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
WIDE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 60}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 60}
CONFIGS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SIZES,
    "BertForSequenceClassification": SIZES,
    "BertForTokenClassification": SIZES,
    "BertModel": SIZES,
    "BartForConditionalGeneration": WIDE,
    "T5Model": T5,
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
}


def saved(name: str, folder: Path, **settings: Any) -> Path:
    kind = getattr(transformers, name)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    kind(kind.config_class(**CONFIGS[name], **special, **settings)).save_pretrained(folder)
    sentence_models.tokenizer(pairs=True, side="right").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_measured(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(name, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert cli.main(["measure", "--model", str(folder), "--batch-size", "4", "--rounds", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention: fused in ")
    assert "times as fast in training" in lines[-4] and "; padding is " in lines[-4]
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["training step", "evaluation"]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_model_without_swapped_modules_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is where the extension is missing."""
    monkeypatch.setattr(measure, "accelerate", lambda model, packed: tfast.accelerate(nn.Sequential()))
    assert cli.main(["measure", "--model", str(saved("BertModel", tmp_path))]) == 1
    shown = capsys.readouterr()
    assert "0 modules swapped" in shown.out
    assert shown.err.splitlines()[-1].startswith(
        "transformer_fast: error: nothing of this model was swapped, so nothing is"
    )


@pytest.mark.parametrize("settings", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_a_classifier_of_numbers_or_of_several_labels(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("BertForSequenceClassification", tmp_path, **settings)
    assert cli.main(["measure", "--model", str(folder), "--batch-size", "3", "--rounds", "2"]) == 0
    assert "in training" in capsys.readouterr().out


def test_texts_come_from_all_parts_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\n\n two \nthree\nfour\n")
    assert measure._texts(str(file), 2) == ["one", "three"]
    assert measure._texts(str(file), 6) == ["one", "two", "three", "four", "one", "two"]
    words = [len(text.split()) for text in measure._texts(None, 16)]
    assert len(set(measure.TEXTS)) == 16 and min(words) == 2 and max(words) > 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "none"],
            "none/config.json is missing; --model is a folder to which save_pretrained wrote the model and its "
            "tokenizer",
        ),
        (["--model", ".", "--data", "none"], "none: No such file or directory"),
        (["--model", ".", "--data", "empty"], "empty has no text"),
        (["--model", ".", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--model", ".", "--rounds", "1"], "--rounds must be at least 2, got 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    Path("empty").write_text("\n\n")
    assert cli.main(["measure", *options]) == 2
    assert capsys.readouterr().err == f"transformer_fast: error: {message}\n"
