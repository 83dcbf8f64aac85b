"""What tests of training share: a text of spelled-out numbers, and the config of a model that trains in a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from transformer_fast.translation import RunFolder, TrainConfig, build_model, train, training
from transformer_fast.translation.numbers import make_numbers_corpus
from transformer_fast.translation.progress import Silent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a config: training and validation text, source and target."""
    paths = make_numbers_corpus(tmp_path_factory.mktemp("corpus"), train_size=150, held_out=8)
    names = {"train_source": "source", "train_target": "target", "test_source": "valid_source"}
    return {names.get(name, "valid_target"): str(path) for name, path in paths.items()}


def small_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """A small model on the corpus, on the CPU, with what the caller changes."""
    small = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "vocab_size": 60, "batch_tokens": 400}
    run = {"save": str(save), "device": "cpu", "max_length": 100, "warmup": 4}
    return TrainConfig(**{**corpus, **small, **run, **changes})


def short_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """That of a run of six updates that validates nothing and writes one checkpoint."""
    run = {"max_steps": 6, "valid_every": 100, "bleu_sentences": 0}
    return small_config(corpus, save, **run | changes)


def fresh_run(config: TrainConfig) -> training._Run:
    """A run that has made no update yet."""
    folder = RunFolder(config.save)
    with folder.writing():
        return training._Run(config, folder, Silent(), build_model, lambda: 0.0)


def checkpointed_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """That of a run with checkpoints 3, 6, 9 and 12, of which it keeps the last two and the best."""
    run = {"max_steps": 12, "valid_every": 3, "bleu_sentences": 2, "keep_last": 2}
    return small_config(corpus, save, **run | changes)


def outcome(folder: Path) -> tuple:
    """All that a run leaves behind and that must not depend on whether it was killed: everything but times."""
    run = RunFolder(folder)
    last = run.steps()[-1]
    state = json.loads((run.path(last) / "state.json").read_text())
    log = [json.loads(line) for line in run.log.read_text().splitlines()]
    for timed in (state, *log):
        for name in ("seconds", "tokens_per_second", "log_bytes"):
            timed.pop(name, None)
    weights = tuple(path.read_bytes() for path in sorted(run.path(last).glob("*.safetensors")))
    if run.average.exists():
        weights += (run.average.read_bytes(),)
    hidden = sorted(path.name for path in run.root.iterdir() if path.name.startswith(".tmp"))
    return weights, state, log, run.steps(), hidden


@pytest.fixture(scope="module")
def finished(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints 3 and 6; copy it before changing it."""
    save = tmp_path_factory.mktemp("finished") / "run"
    train(checkpointed_config(corpus, save, max_steps=6), Silent())
    return save


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
