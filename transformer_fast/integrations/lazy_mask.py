"""Masks of transformers in normal form, and a lazy tensor for the dense mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..masks import AttentionMask
from ..masks.packing import PackedMask, Packing
from ..tensor_cache import get_or_compute
from ..tensors import made_when_read


@made_when_read
class LazyMask(Tensor):
    """Bool keep mask (B, 1, Lq, Lk) that is computed only when something other than our attention reads it.

    Attributes:
        mask: mask for the kernels. After the dense tensor was computed, and may have been written to, ``mask`` is that
            tensor.
        call: the :class:`~.unpadded.Unpadded` call in which the mask was made; None outside of such a call.
    """

    mask: AttentionMask
    call: Any = None

    @staticmethod
    def __new__(cls, mask: AttentionMask, shape: tuple[int, int, int, int], device: torch.device) -> LazyMask:
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        lazy.mask = mask
        return lazy

    def __repr__(self, **_: Any) -> str:
        return f"LazyMask({self.mask}, shape={tuple(self.shape)})"

    def dense(self) -> Tensor:
        """Compute the dense tensor."""
        keep = self.mask.keep_mask
        if keep is None or keep.shape != self.shape:
            keep = self.mask.dense(*self.shape[2:], self.device).expand(self.shape).contiguous()
            self.mask = AttentionMask(keep_mask=keep)
        return keep

    def alias(self) -> Tensor:
        """Another tensor of the same mask, for reentrant checkpoints; an alias if the dense tensor exists."""
        if self.mask.keep_mask is not None:
            return self.dense().detach()
        lazy = self.again()
        lazy.call = self.call
        return lazy

    def again(self) -> LazyMask:
        """Make another tensor of the same mask."""
        return LazyMask(self.mask, tuple(self.shape), self.device)

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0].alias()
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


class PackedLazyMask(LazyMask):
    """Mask of a packed batch, (1, 1, Tq, Tk): tokens see the tokens of their own sequence.

    Attributes:
        packed: mask for the kernels.
    """

    packed: PackedMask

    @property
    def has_gaps(self) -> bool:
        """Return True if padding was removed between tokens of a sequence, which changes their distances."""
        return has_gaps(self.packed.queries) or has_gaps(self.packed.keys)

    @staticmethod
    def __new__(cls, packed: PackedMask, device: torch.device) -> PackedLazyMask:
        shape = 1, 1, packed.queries.total, packed.keys.total
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        lazy.packed = packed
        return lazy

    @functools.cached_property
    def mask(self) -> AttentionMask:  # type: ignore[override]
        """The mask as an AttentionMask, for code that does not support PackedMask."""
        mask = AttentionMask.documents(_sequences(self.packed.queries), _sequences(self.packed.keys))
        return mask if self.packed.window is None else mask & self.packed.window

    def again(self) -> PackedLazyMask:
        """Make another tensor of the same mask."""
        return PackedLazyMask(self.packed, self.device)


def has_gaps(packing: Packing) -> bool:
    """Return True if padding stands between two tokens of a sequence. A packing is read once: reading waits for a
    GPU."""

    def read() -> bool:
        sequences, steps = packing.indices // max(packing.length, 1), packing.indices.diff()
        return bool(((steps != 1) & (sequences.diff() == 0)).any())

    return get_or_compute(packing.indices, ("gaps", packing.length), (), read)


def _sequences(packing: Packing) -> Tensor:
    """Sequence index per token, int64 (1, T)."""
    return (packing.indices // max(packing.length, 1))[None]


def bounds_of(pattern: Any, offset: int) -> AttentionMask | None:
    """Causal and window parts equal to a mask function of transformers, or None for other functions.

    Args:
        pattern: function of (batch, head, query, key) indices, as the ``create_..._mask`` functions make them.
        offset: index of the first query minus index of the first key.
    """
    sides = _sides_of(pattern)
    if sides is None or not _is_window(pattern, *sides):
        return None
    left, right = sides  # a config without a window may have a window size of 0, which would block everything
    if left is not None and right is not None and left + right < 0:
        return None
    return AttentionMask.window(left, right, offset)


def _sides_of(pattern: Any) -> tuple[int | None, int | None] | None:
    """Arguments (left, right) of :meth:`AttentionMask.window`, from the names of transformers' patterns."""
    if not inspect.isfunction(pattern) or pattern.__module__ != "transformers.masking_utils":
        return None
    given = inspect.getclosurevars(pattern).nonlocals
    match pattern.__qualname__.partition(".")[0]:
        case "causal_mask_function":
            return None, 0
        case "bidirectional_mask_function":
            return None, None
        case "sliding_window_overlay":
            return given["sliding_window"] - 1, None
        case "sliding_window_bidirectional_overlay":
            return given["sliding_window"], given["sliding_window"]
        case "and_masks":
            sides = [_sides_of(part) for part in given["mask_functions"]]
            if None in sides:
                return None
            lefts, rights = zip(*sides, strict=True)
            return tuple(min((n for n in side if n is not None), default=None) for side in (lefts, rights))
    return None


def _is_window(pattern: Any, left: int | None, right: int | None) -> bool:
    """Return True if the pattern computes this window, tested at the window's edges, because a name may change its
    meaning."""
    edges = (-(left or 0), 0, right or 0)
    distances = torch.tensor(sorted({edge + step for edge in edges for step in (-1, 0, 1)}))
    expected = torch.ones_like(distances, dtype=torch.bool)
    if left is not None:
        expected &= distances >= -left
    if right is not None:
        expected &= distances <= right
    query = 2 - distances[:1]
    return torch.equal(pattern(0, 0, query, query + distances).expand(len(distances)), expected)
