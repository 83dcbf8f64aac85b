"""A moving average of the weights, which is validated and translates in their place."""

from __future__ import annotations

import torch
from torch import nn

from .checkpoint import Tensors
from .sharding import distribute_like, gather_full


class MovingAverage:
    """Keeps `decay * average + (1 - decay) * weight` for every parameter, updated after each update of the weights.

    Args:
        model: whose parameters to follow; the average begins at what they are.
        decay: 0 <= decay < 1. The first updates use less, min(decay, (1 + n) / (10 + n)) at update n, so that the
            initial weights are forgotten; a pure function of the step, so that nothing but the average is saved.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._pairs = [(name, p, p.detach().clone()) for name, p in model.named_parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step` (1, 2, ...)."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for _, parameter, average in self._pairs:
            average.lerp_(parameter, share)

    def tensors(self) -> Tensors:
        """The full averages by the parameters' names; of a sharded model, every process must call this."""
        return {name: gather_full(average) for name, _, average in self._pairs}

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Continue from `tensors`, which has at least the names of :meth:`tensors`."""
        for name, _, average in self._pairs:
            average.copy_(distribute_like(tensors[name], average))
