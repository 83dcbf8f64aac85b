"""Imported runs: an encoder-decoder model of another program that `Transformer` can represent, with its tokenizer.

    RUN/config.json            format, architecture, special pieces, how to search, SHA-256 of the files below
    RUN/source.spm, target.spm the sentencepiece models
    RUN/vocab.json             the ids of the pieces; target_vocab.json where the target language has its own
    RUN/step-00000000/         the weights, a checkpoint as that of a trained run

The run is written into a folder beside RUN, and one rename makes the run visible: RUN is complete, or not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..generation import GenerationConfig
from ..models import Transformer
from .checkpoint import FORMAT, SCRATCH, RunFolder, Tensors, flush_folder, to_json, write_atomically
from .config import saved_generation_config
from .errors import CheckpointError, os_error_as_checkpoint_error
from .pair_tokenizer import PairFiles, PairTokenizer
from .text import PathLike

FILES = {"source": "source.spm", "target": "target.spm", "vocab": "vocab.json", "target_vocab": "target_vocab.json"}


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of an imported model; names are those of `transformer_fast.Transformer`.

    layers, heads, d_ff: pairs, for encoder and decoder. max_length: maximum number of source tokens for reliable
        output.
    """

    src_vocab: int
    trg_vocab: int
    d_model: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    d_ff: tuple[int, int]
    activation: str
    scale: float
    positions: str
    max_positions: int
    norm: str
    norm_first: bool
    tie_weights: bool | str
    dropout: float
    attention_dropout: float
    activation_dropout: float
    max_length: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "d_ff"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # json has lists


def build_imported(config: ModelConfig) -> nn.Module:
    """Build the model, without loading its weights."""
    names = ("d_ff", "activation", "scale", "positions", "norm", "norm_first", "tie_weights")
    options = {name: getattr(config, name) for name in (*names, "attention_dropout", "activation_dropout")}
    sizes = config.src_vocab, config.trg_vocab, config.d_model, config.layers, config.heads
    return Transformer(*sizes, config.dropout, max_len=config.max_positions, **options)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context with a folder to write into, which becomes `path` at the end; after an error nothing is left.

    Raises:
        CheckpointError: `path` is there already, or cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is there already; nothing was written. Choose another folder, or remove it")
    scratch = path.with_name(f"{SCRATCH}{path.name}-{os.getpid()}")
    try:
        with os_error_as_checkpoint_error(f"cannot write to the folder {path}"):
            scratch.mkdir(parents=True)
            yield scratch
            flush_folder(scratch)
            os.rename(scratch, path)
            flush_folder(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_imported(
    save: PathLike,
    origin: str,
    config: ModelConfig,
    tensors: Tensors,
    tokenizer: PairTokenizer,
    generation: GenerationConfig,
) -> None:
    """Write a run: the model's `tensors` (from `model_tensors`), its tokenizer, and how it wants to be searched.

    Raises:
        CheckpointError: `save` is there already, or cannot be written.
    """
    files = tokenizer.files
    data = {FILES["source"]: files.source, FILES["target"]: files.target, FILES["vocab"]: to_json(files.vocab)}
    if files.target_vocab is not None:
        data[FILES["target_vocab"]] = to_json(files.target_vocab)
    about = {
        "imported": origin,
        "model": dataclasses.asdict(config),
        "tokenizer": {"start": tokenizer.bos, "special": tokenizer.special},
        "generation": dataclasses.asdict(generation),
        "files": {name: hashlib.sha256(part).hexdigest() for name, part in data.items()},
    }
    with new_folder(Path(save)) as scratch:
        RunFolder(scratch).save(0, {"model": tensors}, {})
        for name, part in data.items():
            write_atomically(scratch / name, part)
        write_atomically(scratch / "config.json", to_json({**about, "format": FORMAT}))


def load_imported(root: Path, saved: dict[str, Any]) -> tuple[ModelConfig, PairTokenizer, GenerationConfig]:
    """Load what `save_imported` wrote beside the weights; saved: the folder's config.json.

    Raises:
        CheckpointError: a file is missing or altered.
    """
    try:
        config, generation = ModelConfig(**saved["model"]), saved_generation_config(saved["generation"])
        digests, options = dict(saved["files"]), dict(saved["tokenizer"])
        parts = {part: _verified(root / name, digests[name]) for part, name in FILES.items() if name in digests}
        for part in ("vocab", "target_vocab"):
            parts[part] = json.loads(parts[part]) if part in parts else None
        return config, PairTokenizer(PairFiles(**parts), **options), generation
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{root / 'config.json'} does not describe an imported model: {error}") from None


def _verified(path: Path, digest: str) -> bytes:
    with os_error_as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the one in config.json")
    return data
