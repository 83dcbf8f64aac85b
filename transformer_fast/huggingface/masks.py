"""Masks of transformers in normal form, and a lazy tensor for the dense mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..masks import AttentionMask
from ..masks.arguments import parts_beside
from ..tensors import made_when_read

_LAYOUT = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_contiguous, Tensor.element_size, Tensor.get_device, Tensor.is_inference, Tensor.detach,
    Tensor.requires_grad_,
}  # fmt: skip
"""Methods that a mask answers without its dense tensor, as it does attributes."""
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag")}
"""Attributes that hold the dense tensor."""
_UNCOUNTED = {
    Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage,
}  # fmt: skip
"""Ways to a tensor's memory on which its version does not count what is written."""


_CONTENT = _VIEWS | _UNCOUNTED


class _Content:
    """Mask that several tensors share.

    Attributes:
        normal: mask in normal form.
        dense: the dense tensor, once something has read it.
        version: version of the dense tensor when it was computed; writing to it, or to a view of it, changes that.
        has_empty_rows: True if a query has every key blocked; None if nobody asked.
    """

    def __init__(self, normal: AttentionMask) -> None:
        self.normal = normal
        self.dense: Tensor | None = None
        self.version = 0
        self.has_empty_rows: bool | None = None


@made_when_read
class LazyMask(Tensor):
    """Mask (B, 1, Lq, Lk) of transformers that is computed only when something other than our attention reads it.

    To every reader it is the mask that transformers would have made: for "sdpa" bool, True = kept; for "eager" 0 where
    a key is kept and the least number of the dtype where not, to be added to the scores.

    Attributes:
        keep: the padding in the mask, bool (B, Lk); None for none.
    """

    keep: Tensor | None = None
    _content: _Content

    @staticmethod
    def __new__(
        cls, mask: AttentionMask, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
    ) -> LazyMask:
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy._content = _Content(mask)
        return lazy

    @property
    def mask(self) -> AttentionMask:
        """Mask for the kernels: the normal form, or the dense tensor if something has written to that."""
        dense = self._content.dense
        if dense is None or dense._version == self._content.version:
            return self._content.normal
        return AttentionMask(keep_mask=dense) if self.dtype == torch.bool else AttentionMask(additive_bias=dense)

    def is_padding(self, is_causal: bool) -> bool:
        """Return True if the mask is padding alone, or padding and a look-ahead mask."""
        mask = self.mask
        if parts_beside(mask, "key_keep_mask", "causal_offset"):
            return False
        return (mask.key_keep_mask is None) is (self.keep is None) and (mask.causal_offset == 0) is is_causal

    def has_empty_rows(self) -> bool:
        """Return True if a query has every key blocked; the values are read once."""
        content, mask = self._content, self._content.normal
        if content.has_empty_rows is None:
            if parts_beside(mask, "key_keep_mask", "causal_offset"):
                rows = mask.dense(*self.shape[2:], self.device)
            elif (rows := mask.key_keep_mask) is not None and mask.causal_offset is not None:
                rows = rows[..., : mask.causal_offset + 1]  # keys that the first query sees
            content.has_empty_rows = rows is not None and not bool(rows.any(-1).all())
        return content.has_empty_rows

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.mask}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def dense(self) -> Tensor:
        """Compute the dense tensor, once."""
        content = self._content
        if content.dense is None:
            with torch.inference_mode(False):  # tensors of that mode do not count what is written to them
                keep = content.normal.dense(*self.shape[2:], self.device).expand(self.shape)
                if self.dtype == torch.bool:
                    content.dense = keep.clone(memory_format=torch.contiguous_format)
                else:
                    kept = torch.zeros((), dtype=self.dtype, device=self.device)
                    content.dense = torch.where(keep, kept, torch.finfo(self.dtype).min)
            content.version = content.dense._version
        return content.dense

    def alias(self) -> LazyMask:
        """Another tensor of the same mask, for reentrant checkpoints."""
        shape, dtype, device = self.shape, self.dtype, self.device
        lazy = Tensor._make_wrapper_subclass(type(self), shape, dtype=dtype, device=device)
        lazy.__dict__.update(self.__dict__)
        return lazy

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Here and not in __torch_dispatch__, whose views do not count what is written to them.
        attribute = function.__name__ in ("__get__", "__set__") and function not in _CONTENT
        if attribute or function in _LAYOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        if function in _UNCOUNTED:
            args[0].dense()
            args[0]._content.version = -1
        args, kwargs = tree_map_only(LazyMask, lambda lazy: lazy.dense(), (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0].alias()
        args, kwargs = tree_map_only(LazyMask, lambda lazy: lazy.dense(), (args, kwargs or {}))
        return function(*args, **kwargs)


def bounds_of(pattern: Any, offset: int, local_size: int | None) -> AttentionMask | None:
    """Causal and window parts equal to a mask function of transformers, or None for other functions.

    Args:
        pattern: function of (batch, head, query, key) indices.
        offset: index of the first query minus index of the first key.
        local_size: number that transformers gives for a pattern of its own that is a window, or chunks; None for
            others.
    """
    from transformers import masking_utils

    if pattern is masking_utils.causal_mask_function:
        return AttentionMask.window(None, 0, offset)
    if pattern is masking_utils.bidirectional_mask_function:
        return AttentionMask()
    if local_size is None or local_size < 1:
        return None
    for left, right in ((local_size - 1, 0), (local_size, local_size)):
        if _is_window(pattern, left, right):
            return AttentionMask.window(left, right, offset)
    return None


def _is_window(pattern: Any, left: int, right: int) -> bool:
    """Return True if the pattern computes this window, tested at the window's edges, from two queries on: chunks differ
    from a window at one of them."""
    edges = -left, 0, right
    distances = torch.tensor(sorted({edge + step for edge in edges for step in (-1, 0, 1)}))
    expected = (distances >= -left) & (distances <= right)
    queries = 2 - distances[:1], 3 - distances[:1]
    return all(torch.equal(pattern(0, 0, q, q + distances).expand(len(distances)), expected) for q in queries)
