"""Checkpoints: whole or absent, verified, and a killed run continues bit for bit."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_training import small_config

from transformer_fast.translation import (
    CheckpointError,
    RunFolder,
    TrainConfig,
    checkpoint,
    load_average,
    load_trained,
    train,
)
from transformer_fast.translation.progress import Silent

TRAINER = Path(__file__).with_name("killed_training.py")


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
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


# Killed at any moment


class Killer:
    """Runs `killed_training.py`: trains with each of `kills` in turn, then to the end."""

    def __init__(self, corpus: dict[str, str], folder: Path, threads: int):
        self.corpus, self.folder, self.jobs = corpus, folder, 0
        # Passive: on a busy machine, threads that spin while they wait for each other take minutes for this.
        environment = {**os.environ, "PYTHONPATH": str(TRAINER.parents[1]), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(TRAINER), str(threads)]
        self.errors = open(folder / "errors", "w+")  # noqa: SIM115 - lives as long as the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n", self.said()

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-3000:]

    def __call__(self, kills: list[str], **changes: object) -> Path:
        self.jobs += 1
        save = self.folder / f"run{self.jobs}"
        job = {"config": settings(self.corpus, save, **changes).to_dict(), "kills": kills}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer == "ok\n", f"{answer}{self.said()}"
        return save

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def killer(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    killer = Killer(corpus, tmp_path_factory.mktemp("killed"), threads=1)
    yield killer
    killer.close()


@pytest.fixture(scope="module")
def never_stopped(killer: Killer) -> tuple:
    return outcome(killer([]))


# Disk events of a part, counted from 0: a new run has 4 (tokenizer.model and config.json, each written and renamed);
# then each of the checkpoints 3, 6, 9 and 12 has 4 (three files, one rename), and those of 9 and 12 delete an old one
# (a rename, a deletion). A part that finds the left-overs of a killed one deletes them first. "half" tears the file
# or the folder of the event, "before" and "after" die around it.
IN_THE_WRITER = [
    ["before:0", "half:2", "after:2"],  # no config.json yet
    ["after:3"],  # and just now
    ["half:4", "before:3", "after:4"],  # the first checkpoint
    ["half:5", "half:0", "before:5"],
    ["half:6", "after:1", "before:4"],
    ["after:7", "before:7"],
    ["before:11", "half:6"],
    ["half:13", "before:8"],
    ["before:16", "half:5"],  # an old one is deleted
    ["half:17", "before:3", "after:5"],
    ["after:22", "half:0"],
]


@pytest.mark.parametrize("kills", IN_THE_WRITER, ids=",".join)
def test_killed_in_the_checkpoint_writer(killer: Killer, never_stopped: tuple, kills: list[str]) -> None:
    assert outcome(killer(kills)) == never_stopped


@pytest.mark.parametrize("delays", [["time:0.1", "time:0.4", "time:0.7"], ["time:0.25", "time:0.55", "time:1.0"]])
def test_killed_at_any_time(killer: Killer, never_stopped: tuple, delays: list[str]) -> None:
    assert outcome(killer(delays)) == never_stopped


def test_killed_with_two_threads_and_accumulation(corpus: dict[str, str], tmp_path: Path) -> None:
    killer = Killer(corpus, tmp_path, threads=2)
    options = {"accumulate": 2, "max_steps": 6, "keep_last": 3}
    whole = outcome(killer([], **options))
    assert outcome(killer(["before:10", "time:0.3"], **options)) == whole
    killer.close()


def test_killed_with_a_moving_average_and_the_mean_of_epochs(killer: Killer) -> None:
    """A checkpoint is then four files, at the end of an epoch; the last one written is the mean of two."""
    options = {"ema": 0.9, "average_last": 2, "valid_every": 0, "max_steps": 26, "keep_last": 1}
    whole = outcome(killer([], **options))
    assert len(whole[0]) == 4 and len(whole[3]) >= 3
    for kills in (["half:7", "before:6", "after:9"], ["after:3", "before:16"], ["half:2", "time:0.5"]):
        assert outcome(killer(kills, **options)) == whole, kills


def test_the_outcome_can_differ(killer: Killer, never_stopped: tuple) -> None:
    """The comparison above sees the seed, so it would see a lost random number state."""
    other = outcome(killer([], seed=1))
    assert all(left != right for left, right in zip(other[0], never_stopped[0], strict=True))


# The parts of the state, one at a time


@pytest.fixture(scope="module")
def finished(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints 3 and 6; copy it before changing it."""
    save = tmp_path_factory.mktemp("finished") / "run"
    train(settings(corpus, save, max_steps=6), Silent())
    return save


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_resumed_in_the_same_process_equals_never_stopped(
    corpus: dict[str, str], tmp_path: Path, run_copy: Path, never_stopped: tuple
) -> None:
    torch.randn(1000)  # whatever happened to the generators in between
    train(settings(corpus, run_copy), Silent())
    whole = tmp_path / "whole"
    train(settings(corpus, whole), Silent())
    assert outcome(run_copy)[0] == outcome(whole)[0]


def test_a_checkpoint_of_a_gpu_goes_on_on_a_cpu(corpus: dict[str, str], tmp_path: Path, run_copy: Path) -> None:
    """It holds the GPU's random state and perhaps a loss scale; neither means anything here, nothing else differs."""
    folder, whole = RunFolder(run_copy), tmp_path / "whole"
    loaded = folder.load(6)
    loaded.tensors["optimizer"]["rng:cuda"] = torch.zeros(16, dtype=torch.uint8)
    state = {key: value for key, value in loaded.state.items() if key not in ("format", "step", "files")}
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    shutil.rmtree(folder.path(6))
    folder.save(6, loaded.tensors, {**state, "scaler": {**scaler, "_growth_tracker": 3}})
    train(settings(corpus, run_copy), Silent())
    train(settings(corpus, whole), Silent())
    assert outcome(run_copy)[:3] == outcome(whole)[:3]


def test_resuming_a_finished_run_changes_nothing(corpus: dict[str, str], run_copy: Path) -> None:
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    result = train(settings(corpus, run_copy, max_steps=6), Silent())
    assert (result.step, result.stopped) == (6, "max_steps")
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


def test_left_overs_of_a_killed_writer_are_swept_up(corpus: dict[str, str], run_copy: Path) -> None:
    (run_copy / ".tmp-step-00000009").mkdir()
    (run_copy / ".tmp-step-00000009" / "model.safetensors").write_bytes(b"half")
    (run_copy / ".tmp-config.json").write_bytes(b"half")
    train(settings(corpus, run_copy, max_steps=7), Silent())
    assert not list(run_copy.glob(".tmp*"))


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
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message):
        train(settings(corpus, run_copy), Silent())
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


def test_damage_names_the_checkpoint_to_go_on_from(corpus: dict[str, str], run_copy: Path) -> None:
    flip(run_copy / "step-00000006/model.safetensors")
    with pytest.raises(CheckpointError, match=r"Delete .*step-00000006 to go on from .*step-00000003"):
        train(settings(corpus, run_copy), Silent())
    shutil.rmtree(run_copy / "step-00000006")
    assert train(settings(corpus, run_copy, max_steps=6), Silent()).step == 6


def test_checkpoint_of_another_shape(corpus: dict[str, str], run_copy: Path) -> None:
    saved = json.loads((run_copy / "config.json").read_text())["config"]
    rewrite(run_copy / "config.json", config={**saved, "d_ff": 64})
    with pytest.raises(CheckpointError, match=r"of another model: .* shape \(32,\) in the checkpoint, shape \(64,\)"):
        load_trained(run_copy)


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a complete transformer_fast run"):
        load_trained(tmp_path)


def test_run_without_a_checkpoint(run_copy: Path) -> None:
    for step in (3, 6):
        shutil.rmtree(run_copy / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_trained(run_copy)


def test_other_settings_cannot_resume(corpus: dict[str, str], run_copy: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"other settings: layers is 2, the run has 1; dropout is 0.3, the run has 0.1"
    ):
        train(settings(corpus, run_copy, dropout=0.3, layers=2), Silent())


def test_other_text_cannot_resume(corpus: dict[str, str], run_copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.en"
    other.write_text(Path(corpus["source"]).read_text().replace("seven", "zeven"))
    with pytest.raises(CheckpointError, match="the train text is not the one it began with"):
        train(settings({**corpus, "source": str(other)}, run_copy), Silent())


def test_no_resume_leaves_a_run_alone(corpus: dict[str, str], run_copy: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a run; resume it or choose another folder"):
        train(settings(corpus, run_copy, resume=False), Silent())


def test_two_trainings_do_not_share_a_folder(corpus: dict[str, str], run_copy: Path) -> None:
    with (
        RunFolder(run_copy).writing(),
        pytest.raises(CheckpointError, match="another process is training in"),
    ):
        train(settings(corpus, run_copy), Silent())
    assert train(settings(corpus, run_copy, max_steps=7), Silent()).step == 7


# A disk that fails


def test_disk_full_keeps_the_last_good_checkpoint(
    corpus: dict[str, str], run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (run_copy / "step-00000006/model.safetensors").read_bytes()
    written = checkpoint._write_flushed

    def full(path: Path, data: bytes) -> None:
        written(path, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_flushed", full)
        with pytest.raises(CheckpointError, match=r"step 9 .*No space left on device.*step-00000006"):
            train(settings(corpus, run_copy), Silent())
    assert not list(run_copy.glob(".tmp*"))
    assert (run_copy / "step-00000006/model.safetensors").read_bytes() == good
    assert train(settings(corpus, run_copy), Silent()).step == 12


def test_disk_full_before_the_first_checkpoint_leaves_no_run(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_flushed", full)
        with pytest.raises(CheckpointError, match=r"cannot write to the folder .*run: No space left on device"):
            train(settings(corpus, tmp_path / "run"), Silent())
    assert not RunFolder(tmp_path / "run").exists() and not list((tmp_path / "run").glob(".tmp*"))
    assert train(settings(corpus, tmp_path / "run", max_steps=3), Silent()).step == 3


def test_disk_full_in_the_moving_average_and_in_the_mean(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ema": 0.9, "average_last": 2}
    train(settings(corpus, tmp_path, max_steps=3, **options), Silent())
    mean = RunFolder(tmp_path).average.read_bytes()
    written = checkpoint._write_flushed

    def full(name: str) -> Callable[[Path, bytes], None]:
        def write(path: Path, data: bytes) -> None:
            written(path, data[:100])
            if path.name.endswith(name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written(path, data)

        return write

    for name, says, left in (
        ("ema.safetensors", r"step 6 .*No space left on device.*step-00000003", [3]),
        ("average.safetensors", r"average\.safetensors: No space left.*checkpoints are untouched", [3, 6]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_write_flushed", full(name))
            with pytest.raises(CheckpointError, match=says):
                train(settings(corpus, tmp_path, max_steps=6, **options), Silent())
        assert RunFolder(tmp_path).steps() == left and not list(tmp_path.glob(".tmp*"))
        assert RunFolder(tmp_path).average.read_bytes() == mean
        assert load_trained(tmp_path, which="last").step == left[-1]
    train(settings(corpus, tmp_path, max_steps=6, **options), Silent())
    assert load_average(RunFolder(tmp_path)).steps == [3, 6]


def test_a_damaged_moving_average_is_named(corpus: dict[str, str], tmp_path: Path) -> None:
    train(settings(corpus, tmp_path, max_steps=3, ema=0.9), Silent())
    flip(tmp_path / "step-00000003/ema.safetensors")
    for use in (
        lambda: train(settings(corpus, tmp_path, max_steps=6, ema=0.9), Silent()),
        lambda: load_trained(tmp_path),
    ):
        with pytest.raises(CheckpointError, match=r"ema.safetensors is damaged: its SHA"):
            use()


def test_a_real_write_error(corpus: dict[str, str], run_copy: Path) -> None:
    """The kernel refuses to let any file grow past 20 kB: a checkpoint does not fit, the log does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 9 .*File too large"):
            train(settings(corpus, run_copy), Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert RunFolder(run_copy).steps() == [3, 6]
    assert load_trained(run_copy, which="last").step == 6


def test_unwritable_folder(corpus: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write to the folder .*file/run: Not a directory"):
        train(settings(corpus, tmp_path / "file" / "run"), Silent())
