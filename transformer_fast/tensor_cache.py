"""What was computed from a tensor, kept on the tensor until it is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ENTRIES = 32
"""Results kept on one tensor; the oldest goes. A buffer of which every call takes another slice would grow without."""


def remembered(
    holder: Tensor,
    key: tuple[Hashable, ...],
    others: tuple[Tensor | None, ...],
    make: Callable[[], T],
    *,
    with_layouts: bool = True,
) -> T:
    """`make()`, or what it gave the last time for this key, if nothing was written to `holder` or `others` since.

    Kept as an attribute of the holder for the current stream. A view counts as the part of its base that it shows: two
    layers that both unsqueeze one mask share what is kept. Nothing is kept or used while a CUDA graph is captured,
    whose memory is its own, nor for inference tensors, which count no writes.

    Args:
        holder: the tensor that keeps the result.
        key: what else the result depends on.
        others: further tensors the result depends on.
        make: computes the result.
        with_layouts: False where the key already tells the shapes and strides of all these tensors.
    """
    tensors = (holder, *[t for t in others if t is not None])
    stream = _stream_that_keeps(*tensors)
    if stream is None:
        return make()
    if with_layouts:
        key = (stream, key, *[(t.storage_offset(), t.shape, t.stride()) for t in tensors])
    else:
        key = (stream, key, *[t.storage_offset() for t in tensors])
    results = _results_of(_base(holder))
    found = results.get(key)
    if found is not None and found.is_of(tensors):
        return found.value
    bases = [_base(t) for t in tensors]
    versions = [t._version for t in bases]
    value = make()
    results.pop(key, None)
    if len(results) >= ENTRIES:
        del results[next(iter(results))]
    results[key] = _Kept(value, [(weakref.ref(t), version) for t, version in zip(bases, versions, strict=True)])
    return value


def recall(holder: Tensor, key: tuple[Hashable, ...]) -> Any | None:
    """What ``remembered(holder, key, (), ...)`` would give without making it, or None."""
    base = holder._base
    if base is None:
        base = holder
    results = getattr(base, "_remembered", None)
    if results is None or (stream := _stream_that_keeps(holder)) is None:
        return None
    found = results.get((stream, key, (holder.storage_offset(), holder.shape, holder.stride())))
    return found.value if found is not None and found.made_from[0][1] == base._version else None


def recall_by_key(holder: Tensor, key: tuple[Hashable, ...], others: tuple[Tensor, ...]) -> Any | None:
    """What ``remembered(holder, key, others, ..., with_layouts=False)`` would give without making it, or None."""
    results = getattr(_base(holder), "_remembered", None)
    if results is None:
        return None
    tensors = (holder, *others)
    stream = _stream_that_keeps(*tensors)
    found = None if stream is None else results.get((stream, key, *[t.storage_offset() for t in tensors]))
    return found.value if found is not None and found.is_of(tensors) else None


class _Kept(NamedTuple):
    """A result, and each tensor that owns memory it was made from with the number of writes seen by then."""

    value: Any
    made_from: list[tuple[weakref.ref[Tensor], int]]

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether it was made from these tensors as they are now."""
        for (ref, version), t in zip(self.made_from, tensors):
            base = t if t._base is None else t._base
            if ref() is not base or version != base._version:
                return False
        return True


def _base(t: Tensor) -> Tensor:
    """The tensor that owns the memory."""
    return t if t._base is None else t._base


def _results_of(base: Tensor) -> dict:
    results = getattr(base, "_remembered", None)
    if results is None:
        results = base._remembered = {}
    return results


def _stream_that_keeps(*tensors: Tensor) -> int | None:
    """The stream for which results are kept on the first tensor, 0 on the CPU; None where nothing may be kept."""
    for t in tensors:
        if t.is_inference():
            return None
    holder = tensors[0]
    if not holder.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(holder.get_device())
