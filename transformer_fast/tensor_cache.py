"""Results computed from a tensor, kept on the tensor until it is written to.

A write is seen where PyTorch counts it: by an op on the tensor or on one of its views. It is not seen through `.data`,
DLPack or numpy, nor by a CUDA graph that is replayed. So on a CPU nothing that decides a result is kept by this alone:
lengths and ids are read in every call, and kept weights have a `stamp`. On a GPU the lengths and ids in int32, the bits
of a mask and the tiles that hold work are kept: whether they still hold cannot be seen without waiting for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ENTRIES = 32
"""Results kept on one tensor; the oldest goes. A buffer of which every call takes another slice would grow without."""


def get_or_compute(
    holder: Tensor,
    key: tuple[Hashable, ...],
    others: tuple[Tensor | None, ...],
    compute: Callable[[], T],
    stamp: Hashable = None,
) -> T:
    """`compute()`, or what it gave the last time for this key, if nothing was written to `holder` or `others` since.

    Kept as an attribute of the holder for the current stream. A view counts as the part of its base that it shows: two
    layers that both unsqueeze one mask share what is kept. Nothing is kept or used while a CUDA graph is captured,
    whose memory is its own, nor for inference tensors, which count no writes.

    Args:
        holder: the tensor that keeps the result.
        key: what else the result depends on.
        others: further tensors the result depends on.
        compute: makes the result.
        stamp: what the caller has read of the tensors' contents; a result of another stamp is replaced.
    """
    tensors = (holder, *[t for t in others if t is not None])
    stream = _stream_that_keeps(*tensors)
    if stream is None:
        return compute()
    key = (stream, key, *[(t.storage_offset(), t.shape, t.stride()) for t in tensors])
    results = results_of(_base(holder))
    found = results.get(key)
    if found is not None and found.stamp == stamp and found.is_of(tensors):
        return found.value
    bases = [_base(t) for t in tensors]
    versions = [t._version for t in bases]
    value = compute()
    results.pop(key, None)
    if len(results) >= ENTRIES:
        results.pop(next(iter(results)), None)  # another thread may be quicker
    made_from = [_Source(weakref.ref(t), version) for t, version in zip(bases, versions, strict=True)]
    results[key] = _Result(value, made_from, stamp)
    return value


def get(holder: Tensor, key: tuple[Hashable, ...]) -> Any | None:
    """Result that ``get_or_compute(holder, key, (), ...)`` would give without computing it, or None."""
    base = _base(holder)
    results = getattr(base, "_tensor_cache", None)
    if results is None or (stream := _stream_that_keeps(holder)) is None:
        return None
    found = results.get((stream, key, (holder.storage_offset(), holder.shape, holder.stride())))
    return found.value if found is not None and found.made_from[0].version == base._version else None


def results_of(base: Tensor) -> dict[Any, Any]:
    """Results kept on a tensor that owns its memory. The launch cache keeps its calls there, under "launches"."""
    results = getattr(base, "_tensor_cache", None)
    if type(results) is not _Results:
        results = base._tensor_cache = _Results()  # type: ignore[attr-defined]
    return results


class _Results(dict[Any, Any]):
    """Results of a tensor. Nothing of them is copied or saved with it."""

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[()]]:
        return dict, ()


class _Source(NamedTuple):
    """A tensor that owns memory, and the number of writes to it that were seen."""

    tensor: weakref.ref[Tensor]
    version: int


class _Result(NamedTuple):
    """A result, and what it was made from."""

    value: Any
    made_from: list[_Source]
    stamp: Hashable

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return True if the result was made from these tensors as they are now."""
        for (ref, version), t in zip(self.made_from, tensors):
            base = _base(t)
            if ref() is not base or version != base._version:
                return False
        return True


def _base(t: Tensor) -> Tensor:
    """The tensor that owns the memory."""
    base = t._base
    return t if base is None else base


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
