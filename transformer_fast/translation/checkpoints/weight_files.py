"""The weights of a Hugging Face folder: safetensors or PyTorch's own files, in one piece or in shards."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError

NAMES = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, in fp32 on the CPU; the first of `NAMES` that is there is read.

    Raises:
        CheckpointError: there is none, one is damaged, a shard is missing, or a file holds more than numbers.
    """
    for name in NAMES:
        path = folder / name
        if path.exists():
            tensors = _read_shards(path) if name.endswith(".index.json") else _read_file(path)
            return {key: _as_float(path, key, value) for key, value in tensors.items()}
    raise CheckpointError(f"{folder} has no weights; expected one of {', '.join(NAMES)}")


def _read_shards(index: Path) -> dict[str, Any]:
    place = read_object(index).get("weight_map")
    if not isinstance(place, dict) or not all(isinstance(name, str) for name in place.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors to files")
    tensors: dict[str, Any] = {}
    for name in sorted(set(place.values())):
        path = index.parent / name
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}; expected files of the same folder")
        if not path.exists():
            raise CheckpointError(f"{index} names the file {name}, which is missing")
        tensors |= _read_file(path)
    if place.keys() != tensors.keys():
        name = min(place.keys() ^ tensors.keys())
        where = "the index but in no file" if name in place else "a file but not in the index"
        raise CheckpointError(f"{index} does not fit its files: {name} is in {where}")
    return tensors


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        # Without weights_only, loading a pickle file may run arbitrary code.
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects beside its tensors, or is damaged; it could run code, so it was not opened."
            f" Save it as model.safetensors ({str(error).strip().splitlines()[0]})"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).strip().splitlines()[0]}") from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path} holds a {type(tensors).__name__}; expected tensors by name")
    return tensors


def _as_float(path: Path, name: object, value: object) -> Tensor:
    if not isinstance(name, str) or not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"{path}: {name} is {found}; expected a tensor of floating-point numbers")
    return value.float()


def read_object(path: Path) -> dict[str, Any]:
    """The json object in a file.

    Raises:
        CheckpointError: missing, unreadable, or something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a json object")
    return value
