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

    Kept as an attribute of the holder for the current stream. A view counts as the part of its base that it shows: two
    layers that both unsqueeze one mask share what is kept. Nothing is kept or used while a CUDA graph is captured,
    whose memory is its own, nor for inference tensors, which count no writes.

    Args:
        holder: the tensor that keeps the result.
        key: what else the result depends on.
        others: further tensors the result depends on.
        make: computes the result.
    """
    tensors = (holder, *(t for t in others if t is not None))
    for t in tensors:
        if t.is_inference():
            return make()
    stream = None
    if holder.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(holder.device).cuda_stream
    bases = [t if t._base is None else t._base for t in tensors]
    base = bases[0]
    results = getattr(base, "_remembered", None)
    if results is None:
        results = base._remembered = {}
    key = (stream, key, *[(t.storage_offset(), t.shape, t.stride()) for t in tensors])
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
