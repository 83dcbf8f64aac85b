"""Biases that depend on the distance between query and key alone: ALiBi and T5's relative positions.

Query i and key j are at distance ``j - (i + offset)``. Such a bias is a table with an entry for each distance, linear
in the lengths, from which the kernels read diagonals.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..tracing import sizes


@dataclass(frozen=True, eq=False)
class Alibi:
    """``-slope * |j - (i + offset)|`` (Press, Smith and Lewis, "Train Short, Test Long", 2022).

    Args:
        slopes: float (H,) or (B, H); they may be learned.
        offset: position of the first query among the keys.
    """

    slopes: Tensor
    offset: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.slopes

    def with_tensor(self, tensor: Tensor) -> Alibi:
        return replace(self, slopes=tensor)

    def written(self, slopes: str) -> str:
        """The constructor of the mask, with this text for the slopes."""
        return f"alibi({slopes}{f', offset={self.offset}' if self.offset else ''})"

    def heads(self) -> tuple[int, int]:
        """For how many batch entries and heads it is given; 1 batch entry for all."""
        return (1 if self.slopes.dim() == 1 else self.slopes.shape[0]), self.slopes.shape[-1]

    def table(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """The bias (B|1, H, count) of keys ``first`` to ``first + count - 1`` after the query's number."""
        distances = _distances(first - self.offset, count, self.slopes.device)
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes.unsqueeze(0)
        return -slopes.to(dtype).unsqueeze(-1) * distances.abs().to(dtype)


@dataclass(frozen=True, eq=False)
class Relative:
    """A learned bias for each bucket of distances (Raffel et al., "Exploring the Limits of Transfer Learning with a
    Unified Text-to-Text Transformer", 2020): near distances have a bucket each, farther ones share them by logarithm.

    Args:
        weight: float (buckets, H).
        max_distance: from here on all distances share the last bucket.
        bidirectional: half of the buckets are for keys after the query; else all of those are at distance 0.
        offset: position of the first query among the keys.
    """

    weight: Tensor
    max_distance: int = 128
    bidirectional: bool = True
    offset: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.weight

    def with_tensor(self, tensor: Tensor) -> Relative:
        return replace(self, weight=tensor)

    def written(self, weight: str) -> str:
        """The constructor of the mask, with this text for the weight."""
        usual = {"max_distance": 128, "bidirectional": True, "offset": 0}
        given = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        return f"relative({', '.join([weight, *(f'{name}={value}' for name, value in given.items())])})"

    def heads(self) -> tuple[int, int]:
        """For how many batch entries and heads it is given."""
        return 1, self.weight.shape[1]

    def table(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """The bias (1, H, count) of keys ``first`` to ``first + count - 1`` after the query's number."""
        distances = _distances(first - self.offset, count, self.weight.device)
        number = sizes(self.weight)[0]
        buckets = relative_buckets(distances, number, self.max_distance, self.bidirectional)
        # The gradient of a product with a one-hot matrix is summed in a fixed order, that of an index is not on a GPU.
        selected = torch.nn.functional.one_hot(buckets, number).to(dtype)
        with _no_autocast(self.weight):
            return (selected @ self.weight.to(dtype)).t().unsqueeze(0)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of each distance (key minus query), int64 like ``distances``."""
    later = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        later = (distances > 0) * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # In fp32 and in this order, as T5 was trained: its rounding decides on which side of a bucket's edge a distance is.
    far = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.to(torch.int64)).clamp(max=buckets - 1)
    return later + torch.where(distances < exact, distances, far)


def _distances(first: int, count: int, device: torch.device) -> Tensor:
    """int64 (count,), from ``first`` on; none for the count of -1 that no queries and no keys have. It is not compared
    with 0, as that would be a constant of a traced graph."""
    return torch.arange(first, first + count + 1, device=device)[:-1]


def _no_autocast(t: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast off where a tensor lives: the kernels read tables in the dtype that was asked for."""
    if t.is_meta or not torch.is_autocast_enabled(t.device.type):
        return contextlib.nullcontext()
    return torch.autocast(t.device.type, enabled=False)


DistanceBias = Alibi | Relative
"""A bias by the distance of key and query."""


def distance_table(biases: tuple[DistanceBias, ...], Lq: int, Lk: int, zero: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of biases as the kernels read it: (B|1, H, Lq + Lk - 1), for query i and key j entry ``zero + j - i``."""
    if not biases:
        return None
    tables = [bias.table(-zero, Lq + Lk - 1, dtype) for bias in biases]
    return sum(tables[1:], tables[0]).contiguous()


def along_diagonals(table: Tensor, Lq: int, Lk: int, zero: int) -> Tensor:
    """A table of distances as a dense bias (..., Lq, Lk), for query i and key j its entry ``zero + j - i``."""
    i, j = torch.arange(Lq, device=table.device), torch.arange(Lk, device=table.device)
    return table[..., j - i.unsqueeze(-1) + zero]
