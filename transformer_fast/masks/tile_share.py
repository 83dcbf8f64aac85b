"""Count the tiles of an attention call that hold work, in plain PyTorch: for ``explain``, benchmarks and tests.

The count covers the tiles that :mod:`.triton.attention.tile_map` finds on the device, and the limits that kernels
compute by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Classes of a tile: no pair (query, key) allowed, some pairs, all pairs."""


@dataclass(frozen=True, slots=True)
class WorkShare:
    """Number of tiles of a call, by class.

    Args:
        tiles: all tiles of the padded (queries x keys), per batch entry and per head with its own mask.
        full: tiles without a blocked (query, key); the kernels run them without mask code.
        partial: tiles with allowed and blocked pairs.
    """

    tiles: int
    full: int
    partial: int

    @property
    def share(self) -> float:
        """Share of tiles that hold work, which the kernels visit. 0 if there are no tiles."""
        return (self.full + self.partial) / self.tiles if self.tiles else 0.0


def tile_classes(
    B: int,
    Lq: int,
    Lk: int,
    tile: tuple[int, int],
    *,
    keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: int | None = None,
    window: int | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
) -> Tensor:
    """Class of each tile: int8 (B, H|1, query tiles, key tiles).

    Memory: one byte per tile, and with `keep`, `key_keep` or ids one bool per (query, key).

    Args:
        B, Lq, Lk: batch size, queries, keys; at least one of each.
        tile: queries and keys per tile.
        keep, key_keep, lengths, causal, window, query_ids, key_ids: the parts of a mask, as the kernels take them.
    """
    queries, keys = tile
    device = next((t.device for t in (keep, key_keep, lengths, query_ids) if t is not None), None)
    i = torch.arange(Lq, device=device)
    limit = torch.full((B, Lq), Lk, device=device)
    if causal is not None:
        limit = torch.minimum(limit, i + causal + 1)
    if lengths is not None:
        limit = torch.minimum(limit, lengths.view(B, -1))
    start = torch.zeros_like(i) if window is None else i + window
    # Queries past the last one repeat the last query; keys past the last one are blocked.
    row_tiles, key_tiles = -(-Lq // queries), -(-Lk // keys)
    rows = torch.arange(row_tiles * queries, device=device).clamp_max(Lq - 1)
    limit, start = limit[:, rows], start[rows]
    first = torch.arange(key_tiles, device=device) * keys
    if keep is None and key_keep is None and query_ids is None:
        limit, start = limit.view(B, 1, row_tiles, queries, 1), start.view(row_tiles, queries, 1)
        some = ((limit > first) & (start < first + keys) & (start < limit)).any(3)
        every = ((limit >= first + keys) & (start <= first)).all(3)
        return some.to(torch.int8) + every
    column = torch.arange(key_tiles * keys, device=device)
    allowed = (column < limit[:, None, :, None]) & (column >= start[:, None])
    column = column.clamp_max(Lk - 1)
    if keep is not None:
        allowed = allowed & keep.expand(-1, -1, Lq, Lk)[:, :, rows][..., column]
    if key_keep is not None:
        allowed = allowed & key_keep[..., column]
    if query_ids is not None and key_ids is not None:
        allowed = allowed & (query_ids[:, None, rows, None] == key_ids[:, None, None, column])
    allowed = allowed.unflatten(2, (row_tiles, queries)).unflatten(4, (key_tiles, keys))
    return allowed.any(5).any(3).to(torch.int8) + allowed.all(5).all(3)


def work_share(B: int, Lq: int, Lk: int, tile: tuple[int, int], **mask: Any) -> WorkShare:
    """Count the tiles of a call; arguments as for :func:`tile_classes`."""
    if B == 0 or Lq == 0 or Lk == 0:
        return WorkShare(0, 0, 0)
    classes = tile_classes(B, Lq, Lk, tile, **mask)
    return WorkShare(classes.numel(), int((classes == FULL).sum()), int((classes == PARTIAL).sum()))
