"""Checks in the constructors of ``AttentionMask``."""

from __future__ import annotations

from types import FunctionType
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends import in_transform
from ..tracing import refuse_torchscript

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_int(n: object) -> TypeGuard[int]:
    """Return True for an int, and for a symbolic int."""
    return isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool)


def checked_offset(name: str, offset: int) -> int:
    """Return the offset, an int as :func:`is_int` takes it; raise a TypeError for other types."""
    if type(offset) is not int and not is_int(offset):
        refuse_torchscript(name)  # a size is a tensor there
        raise TypeError(f"{name}: expected an int, got {type(offset).__name__}")
    return offset


def broadcasts(size: int, limit: int) -> bool:
    """Return True if an axis of this size broadcasts to the limit.

    Not ``size in (1, limit)``: torch.compile compares a constant only with the constants of a tuple, so it would miss
    a symbolic limit. ``tests/test_architecture.py`` refuses that form.
    """
    return size == 1 or size == limit


def clamped(t: Tensor, low: int, high: int) -> Tensor:
    """Integers between two sizes or indices; those of 8 or 16 bits, which may not hold the bounds, become int64."""
    return (t if t.dtype == torch.int64 or t.dtype == torch.int32 else t.to(torch.int64)).clamp(low, high)


def kind_of(value: object) -> object:
    """Text for a message: the dtype of a tensor, or the type's name."""
    return value.dtype if isinstance(value, Tensor) else type(value).__name__


def is_plain_on_cpu(t: Tensor) -> bool:
    """Return True if values can be read at once: a plain CPU tensor outside transforms of torch.func.

    The caller checks in place if a graph is being made (``torch.compiler.is_compiling()``): a helper for that would be
    compiled alone after a graph break.
    """
    return t.device.type == "cpu" and type(t) in (Tensor, Parameter) and not in_transform()


def check_dense(name: str, t: Tensor) -> None:
    """Raise a TypeError for a sparse or nested tensor."""
    if t.layout != torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}; a sparse one is dense as t.to_dense()")


def check_float(name: str, t: Tensor, shape: str, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} must be a float tensor {shape}, got {kind_of(t)}")
    check_dense(name, t)
    if t.dim() not in dims:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(t.shape)}")


def check_integers(name: str, t: Tensor, shape: str, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or t.dtype not in INTEGERS:
        raise TypeError(f"{name} must be an integer tensor {shape}, got {kind_of(t)}")
    check_dense(name, t)
    if t.dim() not in dims:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(t.shape)}")


def interval_bound(name: str, bound: Tensor | None) -> Tensor | None:
    """A bound of intervals, (Lq,), (B, Lq) or (B, H, Lq), with three dimensions."""
    if bound is None:
        return None
    check_integers(f"intervals: {name}", bound, "(Lq,), (B, Lq) or (B, H, Lq)", (1, 2, 3))
    return bound[None, None] if bound.dim() == 1 else bound.unsqueeze(1) if bound.dim() == 2 else bound


def check_buckets(weight: Tensor, max_distance: int, bidirectional: bool) -> None:
    """Raise unless the distances near a query have a bucket each, and others are left for those farther away."""
    exact = weight.shape[0] // (4 if bidirectional else 2)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"relative: {exact} of the {weight.shape[0]} buckets of weight {tuple(weight.shape)} hold one distance "
            f"each; expected at least 1 such bucket, and max_distance above {exact}, got {max_distance}"
        )


def how_to_convert(mask: object) -> str:
    """Text for a message: how an array, a BlockMask or a function of FlexAttention becomes a mask; or ""."""
    if hasattr(mask, "__array__"):
        return "; torch.from_numpy(mask) makes a tensor of it"
    if isinstance(mask, FunctionType):
        return (
            "; torch's create_block_mask takes a function of (b, h, i, j), and tfast.compat.attention_mask_of makes an "
            "AttentionMask of the result"
        )
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(mask, BlockMask):
        return (
            "; tfast.compat.attention_mask_of(block_mask) makes an AttentionMask of it, and "
            "tfast.compat.flex_attention takes it as it is"
        )
    return ""


def boolean(mask: Tensor) -> Tensor:
    """The keep mask as bool; raise for anything but a dense bool or integer tensor."""
    if not isinstance(mask, Tensor):
        hint = how_to_convert(mask)
        raise TypeError(f"keep mask: expected a tensor or an AttentionMask, got {type(mask).__name__}{hint}")
    if mask.layout != torch.strided or mask.is_nested:
        check_dense("keep mask", mask)
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype in INTEGERS:
        return mask != 0
    raise TypeError(
        f"keep mask: a {mask.dtype} tensor can be read two ways. If it is added to the scores, pass it as bias=; "
        "if 1.0 means blocked, pass AttentionMask.blocked(mask); if 1.0 means kept, pass mask.bool()."
    )


def check_leading(mask: Tensor) -> None:
    """Refuse a mask (N, Lq, Lk), whose first dimension may be the batch or the heads."""
    if mask.shape[0] != 1:
        raise ValueError(
            f"mask: the first dimension of {tuple(mask.shape)} can be read two ways: pass t[:, None] if it is the "
            "batch, t[None] if it is the heads"
        )


MANY = 2
"""A number of keys for which lengths that are all 0 or 1 may be a keep mask."""


def may_be_keep(lengths: Tensor, Lk: int) -> bool:
    """Return True if lengths per query (B, Lq) look like a keep mask: only 0 and 1, with several keys.

    False if the values cannot be read at once, and for a single query, whose length may be 1.
    """
    if torch.compiler.is_compiling() or lengths.dim() != 2 or Lk <= 1 or not is_plain_on_cpu(lengths):
        return False
    return lengths.shape[1] > 1 and lengths.numel() > 0 and bool(((lengths == 0) | (lengths == 1)).all())


def four_dimensions(mask: Tensor) -> Tensor:
    """The mask or bias with four dimensions; missing axes are added in front, by rank."""
    if not 1 <= mask.dim() <= 4:
        raise ValueError(
            f"mask: expected 1 to 4 dimensions broadcastable to (B, H, Lq, Lk), got shape {tuple(mask.shape)}"
        )
    return mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def not_a_mask(other: object, symbol: str = "&") -> TypeError:
    """Error for ``mask & other``, or another symbol, with the expressions to write instead."""
    if not isinstance(other, Tensor):
        hint = how_to_convert(other)
        return TypeError(f"AttentionMask {symbol} {type(other).__name__}: both sides must be an AttentionMask{hint}")
    # Libraries differ in the meaning of True and in the presence of the head axis, so no reading is chosen here.
    keep, blocked = "AttentionMask.keep(t) if nonzero means kept", "AttentionMask.blocked(t) if nonzero means blocked"
    readings = [keep, blocked]
    if other.is_floating_point():
        keep = "AttentionMask.keep(t.bool()) if nonzero means kept"
        readings = [keep, blocked, "AttentionMask.bias(t) if it is added to the scores"]
    elif other.dtype != torch.bool:
        readings.append("AttentionMask.lengths(t) if it holds lengths")
    return TypeError(
        f"AttentionMask {symbol} tensor: a {other.dtype} tensor {tuple(other.shape)} can be read in several ways. "
        f"Combine the mask with {'; '.join(readings)}."
    )


def no_complement(mask: object) -> TypeError:
    """Error for ``~mask``, with the expressions to write instead."""
    return TypeError(
        f"~AttentionMask: {mask} has no complement. If True in the tensor t of a mask means blocked, write "
        "AttentionMask.blocked(t); if it means kept, AttentionMask.keep(t). The keys that a mask hides are "
        "AttentionMask.blocked(mask.dense(Lq, Lk))"
    )
