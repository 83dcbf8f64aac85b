"""The tensors of a launch: without contents for a prediction, with contents on a device for a measurement."""

from __future__ import annotations

import torch
from torch import Tensor

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
