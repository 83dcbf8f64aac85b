"""Runs exported to transformers and to CTranslate2 give the same translations there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from marian_folders import TEXT, answers, load, write_marian
from small_training import small_config
from transformers import MarianMTModel

from transformer_fast import cli
from transformer_fast.generation import GenerationConfig, Hypothesis, generate
from transformer_fast.translation import Trained, load_trained, train
from transformer_fast.translation.checkpoints import export_ctranslate2, export_hf, import_marian
from transformer_fast.translation.checkpoints.export import TRAINED_SEARCH
from transformer_fast.translation.progress import Silent


def hypotheses(trained: Trained, config: GenerationConfig) -> list[list[Hypothesis]]:
    """Return the answers to each line of the text."""
    sources = trained.tokenizer.encode_source(TEXT)
    width, lengths = max(map(len, sources)), torch.tensor([len(ids) for ids in sources])
    src = torch.tensor([ids + [trained.tokenizer.pad] * (width - len(ids)) for ids in sources])
    marks = {"bos": trained.tokenizer.bos, "eos": trained.tokenizer.eos}
    return generate(trained.model, src, src_lengths=lengths, config=config, **marks)


def tokens(trained: Trained, config: GenerationConfig) -> list[list[int]]:
    """Return the best answer to each line of the text."""
    return [found[0].tokens for found in hypotheses(trained, config)]


def by_ctranslate2(folder: Path, beam: int, **options: Any) -> list[Any]:
    """Return the answers of an exported folder; the end is not barred from the first step."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    sentencepiece = pytest.importorskip("sentencepiece")
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    lengths = {"max_decoding_length": 24, "min_decoding_length": 0}
    lines = [processor.encode(line, out_type=str) for line in TEXT]
    return translator.translate_batch(lines, beam_size=beam, length_penalty=1.0, **lengths, **options)


def as_ctranslate2(trained: Trained, beam: int) -> GenerationConfig:
    """Return the search that CTranslate2 does."""
    return GenerationConfig(
        beam=beam,
        length_norm="power",
        length_penalty=1.0,
        slots="keep",
        early_stop=True,
        max_length=24,
        suppress=trained.generation.suppress,
        renormalize=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, str]) -> dict[str, Path]:
    """An imported run, and trained ones with post-norm and pre-norm."""
    root = tmp_path_factory.mktemp("runs")
    pad, vary = 103, {"no_repeat_ngram_size": 2}
    settings = {"num_beams": 4, "max_length": 20, "bad_words_ids": [[pad]], "renormalize_logits": True, **vary}
    import_marian(write_marian(root / "hf", generation=settings, seed=1), root / "imported")
    options: dict[str, Any] = {"max_steps": 40, "valid_every": 1000, "bleu_sentences": 0, "layers": 2}
    for name, changes in {
        "post": {"norm_first": False},
        "untied": {"norm_first": False, "tie_weights": False},
        "pre": {},
        "std": {"norm": "std", "max_steps": 1},
        "rms": {"norm": "rms", "norm_first": False},
        "pre rms": {"norm": "rms"},
        "lower": {"norm_first": False, "lowercase": True, "max_steps": 1},
    }.items():
        train(small_config(corpus, root / name, **options | changes), Silent())
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name", ["imported", "post", "untied"])
def test_transformers_says_the_same(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    export_hf(runs[name], tmp_path / "hf")
    trained = load_trained(runs[name])
    config = trained.generation if name == "imported" else replace(TRAINED_SEARCH, max_length=19)
    _, report = MarianMTModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), "every weight must be in the file, and no other"
    tokenizer = load(tmp_path / "hf")[1]
    assert tokenizer(TEXT)["input_ids"] == trained.tokenizer.encode_source(TEXT)
    for beam in (1, config.beam):
        ours = tokens(trained, replace(config, beam=beam))
        expected, texts = answers(tmp_path / "hf", TEXT, num_beams=beam, max_length=config.max_length + 1)
        assert ours == expected and any(expected)
        if name == "imported":
            assert trained.tokenizer.decode(ours) == texts
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "marian"


def test_a_way_there_and_back(runs: dict[str, Path], tmp_path: Path) -> None:
    """An exported run that is imported again is the same run, file by file."""
    export_hf(runs["imported"], tmp_path / "hf")
    import_marian(tmp_path / "hf", tmp_path / "back")
    names = sorted(path.relative_to(runs["imported"]) for path in runs["imported"].rglob("*") if path.is_file())
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (runs["imported"] / name).read_bytes(), name


def test_a_trained_run_comes_back(runs: dict[str, Path], tmp_path: Path) -> None:
    """The run's positional table has another layout than Marian's, so the folder holds its values."""
    export_hf(runs["post"], tmp_path / "hf")
    import_marian(tmp_path / "hf", tmp_path / "back")
    trained, back = load_trained(runs["post"]), load_trained(tmp_path / "back")
    assert back.generation == TRAINED_SEARCH
    assert tokens(back, TRAINED_SEARCH) == tokens(trained, TRAINED_SEARCH)


@pytest.mark.cover("values")
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", ["imported", "post", "untied", "pre", "rms", "pre rms"])
def test_ctranslate2_says_the_same(name: str, beam: int, runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    export_ctranslate2(runs[name], tmp_path / "ct2")
    trained = load_trained(runs[name])
    found = by_ctranslate2(tmp_path / "ct2", beam)
    ours = [trained.tokenizer.pieces(ids) for ids in tokens(trained, as_ctranslate2(trained, beam))]
    assert ours == [one.hypotheses[0] for one in found] and any(ours)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_scores_of_ctranslate2(
    eps: float, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another epsilon, too, which CTranslate2's own converter leaves out for some models."""
    pytest.importorskip("ctranslate2")
    trained = load_trained(runs["imported"])
    for part in trained.model.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = eps
    monkeypatch.setattr("transformer_fast.translation.checkpoints.export.load_trained", lambda run, which: trained)
    export_ctranslate2(runs["imported"], tmp_path / "ct2")
    ours = [found[0].score for found in hypotheses(trained, as_ctranslate2(trained, 4))]
    theirs = [one.scores[0] for one in by_ctranslate2(tmp_path / "ct2", 4, return_scores=True)]
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_quantized(runs: dict[str, Path], tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    export_ctranslate2(runs["imported"], tmp_path / "ct2", quantization="int8")
    export_ctranslate2(runs["imported"], tmp_path / "full")
    assert ctranslate2.contains_model(str(tmp_path / "ct2"))
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("ct2", "full")]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("pre", "hf", "cannot be a Marian model: its layers are pre-norm (norm_first), and Marian's are post-norm"),
        ("std", "hf", "its norm is 'std', and Marian's is LayerNorm"),
        ("rms", "hf", "cannot be a Marian model: its norm is 'rms', and Marian's is LayerNorm"),
        ("lower", "hf", "it was trained on lower-cased text, and MarianTokenizer cannot lower-case"),
        ("std", "ctranslate2", "cannot run in CTranslate2: its norm is 'std', neither LayerNorm nor RMSNorm"),
    ],
)
def test_what_cannot_be_said_is_named(
    name: str, to: str, said: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    assert cli.main(["export", "--run", str(runs[name]), "--to", to, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["hf", "ctranslate2"])
def test_the_command_and_a_folder_that_is_there(
    to: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    flags = ["export", "--model", str(runs["post"]), "--to", to, "--out", str(tmp_path / "out")]
    assert cli.main(flags) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "source.spm", "target.spm"} < names and not any(name.startswith(".") for name in names)
    assert cli.main(flags) == 2
    assert "out is there already; nothing was written" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_quantization_is_for_ctranslate2(runs: dict[str, Path], tmp_path: Path, command: Callable) -> None:
    flags = ["--model", runs["post"], "--to", "hf", "--quantization", "int8", "--out", tmp_path / "o"]
    code, _, err = command("export", *flags)
    assert code == 2 and "--quantization is for --to ctranslate2" in err


def test_without_ctranslate2(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ctranslate2", "ctranslate2.specs"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "transformer_fast.translation.checkpoints.ctranslate2_spec", raising=False)
    flags = ["export", "--model", str(runs["post"]), "--to", "ctranslate2", "--out", str(tmp_path / "out")]
    assert cli.main(flags) == 1
    assert "this command needs ctranslate2; run: pip install 'transformer_fast[ctranslate2]'" in capsys.readouterr().err
