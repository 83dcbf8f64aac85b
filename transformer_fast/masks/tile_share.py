"""Count the tiles of an attention call that hold work, in plain PyTorch: for ``explain``, benchmarks and tests.

The count covers the tiles that :mod:`.triton.attention.tile_map` finds on the device, and the limits that kernels
compute by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .lower import lower
from .mask import AttentionMask

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

    Memory: one byte per tile, and with a keep mask or documents that are no intervals one bool per (query, key).

    Args:
        B, Lq, Lk: batch size, queries, keys; at least one of each.
        tile: queries and keys per tile.
        keep, key_keep, lengths, causal, window, query_ids, key_ids: the parts of a mask, as the kernels take them.
    """
    queries, keys = tile
    ids = None if query_ids is None or key_ids is None else (query_ids, key_ids)
    mask = AttentionMask(keep, key_keep, lengths, causal, window_offset=window, document_ids=ids)
    lowered = lower(mask, Lq, Lk, exact=True)
    row_tiles, key_tiles = -(-Lq // queries), -(-Lk // keys)
    device = lowered.begin.device
    # Queries past the last one repeat the last query; keys past the last one are blocked.
    rows = torch.arange(row_tiles * queries, device=device).clamp_max(Lq - 1)
    if lowered.bits is None:
        intervals = lowered.begin[..., rows], lowered.end[..., rows]
        begin, end = (t.unflatten(2, (row_tiles, queries)).unsqueeze(-1) for t in intervals)
        first = torch.arange(key_tiles, device=device) * keys
        some = ((begin < end) & (begin < first + keys) & (end > first)).any(3)
        every = ((begin <= first) & (end >= first + keys)).all(3)
    else:
        allowed = lowered.dense()
        allowed = pad(allowed.expand(*allowed.shape[:2], Lq, Lk)[:, :, rows], (0, key_tiles * keys - Lk))
        allowed = allowed.unflatten(2, (row_tiles, queries)).unflatten(4, (key_tiles, keys))
        some, every = allowed.any(5).any(3), allowed.all(5).all(3)
    return (some.to(torch.int8) + every).expand(B, -1, -1, -1)


def work_share(B: int, Lq: int, Lk: int, tile: tuple[int, int], **mask: Any) -> WorkShare:
    """Count the tiles of a call; arguments as for :func:`tile_classes`."""
    if B == 0 or Lq == 0 or Lk == 0:
        return WorkShare(0, 0, 0)
    classes = tile_classes(B, Lq, Lk, tile, **mask)
    return WorkShare(classes.numel(), int((classes == FULL).sum()), int((classes == PARTIAL).sum()))
