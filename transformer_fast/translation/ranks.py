"""Several processes that train one model together, as torchrun starts them. With a single process these functions do
nothing.

FSDP and DTensor are imported where they are used: that takes a second, which translating should not wait for.
"""

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


class Ranks:
    """Rank of this process, and the number of training processes.

    Attributes:
        rank, world_size: its number, and how many there are. Rank 0 writes files and reports.
    """

    def __init__(self) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world_size > 1 else 0

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, number: float) -> float:
        """The sum of the numbers of all processes."""
        return self._all_reduce(number, dist.ReduceOp.SUM)

    def max(self, number: float) -> float:
        """The largest of the numbers of all processes."""
        return self._all_reduce(number, dist.ReduceOp.MAX)

    def _all_reduce(self, number: float, operation: Any) -> float:
        if self.world_size == 1:
            return number
        # On the CPU, over gloo, which waits for no GPU.
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value, operation)
        return value.item()

    def broadcast_from_rank0(self, value: Any) -> Any:
        """The value of rank 0, in all processes."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes by rank; on the CPU, of one shape."""
        parts = [tensor] * self.world_size
        if self.world_size > 1:
            parts = [torch.empty_like(tensor) for _ in parts]
            dist.all_gather(parts, tensor)
        return parts


def distribute(module: nn.Module, ranks: Ranks, sharded_on: torch.device | None) -> nn.Module:
    """Let all processes train `module` together: the mean of their gradients becomes that of each.

    sharded_on: spread the parameters over the processes (FSDP2), which are on devices of this kind; None keeps all
        parameters in each process (DDP).
    """
    if sharded_on is not None:
        _shard(module, sharded_on)
    elif ranks.world_size > 1:
        # Buffers are constants here; the option that says so has another name from torch 2.13 on.
        known = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DistributedDataParallel(module, **{option: False})
    return module


def _shard(module: nn.Module, device: torch.device) -> None:
    """Shard the parameters over the processes, in place (Zhao et al. 2023, "PyTorch FSDP"; the per-parameter form).

    Every block of a stack is sharded by itself and is complete only while it computes. The other parameters are sharded
    together.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for block in (block for stack in stacks for block in stack):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def gather_full(tensor: Tensor) -> Tensor:
    """Full tensor of a DTensor, on the CPU (every process must call this); any other tensor is returned unchanged."""
    return tensor.full_tensor().cpu() if _is_dtensor(tensor) else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor, which every process has, spread over the processes and put on the device as `like` is."""
    tensor = tensor.to(like.device)
    if not _is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


@contextlib.contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Context of forward and backward of a module of :func:`distribute`; gradients that stay with their process
    (`enabled` is False) are added to the next ones there."""
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
        module.set_requires_gradient_sync(enabled)
    local = isinstance(module, DistributedDataParallel) and not enabled
    with module.no_sync() if local else contextlib.nullcontext():
        yield


def seed_rank(ranks: Ranks, seed: int, step: int) -> None:
    """Give every process but rank 0 random numbers of its own, since its rows are not those of rank 0. Initial weights
    must have been drawn before."""
    if ranks.rank:
        draws = random.Random(f"transformer_fast dropout {seed} {ranks.rank} {step}")
        torch.manual_seed(draws.getrandbits(63))


def gather_rng_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """The generators of all processes: "rng:cpu" of rank 0, "rng:cpu:1" of rank 1, and so on."""
    states = {"rng:cpu": ranks.all_gather(torch.get_rng_state())}
    if device.type == "cuda":
        states["rng:cuda"] = ranks.all_gather(torch.cuda.get_rng_state(device))
    return {f"{name}:{rank}" if rank else name: s for name, all in states.items() for rank, s in enumerate(all)}


def restore_rng_states(ranks: Ranks, states: dict[str, Tensor], device: torch.device, seed: int, step: int) -> None:
    """Continue where :func:`gather_rng_states` was called; a process that did not exist then is seeded."""
    suffix = f":{ranks.rank}" if ranks.rank else ""
    if f"rng:cpu{suffix}" not in states:
        seed_rank(ranks, seed, step)
        return
    torch.set_rng_state(states[f"rng:cpu{suffix}"])
    if f"rng:cuda{suffix}" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng:cuda{suffix}"], device)


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
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
