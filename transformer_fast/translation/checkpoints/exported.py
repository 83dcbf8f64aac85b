"""A run on its way to another program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...generation import GenerationConfig
from ..imported import ModelConfig
from ..pair_tokenizer import PairTokenizer


@dataclass(frozen=True)
class Exported:
    """Model, configuration, tokenizer and search of a run, as both formats are made of them."""

    model: nn.Module
    config: ModelConfig
    tokenizer: PairTokenizer
    generation: GenerationConfig
