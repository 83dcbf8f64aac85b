"""A full disk or an unwritable folder gives one message, and the last good checkpoint stays unchanged."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from small_training import checkpointed_config, full_disk

from transformer_fast.translation import CheckpointError, RunFolder, load_average, load_trained, save_average, train
from transformer_fast.translation.progress import Silent


def test_disk_full_keeps_the_last_good_checkpoint(corpus: dict[str, str], run_copy: Path) -> None:
    good = (run_copy / "step-00000006/model.safetensors").read_bytes()
    with full_disk(), pytest.raises(CheckpointError, match=r"step 9 .*No space left on device.*step-00000006"):
        train(checkpointed_config(corpus, run_copy), Silent())
    assert not list(run_copy.glob(".tmp*"))
    assert (run_copy / "step-00000006/model.safetensors").read_bytes() == good
    assert train(checkpointed_config(corpus, run_copy), Silent()).step == 12


def test_disk_full_before_the_first_checkpoint_leaves_no_run(corpus: dict[str, str], tmp_path: Path) -> None:
    says = r"cannot write to the folder .*run: No space left on device"
    with full_disk(), pytest.raises(CheckpointError, match=says):
        train(checkpointed_config(corpus, tmp_path / "run"), Silent())
    assert not RunFolder(tmp_path / "run").exists() and not list((tmp_path / "run").glob(".tmp*"))
    assert train(checkpointed_config(corpus, tmp_path / "run", max_steps=3), Silent()).step == 3


def test_disk_full_in_the_moving_average_and_in_the_mean(corpus: dict[str, str], tmp_path: Path) -> None:
    options = {"ema": 0.9, "average_last": 2}
    train(checkpointed_config(corpus, tmp_path, max_steps=3, **options), Silent())
    mean = RunFolder(tmp_path).average.read_bytes()
    for name, says, left in (
        ("ema.safetensors", r"step 6 .*No space left on device.*step-00000003", [3]),
        ("average.safetensors", r"average\.safetensors: No space left.*checkpoints are untouched", [3, 6]),
    ):
        with full_disk(name), pytest.raises(CheckpointError, match=says):
            train(checkpointed_config(corpus, tmp_path, max_steps=6, **options), Silent())
        assert RunFolder(tmp_path).steps() == left and not list(tmp_path.glob(".tmp*"))
        assert RunFolder(tmp_path).average.read_bytes() == mean
        assert load_trained(tmp_path, which="last").step == left[-1]
    train(checkpointed_config(corpus, tmp_path, max_steps=6, **options), Silent())
    average = load_average(RunFolder(tmp_path))
    assert average.steps == [3, 6]
    says = r"cannot write .*average\.safetensors: No space left on device"
    with full_disk(), pytest.raises(CheckpointError, match=says):
        save_average(RunFolder(tmp_path), average)
    assert load_average(RunFolder(tmp_path)).steps == [3, 6] and not list(tmp_path.glob(".tmp-*"))


def test_a_real_write_error(corpus: dict[str, str], run_copy: Path) -> None:
    """The kernel limits files to 20 kB: a checkpoint does not fit, the log does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 9 .*File too large"):
            train(checkpointed_config(corpus, run_copy), Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert RunFolder(run_copy).steps() == [3, 6]
    assert load_trained(run_copy, which="last").step == 6


def test_unwritable_folder(corpus: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write to the folder .*file/run: Not a directory"):
        train(checkpointed_config(corpus, tmp_path / "file" / "run"), Silent())


def test_a_folder_that_nobody_may_write_to(corpus: dict[str, str]) -> None:
    """A folder of the kernel, which refuses even root."""
    with pytest.raises(CheckpointError, match=r"cannot write to the folder /sys/run: \w+"):
        train(checkpointed_config(corpus, Path("/sys/run")), Silent())
