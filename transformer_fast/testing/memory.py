"""Memory that PyTorch leaves uninitialised, filled with NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that PyTorch leaves uninitialised, in Python or in C++, with NaN.

    The NaN reveals kernels that read unwritten memory or leave part of their result unwritten.
    ``torch.use_deterministic_algorithms`` does the same, but imports the compiler, which takes two seconds per process.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filling
