"""Training that is killed at any moment, even repeatedly, continues bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import killed_training
import pytest
from small_training import checkpointed_config, outcome

TRAINER = Path(killed_training.__file__)


class Killer:
    """Run `killed_training.py`: train with each of `kills` in turn, then to the end."""

    def __init__(self, corpus: dict[str, str], folder: Path):
        self.corpus, self.folder, self.jobs = corpus, folder, 0
        # Passive: on a busy machine, threads that spin while they wait for each other take minutes for this.
        environment = {**os.environ, "PYTHONPATH": str(TRAINER.parents[2]), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(TRAINER)]
        self.errors = open(folder / "errors", "w+")  # noqa: SIM115 - lives as long as the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n", self.said()

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-3000:]

    def __call__(self, kills: list[str], threads: int = 1, **changes: object) -> Path:
        self.jobs += 1
        save = self.folder / f"run{self.jobs}"
        config = checkpointed_config(self.corpus, save, **changes)
        job = {"config": dataclasses.asdict(config), "kills": kills, "threads": threads}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer == "ok\n", f"{answer}{self.said()}"
        return save

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=600)
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def killer(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    killer = Killer(corpus, tmp_path_factory.mktemp("killed"))
    yield killer
    killer.close()


# Disk events of a part, counted from 0: a new run has 4 (tokenizer.model and config.json, each written and renamed);
# then each of the checkpoints 3, 6, 9 and 12 has 4 (three files, one rename), and those of 9 and 12 delete an old one
# (a rename, a deletion). A part that finds left-overs of a killed one deletes them first. "half" leaves the file or
# the folder of the event incomplete; "before" and "after" kill just before or after the event.
IN_THE_WRITER = [
    ["before:0", "half:2", "after:2"],  # no config.json yet
    ["after:3"],  # now config.json exists
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


@pytest.mark.cover(1)
@pytest.mark.parametrize("kills", IN_THE_WRITER, ids=",".join)
def test_killed_in_the_checkpoint_writer(killer: Killer, never_stopped: Path, kills: list[str]) -> None:
    assert outcome(killer(kills)) == outcome(never_stopped)


@pytest.mark.cover(1)
@pytest.mark.parametrize("delays", [["time:0.1", "time:0.4", "time:0.7"], ["time:0.25", "time:0.55", "time:1.0"]])
def test_killed_at_any_time(killer: Killer, never_stopped: Path, delays: list[str]) -> None:
    assert outcome(killer(delays)) == outcome(never_stopped)


def test_killed_with_two_threads_and_accumulation(killer: Killer) -> None:
    options = {"threads": 2, "accumulate": 2, "max_steps": 6, "keep_last": 3}
    whole = outcome(killer([], **options))
    assert outcome(killer(["before:10", "time:0.3"], **options)) == whole


AVERAGED = {"ema": 0.9, "average_last": 2, "valid_every": 0, "max_steps": 26, "keep_last": 1}


@pytest.fixture(scope="module")
def averaged(killer: Killer) -> tuple:
    """Outcome of an uninterrupted run with a moving average and the mean of epochs."""
    return outcome(killer([], **AVERAGED))


@pytest.mark.cover(1)
@pytest.mark.parametrize("kills", [["half:7", "before:6", "after:9"], ["after:3", "before:16"], ["half:2", "time:0.5"]])
def test_killed_with_a_moving_average_and_the_mean_of_epochs(killer: Killer, averaged: tuple, kills: list[str]) -> None:
    """A checkpoint has four files, at the end of an epoch; the last one is the mean of two."""
    assert len(averaged[0]) == 4 and len(averaged[3]) >= 3
    assert outcome(killer(kills, **AVERAGED)) == averaged


def test_the_outcome_can_differ(killer: Killer, never_stopped: Path) -> None:
    """Another seed changes the outcome, so a lost random state would be found."""
    other = outcome(killer([], seed=1))
    assert all(left != right for left, right in zip(other[0], outcome(never_stopped)[0], strict=True))
