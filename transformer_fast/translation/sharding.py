"""A model whose parameters are spread over processes (FSDP2), and full tensors in and out of it.

FSDP and DTensor are imported where they are used: that takes a second, which translating should not wait for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def shard(module: nn.Module, device: torch.device) -> None:
    """Spread the parameters of `module` over all processes, in place: every block of a stack by itself, which is then
    whole only while it computes, and the rest together (Zhao et al. 2023, "PyTorch FSDP"; the per-parameter form)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for block in (block for stack in stacks for block in stack):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def gather_full(tensor: Tensor) -> Tensor:
    """All of a tensor: of a DTensor, on the CPU, and then every process must call this; else the tensor itself."""
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
