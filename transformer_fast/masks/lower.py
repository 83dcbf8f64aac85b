"""Lower a mask to what a kernel can read: an interval of keys per query, and bits for what is no interval.

Lengths, causal and window with any offset, prefixes, aligned and packed sequences, and every intersection of them, are
intervals by arithmetic. Whether the tokens of a document, or the kept keys of a keep mask, lie in one run is known only
from their values. :func:`lower` narrows the interval to the first and last of them, on the device, and keeps the part
as bits. With ``exact=True`` it reads one number per such part, and drops the bits of a part that is an interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import reduce

import torch
from torch import Tensor

from ..tensor_cache import get_or_compute
from ..tracing import sizes
from .mask import AttentionMask, parts_beside
from .parts import both_documents

_PACKED = "causal_offset", "window_offset", "document_ids", "key_keep_mask", "additive_bias", "distance_biases"
"""Parts of a packed batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """Query i of head h, batch b, sees key j where ``begin[b, h, i] <= j < end[b, h, i]`` and the bits are True.

    Args:
        begin, end: int32 (B|1, H|1, Lq), with ``0 <= begin <= end <= keys``; equal for a query without keys.
        bits: bool, broadcastable to (B, H, Lq, keys); None if the intervals say all.
        keys: number of keys.
    """

    begin: Tensor
    end: Tensor
    bits: Tensor | None
    keys: int

    def dense(self) -> Tensor:
        """The mask as one bool tensor (B|1, H|1, Lq, keys)."""
        j = torch.arange(self.keys, device=self.begin.device)
        inside = (j >= self.begin.unsqueeze(-1)) & (j < self.end.unsqueeze(-1))
        return inside if self.bits is None else inside & self.bits

    def queries(self, tile: int) -> tuple[Tensor, Tensor]:
        """First and end query whose interval reaches into each tile of keys: int32 (B|1, H|1, tiles), for a backward
        over keys; both 0 for a tile that no interval reaches.

        The time is linear in the queries, and in the tiles times the logarithm of their number: a query marks two runs
        of 2^n tiles that cover its interval, and the marks of a run are handed on to its halves.
        """
        tiles, queries = -(-self.keys // tile), self.begin.shape[2]
        levels = max(tiles.bit_length(), 1)
        low, high = self.begin.long() // tile, (self.end.long() + tile - 1) // tile
        seeing = self.begin < self.end
        level = torch.zeros_like(low)
        for n in range(1, levels):
            level += high - low >= 2**n
        i = torch.arange(queries, device=low.device).expand_as(low)
        shape = *low.shape[:2], levels * tiles + 1  # the last entry is for queries without keys
        first, end = (torch.full(shape, n, device=low.device) for n in (queries, 0))
        for start in (low, high - (torch.ones_like(level) << level)):
            place = torch.where(seeing, level * tiles + start, levels * tiles)
            first = first.scatter_reduce(2, place, i, "amin")
            end = end.scatter_reduce(2, place, i + 1, "amax")
        first, end = (t[..., :-1].unflatten(2, (levels, tiles)) for t in (first, end))
        for n in range(levels - 1, 0, -1):
            half = 2 ** (n - 1)
            for marks, pick in ((first, torch.minimum), (end, torch.maximum)):
                runs, halves = marks[:, :, n], marks[:, :, n - 1]
                halves.copy_(pick(halves, runs))
                halves[..., half:] = pick(halves[..., half:], runs[..., : tiles - half])
        first, end = first[:, :, 0], end[:, :, 0]
        return torch.where(end > 0, first, 0).to(torch.int32), end.to(torch.int32)


def lower(
    mask: AttentionMask,
    Lq: int,
    Lk: int,
    device: torch.device | str | None = None,
    *,
    shift: int | Tensor = 0,
    exact: bool = False,
) -> Lowered:
    """Lower a mask for Lq queries and Lk keys. Biases are no part of the result.

    The time is linear in Lq + Lk, but for the bits and for sorting the ids of documents. Nothing waits for a device
    unless ``exact``. On a GPU the result is cached on the mask's tensors; on a CPU they are read in every call.

    Args:
        mask: the mask; its tensors are on one device.
        Lq, Lk: numbers of queries and keys.
        device: device of the result, for a mask without tensors.
        shift: position of the first query among the keys, an int or int (B,); ``keys - queries`` aligns the last query
            with the last key, as in a cache, whose keys in use are the mask's lengths.
        exact: read whether documents and keep masks are intervals, and drop the bits of those that are.
    """
    masks = mask.keep_mask, mask.key_keep_mask, mask.key_lengths, *(mask.document_ids or (None, None))
    parts = *masks, *(prefix.lengths for prefix in mask.prefixes), shift if isinstance(shift, Tensor) else None
    given = [t for t in parts if t is not None]
    device = given[0].device if given else device
    if not given or given[0].device.type == "cpu" or any(type(t) is not Tensor for t in given):
        return _lowered(mask, Lq, Lk, device, shift, exact)
    kinds = tuple(t is not None for t in parts)
    offsets = mask.causal_offset, mask.window_offset, tuple(prefix.offset for prefix in mask.prefixes)
    place = None if isinstance(shift, Tensor) else shift
    key: tuple[Hashable, ...] = ("lowered", kinds, offsets, place, Lq, Lk, exact)
    return get_or_compute(given[0], key, tuple(given[1:]), lambda: _lowered(mask, Lq, Lk, device, shift, exact))


def lower_packed(
    mask: AttentionMask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    queries: int,
    keys: int,
    *,
    seqused_k: Tensor | None = None,
    bottom_right: bool = False,
    exact: bool = False,
) -> Lowered:
    """Lower a packed batch to one row: all queries against all keys, where a query sees keys of its own sequence.

    Args:
        mask: the parts that ``attention_packed`` takes; offsets count within each sequence.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), where sequences begin and end.
        queries, keys: Tq and Tk. A query that no sequence covers sees no key.
        seqused_k: int32 (B,), keys in use per sequence.
        bottom_right: align the last query of a sequence with its last key in use.
        exact: as for :func:`lower`.

    Raises:
        ValueError: for other parts of a mask.
    """
    if given := parts_beside(mask, *_PACKED):
        raise ValueError(f"lower_packed: a packed batch has no {', '.join(given)}")
    device = cu_seqlens_q.device
    # An empty sequence is appended, for queries that no sequence covers.
    starts_q, starts_k = (torch.cat([cu, cu[-1:]]).long() for cu in (cu_seqlens_q, cu_seqlens_k))
    used = starts_k.diff()
    if seqused_k is not None:
        used = torch.cat([seqused_k.long(), used[-1:]])
    own_q, own_k = (
        torch.searchsorted(cu[1:].long(), torch.arange(n, device=device), right=True)
        for cu, n in ((cu_seqlens_q, queries), (cu_seqlens_k, keys))
    )
    position = torch.arange(queries, device=device) - starts_q[own_q]
    if bottom_right:
        position = position + (used - starts_q.diff())[own_q]
    begins, ends = _bounds(mask, position.view(1, 1, -1))
    begin, end = _joined(begins, [*ends, used[own_q].view(1, 1, -1)])
    starts = starts_k[own_q]
    begin, end = begin + starts, end.clamp(min=0) + starts
    # Equal ids in two sequences are two documents; the blocked keys of a sequence are one more.
    ids = own_q[None], own_k[None]
    if mask.document_ids is not None:
        ids = both_documents(ids, mask.document_ids)
    if mask.key_keep_mask is not None:
        ids = both_documents(ids, (torch.zeros_like(own_q)[None], ~mask.key_keep_mask[0, 0]))
    alone = mask.document_ids is None and mask.key_keep_mask is None
    return _narrowed(AttentionMask(document_ids=None if alone else ids), [begin], [end], queries, keys, exact)


def allowed(
    mask: AttentionMask, Lq: int, Lk: int, device: torch.device | str | None, *, shift: int | Tensor = 0
) -> Tensor | None:
    """The mask as one bool tensor (B|1, H|1, Lq|1, Lk), made of intervals and bits in operators that every exporter
    knows; None for a mask that allows all."""
    begins, ends = _bounds(mask, _positions(Lq, device, shift))
    j = torch.arange(Lk, device=device)
    # One comparison per bound: those that are the same for all sequences stay small.
    inside = [j >= begin.unsqueeze(-1) for begin in begins] + [j < end.unsqueeze(-1) for end in ends]
    inside += _scattered(mask)
    return reduce(torch.logical_and, inside) if inside else None


def prefix_ends(mask: AttentionMask, Lq: int, device: torch.device) -> Tensor:
    """End key of each query under the prefixes of a mask, which has some: int64 (B|1, Lq), not clamped to the keys."""
    _, ends = _bounds(AttentionMask(prefixes=mask.prefixes), _positions(Lq, device, 0))
    return reduce(torch.minimum, ends).squeeze(1)


def _positions(Lq: int, device: torch.device | str | None, shift: int | Tensor) -> Tensor:
    """Position of each query among the keys: int64 (B|1, 1, Lq)."""
    i = torch.arange(Lq, device=device).view(1, 1, -1)
    return i + (shift[:, None, None] if isinstance(shift, Tensor) and shift.dim() == 1 else shift)


def _bounds(mask: AttentionMask, position: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """First keys and end keys by arithmetic, int64, broadcastable to (B, 1, Lq)."""
    begins = [] if mask.window_offset is None else [position + mask.window_offset]
    ends = [] if mask.causal_offset is None else [position + (mask.causal_offset + 1)]
    if mask.key_lengths is not None:
        lengths = mask.key_lengths.to(torch.int64)
        ends.append(lengths.unsqueeze(1) if lengths.dim() == 2 else lengths[:, None, None])
    for lengths, offset in mask.prefixes:
        ends.append(torch.maximum(lengths.to(torch.int64)[:, None, None], position + (offset + 1)))
    return begins, ends


def _joined(begins: list[Tensor], ends: list[Tensor]) -> tuple[Tensor, Tensor]:
    end = reduce(torch.minimum, ends)
    return reduce(torch.maximum, begins, torch.zeros_like(end)), end


def _scattered(mask: AttentionMask) -> list[Tensor]:
    """Parts that may be no interval, as bits."""
    bits = [t for t in (mask.keep_mask, mask.key_keep_mask) if t is not None]
    if mask.document_ids is not None:
        query_ids, key_ids = mask.document_ids
        bits.append(query_ids[:, None, :, None] == key_ids[:, None, None, :])
    return bits


def _lowered(
    mask: AttentionMask, Lq: int, Lk: int, device: torch.device | str | None, shift: int | Tensor, exact: bool
) -> Lowered:
    begins, ends = _bounds(mask, _positions(Lq, device, shift))
    return _narrowed(mask, begins, [*ends, torch.full((1, 1, 1), Lk, device=device)], Lq, Lk, exact)


def _narrowed(mask: AttentionMask, begins: list[Tensor], ends: list[Tensor], Lq: int, Lk: int, exact: bool) -> Lowered:
    """Intervals within the bounds, narrowed to the hull of each scattered part; and the bits of these parts."""
    bits = []
    for scattered, (first, end, count) in zip(_scattered(mask), _hulls(mask, Lk) if Lk else (), strict=False):
        begins, ends = [*begins, first], [*ends, end]
        if not exact or not bool((end - first == count).all()):
            bits.append(scattered)
    return _normal(*_joined(begins, ends), reduce(torch.logical_and, bits) if bits else None, Lq, Lk)


def _normal(begin: Tensor, end: Tensor, bits: Tensor | None, Lq: int, Lk: int) -> Lowered:
    end = end.clamp(0, Lk)
    begin = torch.minimum(begin.clamp(min=0), end)
    shape = *torch.broadcast_shapes(begin.shape, end.shape)[:2], Lq
    begin, end = (t.to(torch.int32).expand(shape).contiguous() for t in (begin, end))
    return Lowered(begin, end, bits, Lk)


_Hull = tuple[Tensor, Tensor, Tensor]
"""First and end key of each row, both 0 for an empty one, and number of keys, int64 (B|1, H|1, Lq|1)."""


def _hulls(mask: AttentionMask, Lk: int) -> list[_Hull]:
    hulls = [_hull_of_keep(t, Lk) for t in (mask.keep_mask, mask.key_keep_mask) if t is not None]
    return hulls if mask.document_ids is None else [*hulls, _hull_of_documents(*mask.document_ids, Lk)]


def _hull_of_keep(keep: Tensor, Lk: int) -> _Hull:
    if sizes(keep)[3] != Lk:  # one value for all keys
        end = keep[..., 0].long() * Lk
        return torch.zeros_like(end), end, end
    kept = keep.to(torch.uint8)
    count = keep.sum(-1)
    return (
        torch.where(count > 0, kept.argmax(-1), 0),
        torch.where(count > 0, Lk - kept.flip(-1).argmax(-1), 0),
        count,
    )


def _hull_of_documents(query_ids: Tensor, key_ids: Tensor, Lk: int) -> _Hull:
    batches = max(query_ids.shape[0], key_ids.shape[0]) if min(query_ids.shape[0], key_ids.shape[0]) else 0
    ordered, places = key_ids.long().expand(batches, -1).sort(dim=1, stable=True)
    queries = query_ids.long().expand(batches, -1).contiguous()
    low, high = (torch.searchsorted(ordered, queries, right=right) for right in (False, True))
    first = places.gather(1, low.clamp(max=Lk - 1))
    last = places.gather(1, (high - 1).clamp(min=0))
    some = high > low
    hull = torch.where(some, first, 0), torch.where(some, last + 1, 0), high - low
    return tuple(t.unsqueeze(1) for t in hull)  # type: ignore[return-value]
