"""What was computed from a tensor, kept on the tensor until it is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

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
    bases = [t if t._base is None else t._base for t in tensors]
    results = _results_of(bases[0])
    if with_layouts:
        key = (stream, key, *[(t.storage_offset(), t.shape, t.stride()) for t in tensors])
    else:
        key = (stream, key, *[t.storage_offset() for t in tensors])
    versions = [t._version for t in bases]
    found = results.get(key)
    if found is not None and found[0] == versions and all(ref() is t for ref, t in zip(found[1], bases[1:])):
        return found[2]
    value = make()
    results.pop(key, None)
    if len(results) >= ENTRIES:
        del results[next(iter(results))]
    results[key] = (versions, [weakref.ref(t) for t in bases[1:]], value)
    return value


def recall(holder: Tensor, key: tuple[Hashable, ...]) -> Any | None:
    """What ``remembered(holder, key, (), ...)`` would give without making it, or None."""
    base = holder if holder._base is None else holder._base
    results = getattr(base, "_remembered", None)
    if results is None or (stream := _stream_that_keeps(holder)) is None:
        return None
    found = results.get((stream, key, (holder.storage_offset(), holder.shape, holder.stride())))
    return found[2] if found is not None and found[0] == [base._version] else None


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
