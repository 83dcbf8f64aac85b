"""Parts of a run for export to another program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...generation import GenerationConfig
from ..imported import ModelConfig
from ..pair_tokenizer import PairTokenizer


@dataclass(frozen=True)
class Exported:
    """Model, configuration, tokenizer and search options of a run: the input of both exporters."""

    model: nn.Module
    config: ModelConfig
    tokenizer: PairTokenizer
    generation: GenerationConfig
