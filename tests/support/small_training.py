"""Helpers of the tests of training and translating: texts of spelled-out numbers, configs of models that train in a
second, finished runs, the command line in this process, and a full disk.

Runs that several tests read are trained once per process; a test that changes one copies it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from transformer_fast import cli
from transformer_fast.translation import (
    RunFolder,
    TrainConfig,
    Trained,
    build_model,
    checkpoint,
    load_trained,
    train,
    training,
)
from transformer_fast.translation.numbers import make_numbers_corpus, numbers_config
from transformer_fast.translation.progress import Silent

TINY = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "batch_tokens": 1024, "max_steps": 20, "warmup": 5}
TINY |= {"vocab_size": 60, "valid_every": 1000}


class Messages(Silent):
    """Progress that records messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


# Texts and runs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return config options of training and validation texts, source and target."""
    paths = make_numbers_corpus(tmp_path_factory.mktemp("corpus"), train_size=150, held_out=8)
    names = {"train_source": "source", "train_target": "target", "test_source": "valid_source"}
    return {names.get(name, "valid_target"): str(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def finished(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints 3 and 6; copy it before changing it."""
    save = tmp_path_factory.mktemp("finished") / "run"
    train(checkpointed_config(corpus, save, max_steps=6), Silent())
    return save


@pytest.fixture(scope="session")
def never_stopped(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps without an interruption."""
    save = tmp_path_factory.mktemp("never_stopped") / "run"
    train(checkpointed_config(corpus, save), Silent())
    return save


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with data/ (a text) and with one/ and two/, runs on it with different seeds, trained enough to answer."""
    root = tmp_path_factory.mktemp("numbers")
    make_numbers_corpus(root / "data", train_size=800, held_out=20)
    for seed, name in enumerate(("one", "two")):
        train(numbers_config(root / "data", root / name, seed=seed, **TINY), Silent())
    return root


@pytest.fixture(scope="session")
def trained(numbers: Path) -> Trained:
    return load_trained(numbers / "one")


def small_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """Return the config of a small model on the corpus, on the CPU, with the caller's changes."""
    small = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "vocab_size": 60, "batch_tokens": 400}
    run = {"save": str(save), "device": "cpu", "max_length": 100, "warmup": 4}
    return TrainConfig(**{**corpus, **small, **run, **changes})


def short_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """Return the config of a run of six updates without validation and with one checkpoint."""
    run = {"max_steps": 6, "valid_every": 100, "bleu_sentences": 0}
    return small_config(corpus, save, **run | changes)


def checkpointed_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """Return the config of a run with checkpoints 3, 6, 9 and 12, which keeps the last two and the best."""
    run = {"max_steps": 12, "valid_every": 3, "bleu_sentences": 2, "keep_last": 2}
    return small_config(corpus, save, **run | changes)


def fresh_run(config: TrainConfig) -> training._Run:
    """Return a run before its first update."""
    folder = RunFolder(config.save)
    with folder.writing():
        return training._Run(config, folder, Silent(), build_model, lambda: 0.0)


# Files that a run leaves behind


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log."""
    return [json.loads(line) for line in RunFolder(folder).log.read_text().splitlines()]


def weights_of(folder: Path, step: int = 6) -> bytes:
    """Return the file with the weights of a checkpoint."""
    return RunFolder(folder).path(step).joinpath("model.safetensors").read_bytes()


def files_of(folder: Path) -> dict[Path, bytes]:
    """Return every file under a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(folder: Path) -> tuple:
    """Return everything that a run writes and that a kill must not change: all but times."""
    run = RunFolder(folder)
    last = run.steps()[-1]
    state, log = json.loads((run.path(last) / "state.json").read_text()), log_of(folder)
    for timed in (state, state.get("between") or {}, *log):
        for name in ("seconds", "tokens_per_second", "log_bytes"):
            timed.pop(name, None)
    weights = tuple(path.read_bytes() for path in sorted(run.path(last).glob("*.safetensors")))
    if run.average.exists():
        weights += (run.average.read_bytes(),)
    hidden = sorted(path.name for path in run.root.iterdir() if path.name.startswith(".tmp"))
    return weights, state, log, run.steps(), hidden


@contextlib.contextmanager
def full_disk(name: str = "") -> Iterator[None]:
    """Let writes fail with a full disk, after a part of the data, to files whose name ends in `name`."""
    written = checkpoint._write_flushed

    def write(path: Path, data: bytes) -> None:
        if not path.name.endswith(name):
            written(path, data)
            return
        written(path, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(checkpoint, "_write_flushed", write):
        yield


# The command line


def flags_of(options: dict[str, object]) -> list[str]:
    """Return the options of a config as flags of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Callable[..., tuple[int, list[str], str]]:
    """Run a command in this process: exit code, lines on standard output, text on standard error."""

    def run(*arguments: object, data: bytes = b"") -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsysbinary.readouterr()
        return code, out.decode().split("\n")[:-1], err.decode()

    return run
