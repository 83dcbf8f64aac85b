"""Definition of a mask: which key each query sees, stated once, part by part.

The reference of attention, ``AttentionMask.dense`` and ``explain`` evaluate it. Kernels read most parts as they are;
:mod:`transformer_fast.masks.kernel_parts` converts the others, and is tested against this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    Lq: int,
    Lk: int,
    device: torch.device | str | None = None,
    *,
    keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: int | None = None,
    window: int | None = None,
    others: Sequence[Tensor] = (),
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    shift: int | Tensor = 0,
) -> Tensor:
    """The mask as one bool tensor (B|1, H|1, Lq|1, Lk): True where query i sees key j.

    A key is seen if every part allows it. The query stands at position ``p = i + shift`` among the keys.

    Args:
        Lq, Lk: numbers of queries and keys; of a packed batch, those of one sequence, with its keys in use.
        device: device of the parts.
        keep: bool, broadcastable to (B, H, Lq, Lk): True is allowed.
        key_keep: bool (B|1, H|1, 1, Lk), likewise.
        lengths: (B,) or (B, Lq): ``j < lengths[b]`` or ``j < lengths[b, i]``; keys in use of a cache or of a sequence.
        causal: ``j <= p + causal``.
        window: ``j >= p + window``.
        others: bool, broadcastable to (B, H, Lq, Lk), each like ``keep``: :func:`inside` and :func:`either`.
        query_ids, key_ids: (B|1, Lq) and (B|1, Lk), both or neither: ``query_ids[b, i] == key_ids[b, j]``.
        shift: position of the first query, for all sequences or (B,): ``keys - queries`` aligns the last query with the
            last key (bottom-right), as in a cache.
    """
    j = torch.arange(Lk, device=device)
    p = torch.arange(Lq, device=device).unsqueeze(1)
    p = p + (shift[:, None, None, None] if isinstance(shift, Tensor) and shift.dim() == 1 else shift)
    allowed = torch.ones(1, 1, 1, Lk, dtype=torch.bool, device=device)
    if keep is not None:
        allowed = allowed & keep
    if key_keep is not None:
        allowed = allowed & key_keep
    if lengths is not None:
        per_query = lengths if lengths.dim() == 2 else lengths.unsqueeze(1)
        allowed = allowed & (j < per_query[:, None, :, None])
    if causal is not None:
        allowed = allowed & (j <= p + causal)
    if window is not None:
        allowed = allowed & (j >= p + window)
    for other in others:
        allowed = allowed & other
    if query_ids is not None and key_ids is not None:
        allowed = allowed & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
    return allowed


def inside(begin: Tensor | None, end: Tensor | None, Lk: int) -> Tensor:
    """Intervals: ``begin[b, h, i] <= j < end[b, h, i]``, of bounds (B|1, H|1, Lq|1); None is no bound."""
    bounds = [t for t in (begin, end) if t is not None]
    j = torch.arange(Lk, device=bounds[0].device if bounds else None)
    after = torch.ones_like(j, dtype=torch.bool) if begin is None else j >= begin.unsqueeze(-1)
    return after if end is None else after & (j < end.unsqueeze(-1))


def either(masks: Sequence[Tensor]) -> Tensor:
    """A union: a key is seen if one of the masks allows it."""
    allowed = masks[0]
    for mask in masks[1:]:
        allowed = allowed | mask
    return allowed
