"""Fixed seed for all dropout masks, so that a reference can use the same mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from ..ops import seeds


@contextlib.contextmanager
def fixed_dropout_seed(value: int) -> Iterator[Tensor]:
    """Draw every dropout mask of this package's ops from one seed.

    Args:
        value: the seed, any int64.

    Yields:
        The seed as an int64 tensor (1,) on the CPU, as the functions of ``transformer_fast.reference`` take it.
    """
    drawn: dict[torch.device, Tensor] = {}

    def draw(device: torch.device) -> Tensor:
        return drawn.setdefault(device, torch.tensor([value], dtype=torch.int64, device=device))

    with mock.patch.multiple(seeds, draw_seed=draw, draw_launch_seed=draw):
        yield torch.tensor([value], dtype=torch.int64)
