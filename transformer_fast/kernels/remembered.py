"""What was computed from a tensor, kept on the tensor until it is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ENTRIES = 32
"""Results kept on one tensor; the oldest goes. A buffer of which every call takes another slice would grow without."""


def remembered(
    holder: Tensor, key: tuple[Hashable, ...], others: tuple[Tensor | None, ...], make: Callable[[], T]
) -> T:
    """`make()`, or what it gave the last time for this key, if nothing was written to `holder` or `others` since.

    Kept as an attribute of the holder, or of the tensor it is a view of, for the current stream. Nothing is kept or
    used while a CUDA graph is captured, whose memory is its own, nor for inference tensors, which count no writes.

    Args:
        holder: the tensor that keeps the result; views of it share what is kept, so `key` tells them apart.
        key: what else the result depends on.
        others: further tensors the result depends on; the same objects must come again.
        make: computes the result.
    """
    if any(t.is_inference() for t in (holder, *others) if t is not None):
        return make()
    stream = None
    if holder.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(holder.device).cuda_stream
    place = holder if holder._base is None else holder._base
    version, results = getattr(place, "_remembered", (None, None))
    if version != place._version:
        results = {}
        place._remembered = (place._version, results)
    versions = [None if t is None else t._version for t in others]
    found = results.get((stream, *key))
    if found is not None and found[1] == versions:
        same = (t is None if ref is None else ref() is t for t, ref in zip(others, found[0], strict=True))
        if all(same):
            return found[2]
    value = make()
    results.pop((stream, *key), None)
    if len(results) >= ENTRIES:
        del results[next(iter(results))]
    results[stream, *key] = ([None if t is None else weakref.ref(t) for t in others], versions, value)
    return value
