"""Lower a mask to what a kernel can read: an interval of keys per query, and bits for what is no interval.

Lengths, causal and window with any offset, intervals, aligned sequences, and every intersection of them, are intervals
by arithmetic, and so is a union of such masks that all begin at key 0. Whether the tokens of a document, or
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
from .arguments import parts_beside
from .mask import AttentionMask

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
    per_query = [end for end in ends if end.shape[1] == 1]
    per_head = [end for end in ends if end.shape[1] != 1]
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
    if keep.shape[3] != Lk:  # one value for all keys
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
