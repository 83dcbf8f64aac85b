"""Lower a mask to what a kernel can read: an interval of keys per query, and bits for what is no interval.

Lengths, causal and window with any offset, intervals, aligned and packed sequences, and every intersection of them, are
intervals by arithmetic, and so is a union of such masks that all begin at key 0. Whether the tokens of a document, or
the kept keys of a keep mask, lie in one run is known only from their values. :func:`lower` narrows the interval to the
first and last of them, on the device, and keeps the part as bits. With ``exact=True`` it reads one number per such
part, and drops the bits of a part that is an interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..tensor_cache import get_or_compute
from ..tracing import sizes
from .arguments import parts_beside
from .mask import AttentionMask
from .parts import both_documents

_PACKED = "causal_offset", "window_offset", "document_ids", "key_keep_mask", "additive_bias", "distance_biases"
"""Parts of a packed batch."""
_KERNELS: dict[str, Any] = dict.fromkeys(
    ("keep_mask", "key_keep_mask", "key_lengths", "causal_offset", "additive_bias", "window_offset", "document_ids")
) | {"distance_biases": ()}
"""Parts that the kernels know, as a mask without them has them."""
_Documents = tuple[Tensor, Tensor]
_Found = TypeVar("_Found")


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
    name = "lowered", Lq, Lk, exact
    return on_its_tensors(mask, shift, name, lambda on: _lowered(mask, Lq, Lk, on or device, shift, exact))


def on_its_tensors(
    mask: AttentionMask, shift: int | Tensor, name: tuple[Hashable, ...], found: Callable[[torch.device | None], _Found]
) -> _Found:
    """Compute something of a mask without biases on the device of its tensors, if it has some; on a GPU, cached on
    them."""
    given = [*mask.tensors().values(), *([shift] if isinstance(shift, Tensor) else [])]
    if not given:
        return found(None)
    device = given[0].device
    if device.type == "cpu" or any(type(t) is not Tensor for t in given):
        return found(device)
    key = (*name, _form(mask), None if isinstance(shift, Tensor) else shift)
    return get_or_compute(given[0], key, tuple(given[1:]), lambda: found(device))


def _form(part: Any) -> Hashable:
    """Return what two masks share that differ in their tensors alone."""
    if isinstance(part, AttentionMask):
        return tuple(_form(getattr(part, field.name)) for field in dataclasses.fields(part))
    if isinstance(part, tuple):
        return tuple(map(_form, part))
    return "tensor" if isinstance(part, Tensor) else part


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
    scattered = _scattered(AttentionMask(document_ids=None if alone else ids), position, keys)
    return _narrowed(scattered, [begin], [end], queries, keys, exact)


def allowed(
    mask: AttentionMask, Lq: int, Lk: int, device: torch.device | str | None, *, shift: int | Tensor = 0
) -> Tensor | None:
    """The mask as one bool tensor (B|1, H|1, Lq|1, Lk), made of intervals and bits in operators that every exporter
    knows; None for a mask that allows all."""
    return _allowed(mask, _positions(Lq, device, shift), Lk)


def kernel_parts(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Convert parts that the kernels do not know, intervals and unions, to what they read: end keys of the queries,
    int64 (B|1, Lq) and not clamped to the keys, and a keep mask, bool (B|1, H|1, Lq, Lk); None for nothing."""
    own = dataclasses.replace(mask, **_KERNELS)
    position = _positions(Lq, device, 0)
    begins, ends = _bounds(own, position)
    per_query = [end for end in ends if sizes(end)[1] == 1]
    per_head = [end for end in ends if sizes(end)[1] != 1]
    j = torch.arange(Lk, device=device)
    bits = [j >= begin.unsqueeze(-1) for begin in begins] + [j < end.unsqueeze(-1) for end in per_head]
    bits += [t for t, _ in _scattered(own, position, Lk)]
    end = reduce(torch.minimum, per_query).squeeze(1) if per_query else None
    return end, reduce(torch.logical_and, bits) if bits else None


def _allowed(mask: AttentionMask, position: Tensor, Lk: int) -> Tensor | None:
    begins, ends = _bounds(mask, position)
    j = torch.arange(Lk, device=position.device)
    # One comparison per bound: those that are the same for all sequences stay small.
    inside = [j >= begin.unsqueeze(-1) for begin in begins] + [j < end.unsqueeze(-1) for end in ends]
    inside += [bits for bits, _ in _scattered(mask, position, Lk)]
    return reduce(torch.logical_and, inside) if inside else None


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
    if mask.first_keys is not None:
        begins.append(mask.first_keys.to(torch.int64))
    if mask.end_keys is not None:
        ends.append(mask.end_keys.to(torch.int64))
    for union in mask.unions:
        if not all(map(_begins_at_0, union)):
            continue  # bits, see _scattered
        ways = [_bounds(one, position)[1] for one in union]
        if all(ways):  # without a bound, all keys are seen
            ends.append(reduce(torch.maximum, (reduce(torch.minimum, way) for way in ways)))
    return begins, ends


def _begins_at_0(mask: AttentionMask) -> bool:
    """Return True for a mask of ends alone."""
    others = parts_beside(mask, "key_lengths", "causal_offset", "end_keys", "unions")
    return not others and all(_begins_at_0(one) for union in mask.unions for one in union)


def _joined(begins: list[Tensor], ends: list[Tensor]) -> tuple[Tensor, Tensor]:
    end = reduce(torch.minimum, ends)
    return reduce(torch.maximum, begins, torch.zeros_like(end)), end


def _scattered(mask: AttentionMask, position: Tensor, Lk: int) -> list[tuple[Tensor, _Documents | None]]:
    """Parts that may be no interval, as bits; with the ids of documents."""
    found: list[tuple[Tensor, _Documents | None]] = []
    found += [(keep, None) for keep in (mask.keep_mask, mask.key_keep_mask) if keep is not None]
    if mask.document_ids is not None:
        query_ids, key_ids = mask.document_ids
        found.append((query_ids[:, None, :, None] == key_ids[:, None, None, :], mask.document_ids))
    for union in mask.unions:
        if all(map(_begins_at_0, union)):
            continue  # ends, see _bounds
        ways = [_allowed(one, position, Lk) for one in union]
        seen = [way for way in ways if way is not None]
        if len(seen) == len(ways):
            found.append((reduce(torch.logical_or, seen), None))
    return found


def _lowered(
    mask: AttentionMask, Lq: int, Lk: int, device: torch.device | str | None, shift: int | Tensor, exact: bool
) -> Lowered:
    position = _positions(Lq, device, shift)
    begins, ends = _bounds(mask, position)
    ends = [*ends, torch.full((1, 1, 1), Lk, device=device)]
    return _narrowed(_scattered(mask, position, Lk), begins, ends, Lq, Lk, exact)


def _narrowed(
    scattered: list[tuple[Tensor, _Documents | None]],
    begins: list[Tensor],
    ends: list[Tensor],
    Lq: int,
    Lk: int,
    exact: bool,
) -> Lowered:
    """Intervals within the bounds, narrowed to the hull of each scattered part; and the bits of these parts."""
    bits = []
    for part, documents in scattered if Lk else ():
        first, end, count = _hull_of_keep(part, Lk) if documents is None else _hull_of_documents(*documents, Lk)
        begins, ends = [*begins, first], [*ends, end]
        if not exact or not bool((end - first == count).all()):
            bits.append(part)
    return _normal(*_joined(begins, ends), reduce(torch.logical_and, bits) if bits else None, Lq, Lk)


def _normal(begin: Tensor, end: Tensor, bits: Tensor | None, Lq: int, Lk: int) -> Lowered:
    end = end.clamp(0, Lk)
    begin = torch.minimum(begin.clamp(min=0), end)
    shape = *torch.broadcast_shapes(begin.shape, end.shape)[:2], Lq
    begin, end = (t.to(torch.int32).expand(shape).contiguous() for t in (begin, end))
    return Lowered(begin, end, bits, Lk)


_Hull = tuple[Tensor, Tensor, Tensor]
"""First and end key of each row, both 0 for an empty one, and number of keys, int64 (B|1, H|1, Lq|1)."""


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
