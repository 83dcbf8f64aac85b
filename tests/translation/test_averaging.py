"""Mean of checkpoints, moving average, early stopping, and the logs of a run."""

from __future__ import annotations

import errno
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_training import log_of, small_config

from transformer_fast import cli
from transformer_fast.translation import (
    CheckpointError,
    ConfigError,
    RunFolder,
    TrainConfig,
    average_checkpoints,
    load_average,
    load_trained,
    save_average,
    train,
    validation,
)
from transformer_fast.translation.averaging import steps_to_average
from transformer_fast.translation.optim import MovingAverage
from transformer_fast.translation.progress import Silent


def settings(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    run = {"max_steps": 12, "valid_every": 3, "bleu_sentences": 0, "keep_last": 1}
    return small_config(corpus, save, **run | changes)


# The mean of checkpoints


@pytest.fixture(scope="module")
def averaged(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged") / "run"
    result = train(settings(corpus, folder, average_last=3), Silent())
    assert result.average_scores["valid_loss"] > 0
    return folder


def test_the_average_is_the_mean_of_the_last_checkpoints(averaged: Path) -> None:
    folder, average = RunFolder(averaged), load_average(RunFolder(averaged))
    assert average.steps == [6, 9, 12] and set(average.steps) <= set(folder.steps())
    parts = [folder.load(step).tensors["model"] for step in average.steps]
    for name, tensor in average.tensors.items():
        mean = torch.stack([part[name].double() for part in parts]).mean(0)
        torch.testing.assert_close(tensor, mean.float(), rtol=0, atol=0)
        assert tensor.dtype == parts[0][name].dtype
    assert not torch.equal(average.tensors["out.bias"], parts[-1]["out.bias"])


def test_it_is_served_by_name_and_where_it_is_the_best(averaged: Path) -> None:
    average = load_average(RunFolder(averaged))
    served = load_trained(averaged, which="average")
    torch.testing.assert_close(served.model.out.bias.detach(), average.tensors["out.bias"], rtol=0, atol=0)
    best_loss = min(load_trained(averaged).scores["valid_loss"], average.scores["valid_loss"])
    assert load_trained(averaged).scores["valid_loss"] == best_loss
    for loss, chosen in ((0.0, True), (99.0, False)):
        save_average(RunFolder(averaged), average.__class__(average.tensors, average.steps, {"valid_loss": loss}))
        assert (load_trained(averaged).scores["valid_loss"] == loss) == chosen
    save_average(RunFolder(averaged), average)


def test_epochs_are_what_is_averaged_where_epochs_are_validated(corpus: dict[str, str], tmp_path: Path) -> None:
    result = train(settings(corpus, tmp_path, valid_every=0, max_steps=20, average_last=2), Silent())
    folder = RunFolder(tmp_path)
    ends = [line["step"] for line in log_of(tmp_path) if "valid_loss" in line][:-1]
    assert len(ends) >= 2 and ends[1] - ends[0] == ends[0]  # every epoch has the same number of batches here
    assert load_average(folder).steps == ends[-2:] and result.step == 20 not in ends
    assert [folder.state(step)["epoch_end"] for step in folder.steps()[-3:]] == [True, True, False]


def test_an_epoch_may_end_within_an_update(corpus: dict[str, str], tmp_path: Path) -> None:
    train(settings(corpus, tmp_path / "one", valid_every=0, max_steps=30), Silent())
    train(settings(corpus, tmp_path / "two", valid_every=0, max_steps=15, accumulate=2), Silent())
    ends = [[line["step"] for line in log_of(tmp_path / name) if "valid_loss" in line] for name in ("one", "two")]
    batches = ends[0][0]
    assert batches % 2 and ends[0][:3] == [batches, 2 * batches, 3 * batches]
    assert ends[1][:3] == [-(-epoch * batches // 2) for epoch in (1, 2, 3)]


@pytest.fixture
def averaged_copy(averaged: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(averaged, tmp_path / "copy"))


def test_average_from_the_command_line(averaged_copy: RunFolder, command: Callable) -> None:
    code, out, _ = command("average", "--model", averaged_copy.root, "--last", "2")
    assert code == 0 and "mean of the checkpoints 9, 12" in out[0]
    assert load_average(averaged_copy).steps == [9, 12]
    code, _, err = command("average", "--model", averaged_copy.root / "nothing")
    assert code == 2 and "has no checkpoint" in err
    with pytest.raises(ConfigError, match="last is 0; expected a number of checkpoints >= 1"):
        average_checkpoints(averaged_copy, 0)


@pytest.mark.parametrize("how", ["cut", "altered", "foreign", "empty"])
def test_a_damaged_average_is_named(averaged_copy: RunFolder, tmp_path: Path, how: str) -> None:
    whole = averaged_copy.average.read_bytes()
    damaged = {
        "cut": whole[:-9],
        "altered": whole[:-1] + bytes([whole[-1] ^ 1]),
        "foreign": safetensors.torch.save({"weight": torch.zeros(2)}),
        "empty": b"",
    }[how]
    averaged_copy.average.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"average\.safetensors is damaged: .* Delete it, or average again"):
        load_trained(averaged_copy.root, which="average")
    with pytest.raises(CheckpointError, match=r"has no average\.safetensors; make one: average --model"):
        load_average(RunFolder(tmp_path))


def test_averaging_a_damaged_checkpoint(averaged_copy: RunFolder) -> None:
    path = averaged_copy.path(9) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-00000009.model.safetensors is damaged"):
        average_checkpoints(averaged_copy, 3)
    assert average_checkpoints(averaged_copy, 1).steps == [12]


# The moving average


def test_the_moving_average_is_its_formula() -> None:
    model = torch.nn.Linear(3, 2)
    average = MovingAverage(model, 0.9)
    expected = model.weight.detach().double().clone()
    for step in range(1, 200):
        with torch.no_grad():
            model.weight.normal_()
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    torch.testing.assert_close(average.tensors()["weight"].double(), expected, rtol=0, atol=1e-6)


def test_the_moving_average_is_validated_served_and_resumed(corpus: dict[str, str], tmp_path: Path) -> None:
    whole, parts, without = (tmp_path / name for name in ("whole", "parts", "without"))
    result = train(settings(corpus, whole, ema=0.9), Silent())
    train(settings(corpus, parts, ema=0.9, max_steps=5), Silent())
    train(settings(corpus, parts, ema=0.9), Silent())
    plain = train(settings(corpus, without), Silent())
    ends = [RunFolder(folder).load(12).tensors for folder in (whole, parts, without)]
    for group in ("model", "ema"):
        assert all(torch.equal(tensor, ends[1][group][name]) for name, tensor in ends[0][group].items())
    assert all(torch.equal(tensor, ends[2]["model"][name]) for name, tensor in ends[0]["model"].items())
    assert torch.equal(load_trained(whole, which="last").model.out.bias.detach(), ends[0]["ema"]["out.bias"])
    assert not torch.equal(ends[0]["ema"]["out.bias"], ends[0]["model"]["out.bias"])
    assert result.scores != plain.scores
    average = average_checkpoints(RunFolder(whole), 1)
    assert torch.equal(average.tensors["out.bias"], ends[0]["ema"]["out.bias"])


# Early stopping


def test_it_stops_when_nothing_gets_better(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 3.0, 4.0, 2.0, 2.5, 2.5, 1.0])
    monkeypatch.setattr(validation, "corpus_loss", lambda *args: next(losses))
    result = train(settings(corpus, tmp_path, valid_every=1, patience=2), Silent())
    assert (result.stopped, result.step, result.best_step) == ("patience", 6, 4)
    again = train(settings(corpus, tmp_path, valid_every=1, patience=2), Silent())
    assert (again.stopped, again.step) == ("patience", 6)
    longer = train(settings(corpus, tmp_path, valid_every=1, patience=3, max_steps=7), Silent())
    assert (longer.stopped, longer.best_step) == ("max_steps", 7)


# Logs


class Events:
    """Replacement of torch's SummaryWriter."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        self.flushed = 0
        written.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


written: list[Events] = []
full: list[bool] = []


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Events]:
    written.clear()
    full.clear()
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Events
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written


def test_tensorboard_gets_what_the_log_gets(corpus: dict[str, str], tmp_path: Path, events: list[Events]) -> None:
    train(settings(corpus, tmp_path, tensorboard=True, max_steps=3), Silent())
    train(settings(corpus, tmp_path, tensorboard=True, max_steps=6), Silent())
    assert [(e.folder, e.purge_step, e.closed) for e in events] == [
        (str(tmp_path / "tensorboard"), 1, True),
        (str(tmp_path / "tensorboard"), 4, True),
    ]
    told = [(name, value, step) for e in events for name, value, step in e.scalars]
    for line in log_of(tmp_path):
        assert ("valid/valid_loss", line["valid_loss"], line["step"]) in told
        assert ("train/tokens", line["tokens"], line["step"]) in told


def test_tensorboard_on_a_full_disk(corpus: dict[str, str], tmp_path: Path, events: list[Events]) -> None:
    train(settings(corpus, tmp_path, tensorboard=True, max_steps=3), Silent())
    full.append(True)
    with pytest.raises(CheckpointError, match=r"cannot write .*tensorboard: No space left on device"):
        train(settings(corpus, tmp_path, tensorboard=True, max_steps=6), Silent())
    assert RunFolder(tmp_path).steps() == [3] and load_trained(tmp_path).step == 3


def test_tensorboard_that_is_not_installed(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package tensorboard: pip install 'transformer_fast\["):
        train(settings(corpus, tmp_path / "run", tensorboard=True), Silent())
    assert not RunFolder(tmp_path / "run").exists()
    flags = ["--source", corpus["source"], "--target", corpus["target"], "--save", str(tmp_path / "run")]
    assert cli.main(["train", *flags, "--tensorboard"]) == 1
    assert "this command needs tensorboard; run: pip install" in capsys.readouterr().err


def test_the_log_on_a_full_disk_leaves_the_checkpoint(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(settings(corpus, tmp_path, max_steps=3), Silent())
    log = RunFolder(tmp_path).log
    log.unlink()
    log.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot write .*log.jsonl: No space left on device"):
        train(settings(corpus, tmp_path, max_steps=6), Silent())
    assert RunFolder(tmp_path).steps() == [3] and load_trained(tmp_path).step == 3


def test_steps_to_average_of_no_run(tmp_path: Path) -> None:
    assert steps_to_average(RunFolder(tmp_path), 3) == []
