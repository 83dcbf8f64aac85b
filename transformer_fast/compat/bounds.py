"""Convert options of other libraries: bottom-right windows and ALiBi, softcap 0 for none; checks of integer tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import is_int, kind_of
from ..ops.attention_checks import can_read_values

INTEGERS = (torch.int32, torch.int64)


def bounds_of(op: str, causal: bool, window_size: Any) -> tuple[int | None, int | None]:
    """Number of visible keys to the left and to the right of a query's own key; None is no bound.

    Args:
        op: the public name, for the messages.
        causal: True sets the right bound to 0.
        window_size: (left, right); -1 or None is no bound.

    Raises:
        TypeError, ValueError: unless both are ints of at least -1.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{op}: window_size must be (left, right), got {window_size!r}")
    left, right = window_size
    for bound in window_size:
        if bound is not None and type(bound) is not int and not is_int(bound):
            raise TypeError(f"{op}: window_size must be two ints, got {window_size!r}")
        if bound is not None and bound < -1:
            raise ValueError(f"{op}: a bound of window_size must be at least 0, or -1 for none, got {window_size!r}")
    left = None if left is None or left == -1 else left
    right = None if right is None or right == -1 else right
    return left, 0 if causal else right


def mask_of(bounds: tuple[int | None, int | None], alibi_slopes: Tensor | None, offset: int = 0) -> AttentionMask:
    """Mask of a window and of ALiBi; the own key of query i is ``i + offset``.

    Args:
        bounds: result of :func:`bounds_of`.
        alibi_slopes: float (H,) or (B, H), or None.
        offset: position of the first query among the keys: Lk - Lq aligns the corners on the bottom right.
    """
    mask = AttentionMask.window(*bounds, offset)
    return mask if alibi_slopes is None else mask & AttentionMask.alibi(alibi_slopes, offset)


def softcap_of(softcap: float | None) -> float | None:
    """Softcap as ``attention`` takes it; 0 or less becomes None."""
    return softcap if softcap is not None and softcap > 0.0 else None


def with_logsumexp(results: Any, has_logsumexp: bool) -> tuple[Tensor, Tensor | None]:
    """Output and logsumexp of an op that was called with ``return_logsumexp=has_logsumexp``; None for the latter if it
    was not requested."""
    return results if has_logsumexp else (results, None)


def check_dimensions(op: str, layouts: dict[str, str], *tensors: Any) -> None:
    """Raise unless each is a tensor with as many dimensions as its layout, such as "(B, L, H, D)"."""
    for (name, layout), t in zip(layouts.items(), tensors, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor {layout}, got {type(t).__name__}")
        if t.dim() != layout.count(",") + 1:
            raise ValueError(f"{op}: {name} must be {layout}, got shape {tuple(t.shape)}")


def check_heads(op: str, query: Tensor, key: Tensor, dim: int, enable_gqa: bool) -> None:
    """Raise unless queries and keys have equally many heads along ``dim``, or ``enable_gqa`` is set."""
    heads, key_heads = query.shape[dim], key.shape[dim]
    if heads != key_heads and not enable_gqa:
        raise ValueError(
            f"{op}: query and key must share their heads unless enable_gqa=True, got {heads} and {key_heads}"
        )


def check_integers(op: str, name: str, t: Any, shape: str, device: torch.device) -> None:
    """Raise unless t is an int32 or int64 tensor with as many dimensions as ``shape`` names, on the device."""
    if not isinstance(t, Tensor) or t.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name} must be an int32 tensor {shape}, got {kind_of(t)}")
    if t.dim() != len([size for size in shape.strip("()").split(",") if size.strip()]):
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{op}: {name} must be on q's device {device}, got {t.device}")


def check_range(op: str, name: str, t: Tensor, most: int, expected: str) -> None:
    """Raise for values outside [0, most]; values are checked on a CPU only."""
    if can_read_values(t) and t.numel() > 0:
        low, high = (int(bound) for bound in torch.aminmax(t))
        if low < 0 or high > most:
            raise ValueError(f"{op}: {name} must lie in [0, {most}], {expected}, got {low} to {high}")
