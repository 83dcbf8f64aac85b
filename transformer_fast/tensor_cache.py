"""Cache of results computed from a tensor, stored on the tensor until the tensor is written to.

A write is detected by PyTorch's version counter: an op on the tensor or on one of its views. Writes through `.data`,
DLPack, numpy or a replayed CUDA graph are not detected. So on a CPU the cache never decides a result alone: lengths and
ids are read in every call, and cached weights have a stamp (`stamp_of`). On a GPU, lengths and ids in int32, mask bits
and the list of tiles that hold work are cached without a stamp, because checking them would wait for the device. What a
packing says of itself is cached on every device: no other code writes to its tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from . import extension

T = TypeVar("T")

_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8

NOT_SAVED = OrderedDict, ()
"""Reduced form of an attribute of a tensor that is neither copied nor saved with the tensor. PyTorch pickles the
attributes of a tensor, and ``torch.load`` takes few classes."""
ENTRIES = 32
"""Maximum number of results per tensor; the oldest is dropped. The limit bounds a buffer that is sliced anew in each
call."""
WHOLE = 2**12
"""Integers up to which a stamp reads all of a weight."""
BLOCK = 8
"""Adjacent integers that a stamp reads of a larger weight: one cache line, if they have 64 bits."""
PRIMES = 251, 127, 61, 47, 31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2
"""Distances between blocks, in blocks; the first one that leaves a block in every row is used."""
COLUMN = BLOCK * 31
"""Rows of a weight whose columns are all read. A weight with more rows may have a distance as large as that."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as a signed integer: a product with it spreads each bit over all higher ones."""


def get_or_compute(
    holder: Tensor,
    key: tuple[Hashable, ...],
    others: tuple[Tensor | None, ...],
    compute: Callable[[], T],
    stamp: Hashable = None,
) -> T:
    """Return `compute()`, or its last result for this key if `holder` and `others` were not written to since.

    The result is stored as an attribute of the holder, for the current stream. Equal views of one base share results:
    two layers that both unsqueeze one mask use the same entry. The cache is off during CUDA graph capture, whose memory
    is private, and for inference tensors, which have no version counter.

    Args:
        holder: the tensor that keeps the result.
        key: everything else that the result depends on.
        others: further tensors that the result depends on.
        compute: function that makes the result.
        stamp: value that the caller has read from the tensors; a result with another stamp is replaced.
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
        results.pop(next(iter(results)), None)  # another thread may have removed the entry
    refs = [weakref.ref(t) if t is not bases[0] or stamp is None else None for t in bases]
    made_from = [_Source(ref, version) for ref, version in zip(refs, versions, strict=True)]
    results[key] = _Result(value, made_from, stamp)
    return value


def results_of(base: Tensor) -> dict[Any, Any]:
    """Results stored on a tensor that owns its memory. The launch cache stores its calls there, under "launches"."""
    results = getattr(base, "_tensor_cache", None)
    if type(results) is not _Results:
        results = base._tensor_cache = _Results()  # type: ignore[attr-defined]
    return results


def stamp_of(weight: Tensor) -> tuple[int, ...]:
    """Numbers that change if a weight (out, in) on a CPU is written to, even if PyTorch does not count the write.

    The bits of the weight are read as integers of up to 64 bits: two values of fp32, four of 16 bits. A weight of up to
    4,096 integers, or with fewer than 8 in a row, is read whole. In a larger one, a block of 8 adjacent integers is
    read in every row, in columns that change from row to row. The stamp is the sum of the integers, or of the blocks,
    modulo 2^64, each mixed with its position first: in a plain sum, changes of single bits, such as signs, cancel.

    Seen are a write to any whole row, to a whole column of at least 248 rows, to all of the weight, and a permutation
    of rows or columns. In a larger weight, a write to single values is seen only if it changes a block: at worst one
    value in 251. A transposed weight is read as it lies in memory, where columns are rows. The time is that of one
    or two cache lines per row: 0.2 to 0.9 ms for (30,000, 768), 3 ms for (128,000, 4,096).
    """
    module = extension.module() if type(weight) in (Tensor, Parameter) and weight.is_cpu else None
    return _stamp_of(weight) if module is None else module.weight_stamp(weight)


def _stamp_of(weight: Tensor) -> tuple[int, ...]:
    """The definition of `stamp_of`, in operators of PyTorch."""
    if not weight.is_contiguous():
        weight = weight.t() if weight.t().is_contiguous() else weight.contiguous()
    bits = _bits(weight)
    rows, width = bits.shape
    count = rows * width
    if count <= WHOLE or width < BLOCK:
        read = bits.reshape(-1, 1)
    else:
        most = min(width - BLOCK, max(rows, COLUMN))
        # Blocks move through all columns unless the width is a multiple of the prime.
        stride = BLOCK * next((p for p in PRIMES if BLOCK * p <= most and width % p), 1)
        read = bits.as_strided((1 + (count - BLOCK) // stride, BLOCK), (stride, 1))
    factors = FACTOR * torch.arange(1, 2 * len(read) + 1, 2, device=bits.device)
    mixed = _upper_to_lower(_upper_to_lower(read.long(), 29) * factors[:, None], 32)
    return tuple(mixed.sum(0).tolist())


def _upper_to_lower(x: Tensor, shift: int) -> Tensor:
    """Integers of 64 bits, with exclusive or of themselves shifted to the right, as unsigned ones."""
    return x ^ (x >> shift) & 2 ** (64 - shift) - 1


def _bits(weight: Tensor) -> Tensor:
    """Contiguous values as the widest integers that divide their rows and their offset."""
    size = weight.element_size()
    start, row = size * weight.storage_offset(), size * weight.shape[1]
    return weight.view(next(kind for kind in _INTEGERS if not (start % kind.itemsize or row % kind.itemsize)))


class _Results(dict[Any, Any]):
    """Results of a tensor; they are neither copied nor saved with the tensor."""

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[()]]:
        return NOT_SAVED


class _Source(NamedTuple):
    """A tensor that owns memory, and its version counter at the time of caching.

    The holder of a result with a stamp needs no reference, and `torch.utils.swap_tensors` refuses tensors with one.
    """

    tensor: weakref.ref[Tensor] | None
    version: int


class _Result(NamedTuple):
    """A cached result and its source tensors."""

    value: Any
    made_from: list[_Source]
    stamp: Hashable

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return True if the result was made from these tensors in their current version."""
        for (ref, version), t in zip(self.made_from, tensors):
            base = _base(t)
            if (ref is not None and ref() is not base) or version != base._version:
                return False
        return True


def _base(t: Tensor) -> Tensor:
    """The tensor that owns the memory."""
    base = t._base
    return t if base is None else base


def _stream_that_keeps(*tensors: Tensor) -> int | None:
    """Stream for which results are cached on the first tensor, 0 on the CPU; None if caching is off."""
    for t in tensors:
        if t.is_inference():
            return None
    holder = tensors[0]
    if not holder.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(holder.get_device())
