"""The mean of a run's last checkpoints (Vaswani et al. 2017, section 6.1) as one file of the run,
`average.safetensors`.

The file is replaced atomically. The metadata hold the averaged checkpoints, the validation scores ("scores"), and a
SHA-256 of the weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .checkpoint import FORMAT, RunFolder, Tensors, write_atomically
from .errors import CheckpointError, ConfigError, os_error_as_checkpoint_error

ABOUT = "transformer_fast"


@dataclass(frozen=True)
class Average:
    """Mean weights of the checkpoints `steps`; the validation `scores` of the mean, empty if not measured; and the
    number of sentences for BLEU."""

    tensors: Tensors
    steps: list[int]
    scores: dict[str, float]
    bleu_sentences: int = 0


def steps_to_average(folder: RunFolder, last: int) -> list[int]:
    """The newest `last` regular checkpoints, ascending; only checkpoints at the end of an epoch, if the run has any.

    Raises:
        CheckpointError: one of the checkpoints is damaged.
    """
    steps = folder.regular_steps()
    return ([step for step in steps if folder.state(step).get("epoch_end")] or steps)[-last:]


def average_checkpoints(folder: RunFolder, last: int) -> Average:
    """Mean of the newest `last` checkpoints, or of fewer if fewer exist; summed in fp64, one in memory at a time.

    Raises:
        ConfigError: `last` is not positive.
        CheckpointError: there is no checkpoint, one is damaged, or the tensors differ in names or shapes.
    """
    if last < 1:
        raise ConfigError(f"last is {last}; expected a number of checkpoints >= 1")
    steps = steps_to_average(folder, last)
    if not steps:
        raise CheckpointError(f"{folder.root} has no checkpoint (no folder step-...) to average; train a model there")
    states = (folder.load_eval_weights(step)[0] for step in steps)
    try:
        return Average(_mean(states), steps, {})
    except ValueError as error:
        raise CheckpointError(f"the checkpoints {steps} in {folder.root} are not of one model: {error}") from None


@torch.no_grad()
def average_models(models: Sequence[nn.Module]) -> nn.Module:
    """Model with the mean parameters of several models that differ only in parameters, such as checkpoints of one run
    (Vaswani et al. 2017, section 6.1). Sums are in fp64; buffers are those of the first model.

    Raises:
        ConfigError: their parameters have different names or shapes.
    """
    result = copy.deepcopy(models[0])
    try:
        mean = _mean(dict(model.named_parameters()) for model in models)
    except ValueError:
        raise ConfigError(
            "only models of one size can be averaged; without --average the mean of their probabilities decides"
        ) from None
    for name, parameter in result.named_parameters():
        parameter.copy_(mean[name])
    return result


def _mean(states: Iterable[Tensors]) -> Tensors:
    """Mean of tensors, summed in fp64, one checkpoint in memory at a time; raises ValueError if names or shapes
    differ."""
    total: Tensors = {}
    for count, tensors in enumerate(states, start=1):
        total = total or {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors.items()}
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in total.items()}:
            raise ValueError(f"weights {count} differ from the first in names or shapes")
        for name, tensor in tensors.items():
            total[name] += tensor
    return {name: (t / count).to(tensors[name].dtype) for name, t in total.items()}


def save_average(folder: RunFolder, average: Average) -> None:
    """Write an average as the run's `average.safetensors`.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the checkpoints, and an average that was
            there, are untouched.
    """
    about = {"format": FORMAT, "steps": average.steps, "scores": average.scores, "sha256": _digest(average.tensors)}
    about["bleu_sentences"] = average.bleu_sentences
    # One entry, because safetensors writes several entries in any order, and equal means should give equal bytes.
    data = safetensors.torch.save(average.tensors, {ABOUT: json.dumps(about)})
    advice = ". The checkpoints are untouched; run average again when the file can be written"
    with os_error_as_checkpoint_error(f"cannot write {folder.average}", advice):
        write_atomically(folder.average, data)


def load_average(folder: RunFolder) -> Average:
    """Load what `save_average` wrote, verified, on the CPU.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return _read(folder, weights=True)


def describe_average(folder: RunFolder) -> Average:
    """Metadata of the run's average, without weights.

    Raises:
        CheckpointError: there is no average, or it is damaged.
    """
    return _read(folder, weights=False)


def _read(folder: RunFolder, *, weights: bool) -> Average:
    if not folder.average.exists():
        raise CheckpointError(f"{folder.root} has no {folder.average.name}; make one: average --model {folder.root}")
    try:
        with safe_open(folder.average, "pt") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()} if weights else {}  # noqa: SIM118
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, expected {FORMAT}")
        if weights and _digest(tensors) != about["sha256"]:
            raise ValueError("its SHA-256 differs from the one it names")
        return Average(tensors, list(about["steps"]), dict(about["scores"]), about.get("bleu_sentences", 0))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder.average} is damaged: {error}. Delete it, or average again") from None


def _digest(tensors: Tensors) -> str:
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()
