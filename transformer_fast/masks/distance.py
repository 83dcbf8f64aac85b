"""Biases that depend on the distance between query and key alone: ALiBi and T5's relative positions.

The distance of query i and key j is ``j - (i + offset)``. Such a bias is a table with one entry per distance; its size
is linear in the lengths. The kernels read the table along diagonals.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


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
        """Source text of the mask's constructor, with this text for the slopes."""
        return f"alibi({slopes}{f', offset={self.offset}' if self.offset else ''})"

    def heads(self) -> tuple[int, int]:
        """Number of batch entries (1 for a table shared by all) and number of heads."""
        return (1 if self.slopes.dim() == 1 else self.slopes.shape[0]), self.slopes.shape[-1]

    def table(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Bias (B|1, H, count) of keys ``first`` to ``first + count - 1`` after the query's number."""
        distances = _distances(first - self.offset, count, self.slopes.device)
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes.unsqueeze(0)
        return -slopes.to(dtype).unsqueeze(-1) * distances.abs().to(dtype)


@dataclass(frozen=True, eq=False)
class Relative:
    """A learned bias for each bucket of distances (Raffel et al., "Exploring the Limits of Transfer Learning with a
    Unified Text-to-Text Transformer", 2020): each near distance has its own bucket; far distances share buckets of
    logarithmic width.

    Args:
        weight: float (buckets, H).
        max_distance: from here on all distances share the last bucket.
        bidirectional: half of the buckets are for keys after the query; if False, keys after the query count as
            distance 0.
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
        """Source text of the mask's constructor, with this text for the weight."""
        usual = {"max_distance": 128, "bidirectional": True, "offset": 0}
        options = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        return f"relative({', '.join([weight, *(f'{name}={value}' for name, value in options.items())])})"

    def heads(self) -> tuple[int, int]:
        """Number of batch entries (always 1) and number of heads."""
        return 1, self.weight.shape[1]

    def table(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Bias (1, H, count) of keys ``first`` to ``first + count - 1`` after the query's number."""
        distances = _distances(first - self.offset, count, self.weight.device)
        number = self.weight.shape[0]
        buckets = relative_buckets(distances, number, self.max_distance, self.bidirectional)
        # A product with a one-hot matrix sums its gradient in a fixed order; indexing on a GPU does not.
        selected = torch.nn.functional.one_hot(buckets, number).to(dtype)
        with _no_autocast(self.weight):
            return (selected @ self.weight.to(dtype)).t().unsqueeze(0)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of each distance (key minus query), int64 like ``distances``."""
    later = torch.zeros_like(distances)
    if bidirectional:
        buckets = buckets // 2
        later = (distances > 0) * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # In fp32 and in T5's order of operations: rounding decides the bucket of distances at a bucket's edge.
    far = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.to(torch.int64)).clamp(max=buckets - 1)
    return later + torch.where(distances < exact, distances, far)


def _distances(first: int, count: int, device: torch.device) -> Tensor:
    """Distances, int64 (count,), from ``first`` on; empty for count -1 (no queries and no keys). The count is not
    compared with 0, because a traced graph would record the result as a constant."""
    return torch.arange(first, first + count + 1, device=device)[:-1]


def _no_autocast(t: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disable autocast on the tensor's device, so that tables keep their dtype."""
    if t.is_meta or not torch.is_autocast_enabled(t.device.type):
        return contextlib.nullcontext()
    return torch.autocast(t.device.type, enabled=False)


DistanceBias = Alibi | Relative
"""Bias by the distance of key and query."""


def distance_table(biases: tuple[DistanceBias, ...], Lq: int, Lk: int, zero: int, dtype: torch.dtype) -> Tensor | None:
    """Sum of biases as the kernels read it: (B|1, H, Lq + Lk - 1); query i and key j get entry ``zero + j - i``."""
    if not biases:
        return None
    tables = [bias.table(-zero, Lq + Lk - 1, dtype) for bias in biases]
    return sum(tables[1:], tables[0]).contiguous()


def along_diagonals(table: Tensor, Lq: int, Lk: int, zero: int) -> Tensor:
    """Expand a table of distances to a dense bias (..., Lq, Lk); query i and key j get entry ``zero + j - i``."""
    i, j = torch.arange(Lq, device=table.device), torch.arange(Lk, device=table.device)
    return table[..., j - i.unsqueeze(-1) + zero]
