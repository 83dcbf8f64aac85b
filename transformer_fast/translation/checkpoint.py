"""Checkpoints that survive a power cut: safetensors for tensors, json for all other values, no executable code.

    RUN/config.json            settings, fingerprint of the data, format       written when a run begins
    RUN/tokenizer.model        the sentencepiece model                         written once
    RUN/log.jsonl              one json object a report
    RUN/average.safetensors    the mean of the last checkpoints (averaging.py)
    RUN/step-00001000/         one checkpoint, complete by construction
        model.safetensors      weights
        ema.safetensors        the moving average of the weights, where the run keeps one
        optimizer.safetensors  Adam's moments, random number states
        state.json             step, place in the data, best step so far, sizes and SHA-256 of the other files

A checkpoint is written into `.tmp-step-...`, every file and then the folder is flushed to disk, and one rename
makes it visible. So a folder named step-... is always complete, even if the process was killed. The next start removes
temporary folders of a killed writer. The newest checkpoint records which checkpoint is the best; no second file could
disagree.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from .errors import CheckpointError, os_error_as_checkpoint_error
from .text import PathLike

FORMAT = 1
STEP_FOLDER = re.compile(r"step-(\d{8,})")
SCRATCH = ".tmp-"
LOCKED = errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES
"""Errors of a lock that another process has. File systems without locks give others: ENOLCK, ENOSYS, EOPNOTSUPP."""

Tensors = dict[str, Tensor]
Scores = dict[str, float]  # validation scores: "valid_loss", in nats per token, and "bleu", as far as measured


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named groups of tensors ("model", "optimizer", "ema") and plain values."""

    tensors: dict[str, Tensors]
    state: dict[str, Any]


LEAST_BLEU = 1.0
"""A BLEU below this (of 100) is not informative, because some words agree by chance."""


def is_better(scores: Scores, than: Scores, *, same_sentences: bool = True) -> bool:
    """Compare validation scores: by BLEU if both BLEUs are informative, else by loss.

    same_sentences: True if both BLEUs are on the same sentences; otherwise BLEUs are not compared.
    """
    if same_sentences and "bleu" in scores and "bleu" in than:
        mine, theirs = scores["bleu"], than["bleu"]
        if mine != theirs and max(mine, theirs) >= LEAST_BLEU:
            return mine > theirs
    return scores.get("valid_loss", math.inf) < than.get("valid_loss", math.inf)


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_flushed(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: PathLike, data: bytes) -> None:
    """Replace the content of `path` by `data`. Readers, also after a crash, see either the old or the new content."""
    path = Path(path)
    scratch = path.with_name(SCRATCH + path.name)
    try:
        _write_flushed(scratch, data)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            _remove(scratch)
        raise
    flush_folder(path.parent)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode("utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A json object of a run folder.

    Raises:
        CheckpointError: missing, unreadable, not json, or of another format version.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {path.parent} is not a complete transformer_fast run") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is not a folder; expected that of a run") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        raise CheckpointError(f"{path} was not written by this version: format is {found!r}, expected {FORMAT}")
    return value


class RunFolder:
    """The folder of one training run.

    Args:
        root: the folder; `writing` creates the folder.
    """

    def __init__(self, root: PathLike):
        self.root = Path(root)
        names = "config.json", "tokenizer.model", "log.jsonl", "average.safetensors"
        self.config, self.tokenizer, self.log, self.average = (self.root / name for name in names)

    def exists(self) -> bool:
        """Return True where a run was started."""
        return self.config.exists()

    @contextlib.contextmanager
    def writing(self, message: Callable[[str], object] = warnings.warn) -> Iterator[None]:
        """Create the folder, lock it against other trainings, and remove files of a killed training.

        Args:
            message: called with a text where the file system has no locks; the folder is used without one.

        Raises:
            CheckpointError: the folder cannot be created or written, or another process is training in it.
        """
        with os_error_as_checkpoint_error(f"cannot write to the folder {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "wb")  # noqa: SIM115 - closed by the with below
        with lock:
            try:
                # The operating system releases the lock when the process ends, even if it is killed.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in LOCKED:
                    raise CheckpointError(
                        f"another process is training in {self.root}; choose another folder"
                    ) from None
                message(
                    f"{self.root} cannot be locked ({error.strerror}): nothing stops a second training in this folder"
                )
            for left_over in self.root.glob(SCRATCH + "*"):
                _remove(left_over)
            yield

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        names = (STEP_FOLDER.fullmatch(path.name) for path in self.root.glob("step-*") if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, step: int, tensors: dict[str, Tensors], state: dict[str, Any]) -> None:
        """Write the checkpoint of `step` atomically.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; names the last good checkpoint.
        """
        scratch = self.root / f"{SCRATCH}{self.path(step).name}"
        try:
            _remove(scratch)
            scratch.mkdir()
            files = {}
            for group, members in tensors.items():
                data = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in members.items()})
                _write_flushed(scratch / f"{group}.safetensors", data)
                files[f"{group}.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            _write_flushed(scratch / "state.json", to_json({**state, "format": FORMAT, "step": step, "files": files}))
            flush_folder(scratch)
            os.rename(scratch, self.path(step))
            flush_folder(self.root)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(scratch)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.root}: {error.strerror or error}."
                f" {self.last_good(step)}"
            ) from error

    def regular_steps(self) -> list[int]:
        """Steps of checkpoints that an uninterrupted run would have too, and the newest step; ascending."""
        steps = self.steps()
        return [step for step in steps if step == steps[-1] or not self._is_between(step)]

    def _is_between(self, step: int) -> bool:
        """Return True for a checkpoint that exists only because a run was interrupted; False if it cannot be read."""
        try:
            return bool(self.state(step).get("between"))
        except CheckpointError:
            return False

    def prune(self, keep_last: int, others: Collection[int | None]) -> None:
        """Delete all but the newest `keep_last` checkpoints and the `others`, which are `regular_steps`."""
        kept = {*self.regular_steps()[-keep_last:], *others}
        for step in self.steps():
            if step not in kept:
                # Renamed first, so that an interrupted deletion leaves no partial checkpoint.
                doomed = self.root / f"{SCRATCH}old-{step}"
                os.rename(self.path(step), doomed)
                _remove(doomed)

    def state(self, step: int) -> dict[str, Any]:
        """The plain values of the checkpoint of `step`.

        Raises:
            CheckpointError: the values are missing, damaged or of another format; names the checkpoint to go on from.
        """
        try:
            return read_json(self.path(step) / "state.json")
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self.last_good(step)}") from None

    def load_eval_weights(self, step: int) -> tuple[Tensors, dict[str, Any]]:
        """Weights for translation with the checkpoint of `step` (the moving average if there is one), and the
        checkpoint's plain values; raises as `load` does."""
        group = "ema" if "ema" in _groups(self.state(step)) else "model"
        checkpoint = self.load(step, (group,))
        return checkpoint.tensors[group], checkpoint.state

    def load(self, step: int, groups: tuple[str, ...] | None = None) -> Checkpoint:
        """Read and verify the checkpoint of `step`, its tensors on the CPU; all groups unless some are named.

        Raises:
            CheckpointError: a file is missing, cut short or altered, or of another format.
        """
        folder = self.path(step)
        state = self.state(step)
        tensors = {}
        for group in groups or _groups(state):
            path = folder / f"{group}.safetensors"
            try:
                data = path.read_bytes()
                expected = state["files"][path.name]
                if len(data) != expected["bytes"]:
                    raise ValueError(f"it has {len(data):,} bytes, expected {expected['bytes']:,}")
                if hashlib.sha256(data).hexdigest() != expected["sha256"]:
                    raise ValueError("its SHA-256 differs from the one in state.json")
                tensors[group] = safetensors.torch.load(data)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged: {error}. {self.last_good(step)}") from None
        return Checkpoint(tensors, state)

    def newest_step(self) -> int:
        """The step of the newest checkpoint.

        Raises:
            CheckpointError: the folder has no checkpoint.
        """
        if not (steps := self.steps()):
            raise CheckpointError(f"{self.root} has no checkpoint (no folder step-...); train a model there first")
        return steps[-1]

    def best_step(self) -> int:
        """Step of the best checkpoint, or of the newest if nothing was measured; raises as `newest_step` does."""
        newest = self.newest_step()
        best = self.state(newest).get("best_step")
        return best if best in self.steps() else newest

    def last_good(self, bad_step: int) -> str:
        """Advice for an error in reading or writing the checkpoint of a step."""
        others = [step for step in self.steps() if step != bad_step]
        if not others:
            return "There is no other checkpoint."
        if self.path(bad_step).exists():
            return f"Delete {self.path(bad_step)} to go on from {self.path(others[-1])}."
        return f"The checkpoint before it, {self.path(others[-1])}, is untouched."


def _groups(state: dict[str, Any]) -> list[str]:
    """Groups of tensors in a checkpoint; the first two groups are required."""
    files = state.get("files")
    return ["model", "optimizer", *(["ema"] if isinstance(files, dict) and "ema.safetensors" in files else [])]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
