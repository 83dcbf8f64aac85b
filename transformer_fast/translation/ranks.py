"""Several processes that train one model together, as torchrun starts them. Alone, everything here does nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .batching import Batch
from .evaluate import batch_loss
from .sharding import shard


class Ranks:
    """This process among those that train.

    Attributes:
        rank, world: its number, and how many there are. Files and reports are the first one's (``rank == 0``).
    """

    def __init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world > 1 else 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def total(self, number: float) -> float:
        """The sum of everyone's number."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def largest(self, number: float) -> float:
        """The largest of everyone's numbers."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: float, operation: Any) -> float:
        if self.world == 1:
            return number
        # On the CPU, over gloo: it waits for no GPU.
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value, operation)
        return value.item()

    def of_the_first(self, value: Any) -> Any:
        """The first one's value, for all."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, a uint8 (n,) on the CPU, by rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        if self.world == 1:
            return [tensor]
        dist.all_gather(parts, tensor)
        return parts


class Objective(nn.Module):
    """The loss of this process's part of a batch, whose gradients are summed over all processes.

    Args:
        model: the model; every process has the same.
        smoothing: label smoothing.
        ranks: the processes.
        sharded_on: spread the model's parameters over the processes (FSDP2), which are on devices of this kind; None
            keeps a whole model in each (DDP).
    """

    def __init__(
        self, model: nn.Module, smoothing: float, ranks: Ranks, sharded_on: torch.device | None = None
    ) -> None:
        super().__init__()
        self._loss = _Loss(model, smoothing)
        self._world, self._sharded = ranks.world, sharded_on is not None
        if sharded_on is not None:
            shard(self._loss, sharded_on)
        elif ranks.world > 1:
            # Buffers are constants here; the option that says so has another name from torch 2.13 on.
            known = inspect.signature(DistributedDataParallel).parameters
            option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            self._loss = DistributedDataParallel(self._loss, **{option: False})

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the loss over this part's targets, scaled so that its gradient becomes part of the sum of all."""
        return self._loss(batch) * self._world  # both ways of training together take the mean

    def separately(self, separate: bool) -> Any:
        """Context in which gradients stay with their process, where more are to be added to them."""
        if self._sharded:
            self._loss.set_requires_gradient_sync(not separate)
            return contextlib.nullcontext()
        return self._loss.no_sync() if separate and self._world > 1 else contextlib.nullcontext()


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> Tensor:
        return batch_loss(self.model, batch, self.smoothing)


def scatter_random(ranks: Ranks, seed: int, step: int) -> None:
    """Give every process but the first random numbers of its own: its rows are not the first one's. Initial weights
    must have been drawn before."""
    if not ranks.first:
        draws = random.Random(f"transformer_fast dropout {seed} {ranks.rank} {step}")
        torch.manual_seed(draws.getrandbits(63))


def random_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Everyone's generators: "rng:cpu" of the first process, "rng:cpu:1" of the second, and so on."""
    states = {"rng:cpu": ranks.gathered(torch.get_rng_state())}
    if device.type == "cuda":
        states["rng:cuda"] = ranks.gathered(torch.cuda.get_rng_state(device))
    return {f"{name}:{rank}" if rank else name: s for name, all in states.items() for rank, s in enumerate(all)}


def continue_random(ranks: Ranks, states: dict[str, Tensor], device: torch.device, seed: int, step: int) -> None:
    """Continue this process's generators where :func:`random_states` left them; one that was not there begins anew."""
    own = f":{ranks.rank}" if ranks.rank else ""
    if f"rng:cpu{own}" not in states:
        scatter_random(ranks, seed, step)
        return
    torch.set_rng_state(states[f"rng:cpu{own}"])
    if f"rng:cuda{own}" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng:cuda{own}"], device)


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The processes torchrun started, connected: over gloo on the CPU, over NCCL between GPUs."""
    started_by_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if not started_by_torchrun or dist.is_initialized():
        yield Ranks()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()
