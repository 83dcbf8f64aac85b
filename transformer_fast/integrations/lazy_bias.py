"""T5's relative positions in normal form, and a lazy tensor for the dense bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..masks import AttentionMask
from ..masks.distance import relative_buckets
from ..tensors import made_when_read
from ..tracing import is_traced

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


def make_lazy(layer: type[nn.Module], names: set[str]) -> None:
    """Make an attention layer like T5's return a :class:`LazyBias`, under an implementation in `names`.

    Other layers do not change. Calls that are compiled, traced, checkpointed or small use the dense bias.
    """
    compute = vars(layer).get("compute_bias")
    if compute is None or not hasattr(layer, "_relative_position_bucket") or hasattr(compute, "__wrapped__"):
        return

    @functools.wraps(compute)
    def compute_bias(self: Any, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        offset = kwargs.get("past_seen_tokens", args[1] if len(args) > 1 else 0)
        lazy = (
            not (torch.compiler.is_compiling() or is_traced())
            and self.config._attn_implementation in names
            and all(type(n) is int for n in (query_length, key_length, offset))
            and query_length * key_length >= WORTH_IT
            and not (getattr(self, "gradient_checkpointing", False) and self.training)
            and _is_t5s(layer, *_numbers(self))
        )
        if not lazy:
            return compute(self, query_length, key_length, *args, **kwargs)
        weight = self.relative_attention_bias.weight
        _, max_distance, bidirectional = _numbers(self)
        mask = AttentionMask.relative(weight, max_distance, bidirectional, offset)
        return LazyBias(mask, (1, weight.shape[1], query_length, key_length), weight)

    layer.compute_bias = compute_bias  # type: ignore[attr-defined]


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
