"""Several trained models as one: the mean of their weights, and what an ensemble must share."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from .errors import ConfigError
from .model import Trained
from .tokenizer import Tokenizer


def same_tokenizer(runs: Sequence[Trained], names: Sequence[str]) -> Tokenizer:
    """The tokenizer that all of them were trained with.

    Raises:
        ConfigError: they were not; names the first other one.
    """
    for name, trained in zip(names, runs, strict=True):
        if trained.tokenizer.model != runs[0].tokenizer.model:
            raise ConfigError(f"{name} has another tokenizer than {names[0]}; only models with one can work together")
    return runs[0].tokenizer


@torch.no_grad()
def average(models: Sequence[nn.Module]) -> nn.Module:
    """A model with the mean of the weights of some that differ in nothing else, as of the checkpoints of one run
    (Vaswani et al., 2017, section 6.1). Sums are in fp64; buffers and integers are the first's.

    Raises:
        ConfigError: their parameters have different names or shapes.
    """
    result = copy.deepcopy(models[0])
    parameters = [dict(model.named_parameters()) for model in models]
    for other in parameters[1:]:
        if {n: p.shape for n, p in other.items()} != {n: p.shape for n, p in parameters[0].items()}:
            raise ConfigError("only models of one size can be averaged; leave out --average to let them vote")
    for name, parameter in result.named_parameters():
        parameter.copy_(torch.stack([one[name].double() for one in parameters]).mean(dim=0))
    return result
