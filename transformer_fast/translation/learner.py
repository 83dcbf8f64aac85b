"""Training state: model, optimizer and moving average; updates them and converts them to and from tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import backends
from ..models import Transformer
from .batching import Batch
from .checkpoint import Tensors
from .config import TrainConfig
from .environment import amp_dtype
from .evaluate import batch_loss
from .model import load_model_tensors, load_optimizer_tensors, model_tensors, optimizer_tensors
from .optim import MovingAverage, build_optimizer, learning_rate
from .ranks import Ranks, distribute, gradient_sync


class Learner:
    """Share of the model in one process; the whole model if there is one process.

    Args:
        config: the settings.
        model: freshly initialised, the same in every process; it is moved to `device`, and sharded with `config.shard`.
        device: device of this process. ranks: the training processes.

    A method marked "collective" must be called in every process, or those that call it wait forever.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device, ranks: Ranks) -> None:
        self.config, self.device, self.ranks = config, device, ranks
        self.amp = amp_dtype(config, device)
        self.model = model.to(device)
        if isinstance(model, Transformer) and _has_no_fused_attention(device, self.amp):
            model.packed = False  # the reference computes a packed batch one sentence after another
        self.sharded = config.shard and ranks.world_size > 1
        # Rank 0 validates alone, for which it needs a model that is not sharded.
        self._full_model = copy.deepcopy(model).cpu() if self.sharded and not ranks.rank else None
        self._loss = distribute(_Loss(model, config.label_smoothing), ranks, device if self.sharded else None)
        self.optimizer = build_optimizer(model, config)
        self.ema = MovingAverage(model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == torch.float16)

    def update(self, step: int, batches: Sequence[Batch], tokens: int) -> tuple[Tensor, Tensor]:
        """Update `step` (1, 2, ...), from this process's parts of batches that have `tokens` targets in all processes.
        Collective.

        Returns:
            The sum of this process's losses, in nats, and the norm of the gradient of the mean loss; 0-dim tensors.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for left, batch in zip(reversed(range(len(batches))), batches):
            with gradient_sync(self._loss, left == 0):
                with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
                    # DDP averages the gradients of the processes; here the sum is needed.
                    loss = self._loss(batch.to(self.device)) * self.ranks.world_size
                # Divided by the tokens of the whole update: every token weighs the same, however the batches split.
                loss = loss / tokens
                self.scaler.scale(loss).backward()
            total += loss.detach() * tokens / self.ranks.world_size
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update(step)
        norm = norm.full_tensor() if self.sharded else norm
        # The scaler skips updates with infinite gradients by itself, so their norm is not reported.
        return total, torch.zeros_like(norm) if self.scaler.is_enabled() else norm

    def tensors(self) -> dict[str, Tensors]:
        """Tensors for a checkpoint, unsharded: groups "model", "optimizer" and optionally "ema". Collective."""
        groups = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.model, self.optimizer)}
        if self.ema:
            groups["ema"] = groups["model"] | self.ema.tensors()
        return groups

    def load(self, groups: dict[str, Tensors]) -> None:
        """Load what `tensors` returned; each process gets all tensors. Collective.

        Raises:
            CheckpointError: the tensors are of another model.
        """
        load_model_tensors(self.model, groups["model"])
        load_optimizer_tensors(self.model, self.optimizer, groups["optimizer"])
        if self.ema:
            self.ema.load(groups["ema"])

    def eval_model(self) -> nn.Module:
        """The model that is validated, with the moving average where there is one; only rank 0 may use it.
        Collective."""
        if not self.ema and not self.sharded:
            return self.model
        tensors = model_tensors(self.model)
        if self.ema:
            tensors |= self.ema.tensors()
        return self.model if self.ranks.rank else self.copy_with(tensors)

    def copy_with(self, tensors: Tensors) -> nn.Module:
        """An unsharded model with other weights; on rank 0."""
        model = copy.deepcopy(self._full_model or self.model)
        load_model_tensors(model, tensors)
        return model.to(self.device)


def _has_no_fused_attention(device: torch.device, amp: torch.dtype | None) -> bool:
    return backends.choose("attention", device, amp or torch.float32)[0] == "reference"


class _Loss(nn.Module):
    """`batch_loss` as a module, which DDP and FSDP wrap."""

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> Tensor:
        return batch_loss(self.model, batch, self.smoothing)
