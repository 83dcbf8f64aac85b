"""The mean of a run's last checkpoints (Vaswani et al. 2017, section 6.1) as one file of it, `average.safetensors`.

The file is replaced as a whole or not at all. Its metadata say which checkpoints it is the mean of, what validation
measured ("scores"), and a SHA-256 of the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from .checkpoint import FORMAT, RunFolder, Tensors, write_atomically
from .errors import CheckpointError, ConfigError

ABOUT = "transformer_fast"


@dataclass(frozen=True)
class Average:
    """Mean weights of the checkpoints `steps`, and their validation `scores`, empty where nothing was measured."""

    tensors: Tensors
    steps: list[int]
    scores: dict[str, float]


def steps_to_average(folder: RunFolder, last: int) -> list[int]:
    """The newest `last` checkpoints, ascending; those at the end of an epoch, where the run has any.

    Raises:
        CheckpointError: one of them is damaged.
    """
    steps = folder.steps()
    return ([step for step in steps if folder.state(step).get("epoch_end")] or steps)[-last:]


def average_checkpoints(folder: RunFolder, last: int) -> Average:
    """The mean of the newest `last` checkpoints, of as many as there are; summed in fp64, one in memory at a time.

    Raises:
        ConfigError: `last` is not positive.
        CheckpointError: there is no checkpoint, one is damaged, or they differ in names or shapes.
    """
    if last < 1:
        raise ConfigError(f"last is {last}; expected a number of checkpoints >= 1")
    steps = steps_to_average(folder, last)
    if not steps:
        raise CheckpointError(f"{folder.root} has no checkpoint (no folder step-...) to average; train a model there")
    total: Tensors = {}
    for step in steps:
        served = folder.load_served(step).tensors
        total = total or {name: torch.zeros_like(t, dtype=torch.float64) for name, t in served.items()}
        if {n: t.shape for n, t in served.items()} != {n: t.shape for n, t in total.items()}:
            raise CheckpointError(f"{folder.path(step)} is of another model than {folder.path(steps[0])}")
        for name, tensor in served.items():
            total[name] += tensor
    return Average({name: (t / len(steps)).to(served[name].dtype) for name, t in total.items()}, steps, {})


def save_average(folder: RunFolder, average: Average) -> None:
    """Write it as the run's `average.safetensors`.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the checkpoints, and an average that was
            there, are untouched.
    """
    about = {"format": FORMAT, "steps": average.steps, "scores": average.scores, "sha256": _digest(average.tensors)}
    try:
        # One entry: safetensors writes several in any order, and the same mean should be the same bytes.
        write_atomically(folder.average, safetensors.torch.save(average.tensors, {ABOUT: json.dumps(about)}))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder.average}: {error.strerror or error}. The checkpoints are untouched;"
            " average them again once it can be written"
        ) from error


def load_average(folder: RunFolder) -> Average:
    """What `save_average` wrote, verified, on the CPU.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    about = read_about(folder)
    try:
        tensors = safetensors.torch.load_file(folder.average)
        if _digest(tensors) != about["sha256"]:
            raise ValueError("its SHA-256 differs from the one it names")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder.average} is damaged: {error}. Delete it, or average again") from None
    return Average(tensors, about["steps"], about["scores"])


def read_about(folder: RunFolder) -> dict[str, Any]:
    """The metadata of the run's average: "steps", "scores" and more.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not folder.average.exists():
        raise CheckpointError(f"{folder.root} has no {folder.average.name}; make one: average --model {folder.root}")
    try:
        with safe_open(folder.average, "pt") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, expected {FORMAT}")
        return {"steps": list(about["steps"]), "scores": dict(about["scores"]), "sha256": about["sha256"]}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder.average} is damaged: {error}. Delete it, or average again") from None


def _digest(tensors: Tensors) -> str:
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()
