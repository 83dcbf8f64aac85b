"""Adam with the paper's settings, the learning-rate schedule, and a moving average of the weights."""

from __future__ import annotations

import torch
from torch import nn

from .checkpoint import Tensors
from .config import TrainConfig
from .ranks import distribute_like, gather_full


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of update `step` (1, 2, ...): linear up to `lr` at `warmup`, then falling with the inverse square root.

        lr * min(step / warmup, sqrt(warmup / step))

    the schedule of the paper (section 5.3) written with its peak instead of d_model**-0.5. Over the last `cooldown`
    of `max_steps` updates it is also multiplied by a factor that falls linearly from 1 to 0. A pure function of the
    step, so a resumed run needs no schedule state.
    """
    rate = config.lr * min(step / config.warmup, (config.warmup / step) ** 0.5)
    left = config.max_steps - step + 1
    return rate * min(1.0, left / (config.cooldown + 1)) if config.cooldown else rate


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Adam:
    """Adam with beta 0.9 and 0.98, eps 1e-9 (the paper, section 5.3), in torch's fused form."""
    return torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.9, 0.98), eps=1e-9, fused=True)


class MovingAverage:
    """Keeps `decay * average + (1 - decay) * weight` for every parameter, updated after each update of the weights.

    Args:
        model: model whose parameters are averaged; the average begins with the current parameters.
        decay: 0 <= decay < 1. Update n uses min(decay, (1 + n) / (10 + n)), so that the initial weights lose influence
            quickly. The decay depends on the step only, so a checkpoint saves just the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._pairs = [(name, p, p.detach().clone()) for name, p in model.named_parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages with the weights after update `step` (1, 2, ...)."""
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
