"""A model whose parameters are spread over processes (FSDP2), and whole tensors in and out of it.

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


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU if it was spread; then every process must ask for it."""
    return tensor.full_tensor().cpu() if is_spread(tensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, which every process has, what this process keeps of one spread like `like`; on its device."""
    tensor = tensor.to(like.device)
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
