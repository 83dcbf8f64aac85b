"""Every setting of a training run, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..generation import GenerationConfig
from .errors import ConfigError

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?[hms])+")
FORMER_OPTIONS = {"coverage_penalty": 0, "beam_groups": 1, "diversity": ..., "graph": ..., "draft_tokens": ...}
"""Search options that earlier versions saved in run folders, and the value that changed no answer; ...: every value."""


def parse_duration(text: str | float) -> float:
    """Seconds from "90", "90s", "20m", "1.5h" or "1h30m".

    Raises:
        ConfigError: anything else, or a duration that is not positive and finite.
    """
    compact = str(text).strip().lower()
    try:
        if DURATION.fullmatch(compact):
            seconds = sum(float(n) * UNITS[unit] for n, unit in re.findall(r"([\d.]+)([hms])", compact))
        else:
            seconds = float(compact)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"cannot read {text!r} as a duration; expected something like 90s, 20m or 1h30m")
    return seconds


def generation_config(settings: Mapping[str, Any], default: GenerationConfig | None = None) -> GenerationConfig:
    """Search options from TOML or JSON settings, which override those of `default`.

    Raises:
        ConfigError: for an unknown or invalid setting; the message names it.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"expected options of translation by name, got {settings!r}")
    if unknown := sorted(settings.keys() - GenerationConfig.__dataclass_fields__.keys()):
        raise ConfigError(f"{', '.join(unknown)}: no such option of translation; see translate --help")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    try:
        return dataclasses.replace(default or GenerationConfig(), **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def saved_generation_config(settings: Mapping[str, Any], default: GenerationConfig | None = None) -> GenerationConfig:
    """Search options of a run folder, as `generation_config`, which an earlier version may have saved.

    Options that this version no longer has are left out. The function warns if the translations may differ then.
    """
    if isinstance(settings, Mapping):
        for name, harmless in FORMER_OPTIONS.items():
            if harmless is not ... and (value := settings.get(name, harmless)) != harmless:
                message = f"the run was saved with {name} {value!r}, which is no option any more; answers may differ"
                warnings.warn(message, stacklevel=2)
        settings = {name: value for name, value in settings.items() if name not in FORMER_OPTIONS}
    return generation_config(settings, default)


def _option(default: Any, text: str, *, free: bool = False, **flag: Any) -> Any:
    """A field with its help text. `free` marks settings that may change when a run is resumed."""
    return field(default=default, metadata={"help": text, "free": free, "flag": flag})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run, validated on construction.

    Raises:
        ConfigError: names the setting, its value and what was expected.
    """

    source: str = _option(dataclasses.MISSING, "source sentences, one per line, plain or .gz", free=True)
    target: str = _option(dataclasses.MISSING, "translations of the source sentences, line by line", free=True)
    save: str = _option(dataclasses.MISSING, "folder of the run: checkpoints, tokenizer, log", free=True)
    valid_source: str | None = _option(None, "held-out source sentences", free=True, type=str)
    valid_target: str | None = _option(None, "held-out translations", free=True, type=str)

    max_time: float | None = _option(
        None,
        "stop after this training time, in seconds or as 20m, 1h30m; time before a resume counts too",
        free=True,
        type=parse_duration,
    )
    max_steps: int = _option(100_000, "stop after this many updates", free=True)

    d_model: int = _option(256, "model width")
    heads: int = _option(4, "number of attention heads")
    layers: int = _option(3, "number of encoder layers, and of decoder layers")
    d_ff: int = _option(1024, "width of the feed-forward layers")
    dropout: float = _option(0.1, "dropout of the embeddings and of each sublayer's output")
    attention_dropout: float | None = _option(None, "dropout of attention weights (default: as --dropout)", type=float)
    activation_dropout: float | None = _option(
        None, "dropout inside the feed-forward layers (default: as --dropout)", type=float
    )
    norm: str = _option(
        "layer",
        "norm: layer is LayerNorm, std divides by the unbiased deviation, rms is RMSNorm",
        choices=("layer", "std", "rms"),
    )
    norm_first: bool = _option(True, "pre-norm layers (recommended); else post-norm")
    tie_weights: bool = _option(True, "share one matrix between both embeddings and the output layer")

    lowercase: bool = _option(False, "lower-case the text; translations are lower-case too")
    vocab_size: int = _option(8000, "largest number of pieces in the joint BPE vocabulary")
    max_length: int = _option(256, "leave out training pairs longer than this many tokens")
    batch_tokens: int = _option(4096, "largest number of tokens per batch on each side, padding included")
    accumulate: int = _option(1, "number of batches per update; gradients are weighted by tokens")

    lr: float = _option(1e-3, "peak learning rate, reached after the warmup")
    warmup: int = _option(1000, "number of updates of linear warmup, before the inverse square root decay")
    cooldown: int = _option(0, "number of last updates in which the rate also falls linearly to zero")
    label_smoothing: float = _option(0.1, "probability mass spread evenly over the vocabulary")
    clip: float = _option(1.0, "largest gradient norm; 0: no clipping")

    seed: int = _option(0, "seed of initial weights, batches and dropout")
    device: str = _option("auto", "auto, cpu, cuda or cuda:N", free=True)
    amp: str = _option(
        "auto",
        "16-bit arithmetic: bf16 works on a CPU too; auto is bf16 on a GPU that supports it, else off",
        choices=("auto", "off", "bf16", "fp16"),
    )
    packed: bool = _option(
        True,
        "skip padding in every layer where attention is fused; the losses are the same up to rounding, and dropout "
        "falls on other elements",
        free=True,
    )
    shard: bool = _option(False, "under torchrun, shard weights and optimizer over the processes (FSDP2)", free=True)
    checkpoint_activations: bool = _option(
        False,
        "recompute each layer in the backward pass: less memory, one more forward pass",
        free=True,
    )
    valid_every: int = _option(
        1000, "number of updates between validations; each writes a checkpoint; 0: after each epoch"
    )
    patience: int = _option(0, "stop after this many validations without improvement; 0: no limit", free=True)
    bleu_sentences: int = _option(
        1000, "number of validation sentences translated for BLEU; 0: measure the loss only", free=True
    )
    keep_last: int = _option(3, "number of newest checkpoints to keep; the best one is kept too", free=True)
    average_last: int = _option(
        0, "at the end, also write the mean of this many last checkpoints (of epochs, if --valid-every 0)", free=True
    )
    ema: float = _option(
        0.0,
        "decay of a moving average of the weights, such as 0.999, used to validate and translate; 0: off",
    )
    tensorboard: bool = _option(
        False, "also write TensorBoard logs to tensorboard/ in the folder of the run", free=True
    )
    resume: bool = _option(True, "continue the run that the folder holds; if not, such a run is an error", free=True)

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            annotation = str(setting.type)
            kinds, expected = KINDS.get(annotation.removesuffix(" | None"), ((), ""))
            value = getattr(self, setting.name)
            if kinds and not (value is None and annotation.endswith("None")):
                fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
                _require(fits, self, setting.name, expected)
        for names, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
            for name in names:
                value = getattr(self, name)
                fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
                _require(fits, self, name, f"a whole number >= {least}")
        _require(self.seed < 2**63, self, "seed", "a whole number below 2**63")
        for name in ("dropout", "label_smoothing", "attention_dropout", "activation_dropout"):
            _require(0 <= (getattr(self, name) or 0.0) < 1, self, name, "a probability, 0 <= p < 1")
        _require(0 <= self.ema < 1, self, "ema", "a decay, 0 <= decay < 1")
        _require(0 < self.lr < math.inf, self, "lr", "a positive learning rate")
        _require(0 <= self.clip < math.inf, self, "clip", "a gradient norm, or 0 for none")
        _require(
            self.max_time is None or 0 < self.max_time < math.inf, self, "max_time", "a positive number of seconds"
        )
        for name in ("norm", "amp"):
            choices = type(self).__dataclass_fields__[name].metadata["flag"]["choices"]
            _require(getattr(self, name) in choices, self, name, f"one of {', '.join(choices)}")
        _require(bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)), self, "device", "auto, cpu, cuda or cuda:N")
        _require(self.d_model % self.heads == 0, self, "d_model", f"a multiple of heads ({self.heads})")
        _require(self.batch_tokens >= self.max_length, self, "batch_tokens", f"at least max_length ({self.max_length})")
        _require(self.cooldown <= self.max_steps, self, "cooldown", f"at most max_steps ({self.max_steps})")
        if self.shard and self.amp == "fp16":
            raise ConfigError(
                "shard is not supported with amp 'fp16', whose loss scale is not shared; expected bf16 or off"
            )
        if (self.valid_source is None) != (self.valid_target is None):
            missing = "valid_source" if self.valid_source is None else "valid_target"
            raise ConfigError(f"{missing} is missing: validation needs both valid_source and valid_target, or neither")

    def differences(self, other: TrainConfig) -> list[str]:
        """Settings that may not change within a run and do: "dropout is 0.3, the run has 0.1"."""
        found = []
        for setting in dataclasses.fields(self):
            mine, theirs = getattr(self, setting.name), getattr(other, setting.name)
            # The cooldown ends with the run; another end would change learning rates that were already used.
            fixed = not setting.metadata["free"] or (setting.name == "max_steps" and other.cooldown)
            if fixed and mine != theirs:
                found.append(f"{setting.name} is {mine}, the run has {theirs}")
        return found


POSITIVE = (
    *("d_model", "heads", "layers", "d_ff", "vocab_size", "max_length", "batch_tokens", "accumulate", "max_steps"),
    *("warmup", "keep_last"),
)
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str, os.PathLike), "a text"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "True or False"),
}
"""Checks of settings by type annotation; POSITIVE and NOT_NEGATIVE check whole numbers."""
NOT_NEGATIVE = ("cooldown", "bleu_sentences", "seed", "valid_every", "patience", "average_last")


def _require(holds: bool, config: TrainConfig, name: str, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {getattr(config, name)!r}; expected {expected}")
