"""T5's relative positions in normal form, and a lazy tensor for the dense bias."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..masks import AttentionMask
from ..masks.distance import relative_buckets
from ..tensors import made_when_read
from ..tracing import is_traced
from .layer_code import calls_the_interface
from .names import is_ours

WORTH_IT = 256 * 256
"""Minimum number of scores per head for a lazy bias. With fewer scores, as in a step of generation, reading a dense
bias is faster than making a table of distances."""

_LAYOUT = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device")} | {Tensor.size, Tensor.dim}


@made_when_read
class LazyBias(Tensor):
    """Bias (1, H, Lq, Lk) that is computed only when something other than our attention reads it.

    Attributes:
        mask: mask for the kernels; its weight is the model's parameter, which gets the gradient.
    """

    mask: AttentionMask

    @staticmethod
    def __new__(cls, mask: AttentionMask, shape: tuple[int, int, int, int], weight: Tensor) -> LazyBias:
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=weight.dtype, device=weight.device)
        lazy.mask = mask
        return lazy

    def __repr__(self, **_: Any) -> str:
        return f"LazyBias({self.mask}, shape={tuple(self.shape)})"

    def dense(self) -> Tensor:
        """Compute the dense tensor, with its graph."""
        added = self.mask.added(*self.shape[2:], self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if added is None else added

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _LAYOUT:
            return super().__torch_function__(function, types, args, kwargs or {})
        args, kwargs = tree_map_only(LazyBias, LazyBias.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LazyBias, LazyBias.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


class LazyBiased:
    """First base of the class of an attention layer that returns a :class:`LazyBias`; the second is its former class.

    Calls that are compiled, traced, checkpointed or small, and those under another implementation, use the dense bias.
    """

    made_from: type[nn.Module]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made at run time, so a pickle stores how to make the class again.
        _, _, *rest = super().__reduce_ex__(protocol)
        return _rebuild, (type(self).made_from,), *rest

    def compute_bias(self: Any, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the bias (1, H, Lq, Lk)."""
        offset = kwargs.get("past_seen_tokens", args[1] if len(args) > 1 else 0)
        lazy = (
            not (torch.compiler.is_compiling() or is_traced())
            and is_ours(self.config._attn_implementation)
            and all(type(n) is int for n in (query_length, key_length, offset))
            and query_length * key_length >= WORTH_IT
            and not (getattr(self, "gradient_checkpointing", False) and self.training)
            and _is_t5s(self.made_from, *_numbers(self))
        )
        if not lazy:
            return super().compute_bias(query_length, key_length, *args, **kwargs)  # type: ignore[misc]
        weight = self.relative_attention_bias.weight
        _, max_distance, bidirectional = _numbers(self)
        mask = AttentionMask.relative(weight, max_distance, bidirectional, offset)
        return LazyBias(mask, (1, weight.shape[1], query_length, key_length), weight)


@functools.cache
def with_lazy_bias(layer: type[nn.Module]) -> type[nn.Module]:
    """Class for an attention layer like T5's; other classes, and classes made at run time, stay."""
    file = sys.modules.get(layer.__module__)
    if not hasattr(layer, "_relative_position_bucket") or getattr(file, layer.__qualname__, None) is not layer:
        return layer
    if not (hasattr(layer, "compute_bias") and calls_the_interface(layer)):
        return layer
    return type(layer.__name__, (LazyBiased, layer), {
        "__module__": layer.__module__,
        "__qualname__": layer.__qualname__,
        "__doc__": layer.__doc__,
        "made_from": layer,
    })  # fmt: skip


def _rebuild(layer: type[nn.Module]) -> nn.Module:
    made = with_lazy_bias(layer)
    return made.__new__(made)


def _numbers(module: Any) -> tuple[int, int, bool]:
    """Values (buckets, max_distance, bidirectional) of a layer."""
    return module.relative_attention_num_buckets, module.relative_attention_max_distance, not module.is_decoder


@functools.cache
def _is_t5s(layer: Any, buckets: int, max_distance: int, bidirectional: bool) -> bool:
    """Return True if the layer puts every distance into the same bucket as ``AttentionMask.relative``."""
    distances = torch.arange(-2 * max_distance, 2 * max_distance + 1)
    try:
        theirs = layer._relative_position_bucket(
            distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
        )
    except TypeError:  # arguments of another name
        return False
    return torch.equal(theirs, relative_buckets(distances, buckets, max_distance, bidirectional))
