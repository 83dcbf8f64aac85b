"""A model that learns: its optimizer, its moving average, one update of them, and their tensors in and out."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .batching import Batch
from .checkpoint import Tensors
from .config import TrainConfig
from .ema import MovingAverage
from .environment import amp_dtype
from .model import load_model_tensors, load_optimizer_tensors, model_tensors, optimizer_tensors
from .optim import build_optimizer, learning_rate
from .ranks import Objective, Ranks


class Learner:
    """One process's part of it, which is all of it where there is one.

    Args:
        config: the settings.
        model: freshly initialised, the same in every process; it is moved to `device`, and spread with `config.shard`.
        device: of this process. ranks: the processes.

    What is said to be for all must be called in every process, or those that call it wait forever.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device, ranks: Ranks) -> None:
        self.config, self.device, self.ranks = config, device, ranks
        self.amp = amp_dtype(config, device)
        self.model = model.to(device)
        self.sharded = config.shard and ranks.world > 1
        # The first process measures alone, for which the model must be whole.
        self._twin = copy.deepcopy(model).cpu() if self.sharded and ranks.first else None
        self.objective = Objective(model, config.label_smoothing, ranks, device if self.sharded else None)
        self.optimizer = build_optimizer(model, config)
        self.ema = MovingAverage(model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == torch.float16)

    def update(self, step: int, batches: Sequence[Batch], tokens: int) -> tuple[Tensor, Tensor]:
        """Update `step` (1, 2, ...), from this process's parts of batches that have `tokens` targets in all processes.
        For all.

        Returns:
            The sum of this process's losses, in nats, and the norm of the gradient of the mean loss; 0-dim tensors.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for left, batch in zip(reversed(range(len(batches))), batches):
            with self.objective.separately(left > 0):
                # Divided by the tokens of the whole update: every token weighs the same, however the batches split.
                loss = self._loss(batch) / tokens
                self.scaler.scale(loss).backward()
            total += loss.detach() * tokens / self.ranks.world
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update(step)
        # The scaler skips updates with infinite gradients by itself: their norm is no news.
        norm = norm.full_tensor() if self.sharded else norm
        return total, torch.zeros_like(norm) if self.scaler.is_enabled() else norm

    def _loss(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            return self.objective(batch)

    def tensors(self) -> dict[str, Tensors]:
        """All that a checkpoint holds of it, whole: groups "model", "optimizer" and perhaps "ema". For all."""
        groups = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.model, self.optimizer)}
        if self.ema:
            groups["ema"] = groups["model"] | self.ema.tensors()
        return groups

    def load(self, groups: dict[str, Tensors]) -> None:
        """The inverse of `tensors`, each process with all of them. For all.

        Raises:
            CheckpointError: they are of another model.
        """
        load_model_tensors(self.model, groups["model"])
        load_optimizer_tensors(self.model, self.optimizer, groups["optimizer"])
        if self.ema:
            self.ema.load(groups["ema"])

    def served(self) -> nn.Module:
        """The model that is validated, with the moving average where there is one; only the first process may use it.
        For all."""
        if not self.ema and not self.sharded:
            return self.model
        tensors = model_tensors(self.model)
        if self.ema:
            tensors |= self.ema.tensors()
        return self.copy_with(tensors) if self.ranks.first else self.model

    def copy_with(self, tensors: Tensors) -> nn.Module:
        """A whole model with other weights; in the first process."""
        model = copy.deepcopy(self._twin or self.model)
        load_model_tensors(model, tensors)
        return model.to(self.device)
