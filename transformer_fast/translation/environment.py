"""Environment of a run: device, arithmetic, interrupts, folder and text."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .checkpoint import FORMAT, RunFolder, read_json, to_json, write_atomically
from .config import TrainConfig
from .errors import CheckpointError, ConfigError, os_error_as_checkpoint_error
from .model import load_config, load_tokenizer
from .text import ParallelText, read_parallel
from .tokenizer import Tokenizer


def choose_device(config: TrainConfig) -> torch.device:
    if config.device == "auto" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # torchrun: a GPU for each process
    if config.device == "auto":
        return torch.device("cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {config.device!r} but torch sees no GPU; expected cpu or auto on this machine")
    return torch.device(config.device)


def amp_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    if device.type == "cpu":
        if config.amp == "fp16":
            raise ConfigError("amp is 'fp16' but the device is the CPU; expected bf16, off or auto there")
        return torch.bfloat16 if config.amp == "bf16" else None
    if config.amp == "auto":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.amp]


def multiplies_bf16() -> bool:
    """Return True for a CPU with instructions for products of bfloat16: AVX512-BF16 or AMX, or those of ARM."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Context with an event that the first SIGINT or SIGTERM sets; a second signal has its usual effect."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def open_run(
    config: TrainConfig, folder: RunFolder, translation: Mapping[str, Any] | None = None
) -> tuple[ParallelText, ParallelText | None, Tokenizer]:
    """Training text, validation text and tokenizer of the run in `folder`, which starts here or is continued.

    translation: search options to store in the run; None keeps the stored options.

    Raises:
        ConfigError, DataError: see `TrainConfig` and `read_parallel`.
        CheckpointError: the folder cannot be written, or holds a run that these settings do not continue.
    """
    continued = folder.exists()
    if folder.steps() and not continued:
        raise CheckpointError(f"{folder.root} has checkpoints but no config.json: it is not a complete run")
    if continued and not config.resume:
        raise CheckpointError(f"{folder.root} already holds a run; resume it or choose another folder")
    saved = read_json(folder.config) if continued else {}
    if continued and (changed := config.differences(load_config(folder, saved))):
        raise CheckpointError(f"cannot resume the run in {folder.root} with other settings: {'; '.join(changed)}")
    text = read_parallel(config.source, config.target)
    valid = read_parallel(config.valid_source, config.valid_target) if config.valid_source else None
    data = {"train": text.fingerprint, "valid": valid and valid.fingerprint}
    if continued:
        if changed := [part for part in data if data[part] != saved.get("data", {}).get(part)]:
            raise CheckpointError(
                f"cannot resume the run in {folder.root}: the {changed[0]} text differs from the one it began with"
            )
        tokenizer = load_tokenizer(folder, saved, config)
        if translation is not None and translation != saved.get("translation"):
            with os_error_as_checkpoint_error(f"cannot write {folder.config}"):
                write_atomically(folder.config, to_json({**saved, "translation": dict(translation)}))
        return text, valid, tokenizer
    tokenizer = Tokenizer.train((*text.source, *text.target), config.vocab_size, lowercase=config.lowercase)
    digest = hashlib.sha256(tokenizer.model).hexdigest()
    run = {"format": FORMAT, "config": dataclasses.asdict(config), "data": data, "tokenizer_sha256": digest}
    if translation is not None:
        run["translation"] = dict(translation)
    with os_error_as_checkpoint_error(f"cannot write to the folder {folder.root}"):
        write_atomically(folder.tokenizer, tokenizer.model)
        write_atomically(folder.config, to_json(run))  # last: from here on the folder is a run
    return text, valid, tokenizer
