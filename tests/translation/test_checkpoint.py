"""Checkpoints are complete or absent, and verified; each part of a run's state."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_training import Messages, checkpointed_config, files_of, outcome

from transformer_fast.translation import CheckpointError, RunFolder, checkpoint, load_trained, train
from transformer_fast.translation.progress import Silent

# The parts of the state, one at a time


def test_a_checkpoint_of_a_gpu_goes_on_on_a_cpu(corpus: dict[str, str], run_copy: Path, never_stopped: Path) -> None:
    """The GPU's random state and loss scale are ignored on a CPU; nothing else differs."""
    folder = RunFolder(run_copy)
    loaded = folder.load(6)
    loaded.tensors["optimizer"]["rng:cuda"] = torch.zeros(16, dtype=torch.uint8)
    state = {key: value for key, value in loaded.state.items() if key not in ("format", "step", "files")}
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    shutil.rmtree(folder.path(6))
    folder.save(6, loaded.tensors, {**state, "scaler": {**scaler, "_growth_tracker": 3}})
    train(checkpointed_config(corpus, run_copy), Silent())
    assert outcome(run_copy)[:3] == outcome(never_stopped)[:3]


def test_resuming_a_finished_run_changes_nothing(corpus: dict[str, str], run_copy: Path) -> None:
    before = files_of(run_copy)
    result = train(checkpointed_config(corpus, run_copy, max_steps=6), Silent())
    assert (result.step, result.stopped) == (6, "max_steps")
    assert files_of(run_copy) == before


def test_left_overs_of_a_killed_writer_are_swept_up(corpus: dict[str, str], run_copy: Path) -> None:
    (run_copy / ".tmp-step-00000009").mkdir()
    (run_copy / ".tmp-step-00000009" / "model.safetensors").write_bytes(b"half")
    (run_copy / ".tmp-config.json").write_bytes(b"half")
    train(checkpointed_config(corpus, run_copy, max_steps=7), Silent())
    assert not list(run_copy.glob(".tmp*"))


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    rename = os.rename
    monkeypatch.setattr(checkpoint, "flush_folder", lambda folder: done.append(f"flush {folder.name}"))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    RunFolder(tmp_path).save(3, {"model": {"w": torch.ones(2)}}, {})
    assert done == ["flush .tmp-step-00000003", "rename", f"flush {tmp_path.name}"]


def test_no_pickle_anywhere(finished: Path) -> None:
    suffixes = {path.suffix for path in finished.rglob("*") if path.is_file() and path.name != ".lock"}
    assert suffixes == {".json", ".jsonl", ".model", ".safetensors"}


def test_best_and_last_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 8):
        folder.save(step, {"model": {"w": torch.full((2,), float(step))}}, {"best_step": 2})
        folder.prune(keep_last=3, others={2})
    assert folder.steps() == [2, 5, 6, 7]
    assert folder.best_step() == 2
    assert folder.load(2, groups=("model",)).tensors["model"]["w"].tolist() == [2.0, 2.0]


def test_a_run_folder_is_all_that_translating_needs(finished: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(finished, tmp_path / "elsewhere"))
    trained = load_trained(moved)
    assert trained.step in (3, 6)
    assert not trained.model.training
    assert set(trained.scores) == {"valid_loss", "bleu"}
    newest = load_trained(moved, which="last")
    assert newest.step == 6
    assert newest.model.out.weight is newest.model.encoder.embed.lut.weight
    with pytest.raises(ValueError, match="expected 'best', 'last' or 'average'"):
        load_trained(moved, which="first")


# Damaged, foreign, changed


def flip(path: Path, place: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (
        lambda run: flip(run / "step-00000006/model.safetensors"),
        r"model.safetensors is damaged: its SHA",
    ),
    "cut file": (
        lambda run: os.truncate(run / "step-00000006/optimizer.safetensors", 1000),
        r"optimizer.safetensors is damaged: it has 1,000 bytes, expected",
    ),
    "lost file": (lambda run: (run / "step-00000006/model.safetensors").unlink(), "model.safetensors is damaged"),
    "foreign state": (
        lambda run: rewrite(run / "step-00000006/state.json", epoch=None, window=None),
        "state.json is not of a training run: ",
    ),
    "lost state": (lambda run: (run / "step-00000006/state.json").unlink(), "state.json is missing"),
    "broken state": (lambda run: flip(run / "step-00000006/state.json", 0), "state.json is damaged"),
    "future format": (lambda run: rewrite(run / "config.json", format=99), "format is 99, expected 1"),
    "lost config": (lambda run: (run / "config.json").unlink(), "not a complete run"),
    "foreign config": (lambda run: (run / "config.json").write_text('{"model_type": "marian"}'), "format is None"),
    "foreign settings": (lambda run: rewrite(run / "config.json", config={"layers": 2}), "does not hold the settings"),
    "lost tokenizer": (lambda run: (run / "tokenizer.model").unlink(), "cannot read .*tokenizer.model"),
    "altered tokenizer": (lambda run: flip(run / "tokenizer.model"), "tokenizer.model is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_run_gives_one_clear_error_and_keeps_the_rest(
    corpus: dict[str, str], run_copy: Path, case: str
) -> None:
    damage, message = DAMAGE[case]
    damage(run_copy)
    before = files_of(run_copy)
    with pytest.raises(CheckpointError, match=message):
        train(checkpointed_config(corpus, run_copy), Silent())
    assert files_of(run_copy) == before


def test_a_damaged_moving_average_is_named(corpus: dict[str, str], tmp_path: Path) -> None:
    train(checkpointed_config(corpus, tmp_path, max_steps=3, ema=0.9), Silent())
    flip(tmp_path / "step-00000003/ema.safetensors")
    for use in (
        lambda: train(checkpointed_config(corpus, tmp_path, max_steps=6, ema=0.9), Silent()),
        lambda: load_trained(tmp_path),
    ):
        with pytest.raises(CheckpointError, match=r"ema.safetensors is damaged: its SHA"):
            use()


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: flip(step / "model.safetensors"),
        lambda step: flip(step / "state.json", 0),
        lambda step: (step / "state.json").unlink(),
        lambda step: rewrite(step / "state.json", epoch=None),
        lambda step: rewrite(step / "state.json", position=10**9),
    ],
    ids=["weights", "state", "no state", "foreign state", "no such batch"],
)
def test_damage_names_the_checkpoint_to_go_on_from(
    corpus: dict[str, str], run_copy: Path, damage: Callable[[Path], object]
) -> None:
    damage(run_copy / "step-00000006")
    with pytest.raises(CheckpointError, match=r"Delete .*step-00000006 to go on from .*step-00000003"):
        train(checkpointed_config(corpus, run_copy), Silent())
    shutil.rmtree(run_copy / "step-00000006")
    assert train(checkpointed_config(corpus, run_copy, max_steps=6), Silent()).step == 6


def test_runs_that_cannot_be_loaded(run_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a complete transformer_fast run"):
        load_trained(tmp_path)
    saved = json.loads((run_copy / "config.json").read_text())["config"]
    rewrite(run_copy / "config.json", config={**saved, "d_ff": 64})
    with pytest.raises(CheckpointError, match=r"of another model: .* shape \(32,\) in the checkpoint, shape \(64,\)"):
        load_trained(run_copy)
    for step in (3, 6):
        shutil.rmtree(run_copy / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_trained(run_copy)


def test_other_settings_or_text_cannot_resume(corpus: dict[str, str], run_copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.en"
    other.write_text(Path(corpus["source"]).read_text().replace("seven", "zeven"))
    for changes, message in (
        (
            {"dropout": 0.3, "layers": 2},
            r"other settings: layers is 2, the run has 1; dropout is 0.3, the run has 0.1",
        ),
        ({"source": str(other)}, "the train text differs from the one it began with"),
        ({"resume": False}, "already holds a run; resume it or choose another folder"),
    ):
        before = files_of(run_copy)
        with pytest.raises(CheckpointError, match=message):
            train(checkpointed_config(corpus, run_copy, **changes), Silent())
        assert files_of(run_copy) == before


def test_two_trainings_do_not_share_a_folder(corpus: dict[str, str], run_copy: Path) -> None:
    with (
        RunFolder(run_copy).writing(),
        pytest.raises(CheckpointError, match="another process is training in"),
    ):
        train(checkpointed_config(corpus, run_copy), Silent())
    assert train(checkpointed_config(corpus, run_copy, max_steps=7), Silent()).step == 7


NO_LOCKS = "ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL", "EIO"


@pytest.mark.parametrize("name", [*NO_LOCKS, "EWOULDBLOCK", "EAGAIN", "EACCES"])
def test_a_file_system_without_locks(
    name: str, corpus: dict[str, str], run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    monkeypatch.setattr(fcntl, "flock", refused)
    progress, config = Messages(), checkpointed_config(corpus, run_copy, max_steps=7)
    if name in NO_LOCKS:
        assert train(config, progress).step == 7
        assert [text for text in progress.texts if "locked" in text] == [
            f"{run_copy} cannot be locked ({os.strerror(getattr(errno, name))}): "
            "nothing stops a second training in this folder"
        ]
        with pytest.warns(UserWarning, match="cannot be locked"), RunFolder(run_copy).writing():
            pass
    else:
        with pytest.raises(CheckpointError, match="another process is training in"):
            train(config, progress)
