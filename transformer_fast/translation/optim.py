"""Adam as the paper sets it, and its learning rate."""

from __future__ import annotations

import torch
from torch import nn

from .config import TrainConfig


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
