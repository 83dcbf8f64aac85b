"""What tests of training share: a text of spelled-out numbers, and the config of a model that trains in a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:  # every test loads this file, and only those of training need what translation imports
    from transformer_fast.translation import TrainConfig


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where another process wants the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a config: training and validation text, source and target."""
    from transformer_fast.translation.numbers import make_numbers_corpus

    paths = make_numbers_corpus(tmp_path_factory.mktemp("corpus"), train_size=150, held_out=8)
    names = {"train_source": "source", "train_target": "target", "test_source": "valid_source"}
    return {names.get(name, "valid_target"): str(path) for name, path in paths.items()}


def small_config(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    """A small model on the corpus, on the CPU, with what the caller changes."""
    from transformer_fast.translation import TrainConfig

    small = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "vocab_size": 60, "batch_tokens": 400}
    run = {"save": str(save), "device": "cpu", "max_length": 100, "warmup": 4}
    return TrainConfig(**{**corpus, **small, **run, **changes})
