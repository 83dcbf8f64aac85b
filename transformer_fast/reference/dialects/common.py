"""Shared parts of the texts: their base class, the width of a head, and positions past a stored table."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..embedding import positional_table


class Text(nn.Module):
    """Base of modules that have a fast form: a subclass with another ``forward``, in :mod:`transformer_fast.dialects`.

    Attributes:
        family: the module of this package whose classes make the parts, so the constructor of a text is also that of
            its fast form.
    """

    family: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(__package__.partition(".")[0] + "."):
            cls.family = sys.modules[cls.__module__]


def head_width(module: object, width: int, heads: int) -> int:
    """Return ``width / heads``; raise a ValueError that names the module if heads does not divide width."""
    if heads < 1 or width % heads != 0:
        name = type(module).__name__
        raise ValueError(f"{name}: the width must be a multiple of the number of heads, got {width} and {heads} heads")
    return width // heads


def extended(table: Tensor, length: int) -> Tensor:
    """Return a sinusoidal table (1, n, d) with at least ``length`` positions, those past n computed."""
    if table.shape[1] >= length:
        return table
    beyond = positional_table(length, table.shape[2])[table.shape[1] :]
    return torch.cat((table, beyond.unsqueeze(0).to(table)), dim=1)
