"""Unreadable files, and runs that cannot be continued: one clear error, and no saved data is lost."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from transformer_fast.translation.config import TrainConfig, parse_duration
from transformer_fast.translation.errors import TranslationError
from transformer_fast.translation.model import load_trained
from transformer_fast.translation.progress import Silent
from transformer_fast.translation.text import read_lines, read_parallel
from transformer_fast.translation.training import train


def file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def settings(folder: Path, **changes) -> TrainConfig:
    text = "".join(f"line {n} of some words\n" for n in range(40)).encode()
    sizes = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 16, "vocab_size": 40, "max_steps": 1, "device": "cpu"}
    paths = {"source": file(folder, "train.src", text), "target": file(folder, "train.trg", text)}
    paths["save"] = folder / "run"
    return TrainConfig(**({name: str(path) for name, path in paths.items()} | sizes | changes))


def trained(folder: Path, **changes) -> Path:
    """Return the folder of a run that was trained without messages."""
    train(settings(folder, **changes), progress=Silent())
    return folder / "run"


def with_broken_weights(folder: Path) -> None:
    """Train, cut every weight file of the run in half, and load."""
    for path in trained(folder).rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    load_trained(folder / "run")


def with_a_foreign_config(folder: Path) -> None:
    """Train, replace every json of the run by another one, and load."""
    for path in trained(folder).rglob("*.json"):
        path.write_text(json.dumps({"architectures": ["SomethingElse"]}))
    load_trained(folder / "run")


FILES = {
    "nowhere.txt does not exist": lambda f: read_lines(f / "nowhere.txt"),
    "is a folder": lambda f: read_lines(f),
    "a is empty; expected one sentence per line": lambda f: read_lines(file(f, "a", b"")),
    "a is empty": lambda f: read_lines(file(f, "a", b"\n\n")),
    "line 2: not valid UTF-8": lambda f: read_lines(file(f, "a", b"fine\nna\xefve\n")),
    "damaged or truncated gzip": lambda f: read_lines(file(f, "a.gz", gzip.compress(b"x" * 99)[:20])),
    "not a gzip file": lambda f: read_lines(file(f, "a.gz", b"plain\n")),
    "has 3 lines.*has 2": lambda f: read_parallel(file(f, "a", b"1\n2\n3\n"), file(f, "b", b"1\n2\n")),
    "'soon' as a duration; expected.*20m": lambda f: parse_duration("soon"),
    "d_model is 16; expected a multiple of heads": lambda f: settings(f, heads=3),
    "valid_target is missing": lambda f: settings(f, valid_source="x"),
    "dropout is 1.0; expected a probability": lambda f: settings(f, dropout=1.0),
    "run": lambda f: load_trained(f / "run"),
    "safetensors|checkpoint": with_broken_weights,
    "json|config|checkpoint": with_a_foreign_config,
    "occupied": lambda f: trained(f, save=str(file(f, "occupied", b"not a folder"))),
}


@pytest.mark.parametrize("says", FILES)
def test_files_and_runs(says, tmp_path):
    with pytest.raises(TranslationError, match=f"(?s){says}"):
        FILES[says](tmp_path)


def test_a_run_of_another_size_is_refused_and_its_last_checkpoint_stays(tmp_path):
    run = trained(tmp_path)
    copy = shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(TranslationError, match="d_ff is 32, the run has 16"):
        trained(tmp_path, d_ff=32)
    before, after = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (copy, run)
    )
    assert before == after
