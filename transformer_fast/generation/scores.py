"""Score of a whole hypothesis."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from .config import GenerationConfig
from .request import Hypothesis

Length = TypeVar("Length", float, Tensor)


def length_penalty(length: Length, config: GenerationConfig) -> Length:
    """Divisor of log P for an answer with this number of tokens, EOS included."""
    base = (5 + length) / 6 if config.length_norm == "gnmt" else length
    return base**config.length_penalty


def scored_hypothesis(
    config: GenerationConfig,
    tokens: list[int],
    log_prob: float,
    length: int,
    finished: bool,
    attention: Tensor | None,
) -> Hypothesis:
    """Return the hypothesis with its score. length: tokens with EOS. attention: (at least length, S), or None."""
    # Without a token there is nothing to normalise.
    score = log_prob / length_penalty(float(max(length, 1)), config)
    alignment = None if attention is None else attention[: len(tokens)].to("cpu", torch.float32, copy=True)
    return Hypothesis(tokens, score, log_prob, finished, alignment)
