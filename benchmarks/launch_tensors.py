"""The tensors of a launch: without contents where it is only described, with contents where it is measured."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transformer_fast.triton.launcher import Launch

META = "meta"


def values(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Input of a kernel: normal numbers."""
    return torch.randn(shape, dtype=dtype, device=device)


def results(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Output of a kernel: NaN until the kernel writes it."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def number(value: int, device: str) -> Tensor:
    """A seed, as kernels read it: int64 (1,)."""
    return torch.full((1,), value, dtype=torch.int64, device=device)


def storages(launches: Iterable[Launch]) -> list[Tensor]:
    """Return the storage of every tensor of the launches once, as a flat tensor."""
    found = {}
    for launch in launches:
        for value in launch.arguments.values():
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                found[storage.data_ptr()] = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
    return list(found.values())
