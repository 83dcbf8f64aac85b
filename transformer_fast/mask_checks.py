"""What the constructors of ``AttentionMask`` refuse."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def checked_offset(name: str, offset: int) -> int:
    """The offset, an int or the symbol of one in a graph; a TypeError that names it for anything else."""
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(offset).__name__}")
    return offset


def kind_of(given: object) -> object:
    """What a message says of an argument of the wrong kind: a tensor's dtype, or the name of another type."""
    return given.dtype if isinstance(given, Tensor) else type(given).__name__


def check_float(name: str, t: Tensor, shape: str, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} must be a float tensor {shape}, got {kind_of(t)}")
    if t.dim() not in dims:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(t.shape)}")


def boolean(mask: Tensor, dialect: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{dialect} mask: expected a tensor or an AttentionMask, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype in INTEGERS:
        return mask != 0
    raise TypeError(
        f"{dialect} mask: a {mask.dtype} tensor can be read two ways. If it is added to the scores, pass it as bias=; "
        "if 1.0 means blocked, pass AttentionMask.blocked(mask); if 1.0 means kept, pass mask.bool()."
    )


def four_dimensions(mask: Tensor) -> Tensor:
    if not 1 <= mask.dim() <= 4:
        raise ValueError(
            f"mask: expected 1 to 4 dimensions broadcastable to (B, H, Lq, Lk), got shape {tuple(mask.shape)}"
        )
    return mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def not_a_mask(other: object) -> TypeError:
    """What to write instead of ``mask & other``."""
    if not isinstance(other, Tensor):
        return TypeError(f"AttentionMask & {type(other).__name__}: both sides must be an AttentionMask")
    # Libraries differ in what True means, and in whether the head axis is already there, so nothing is guessed.
    keep, blocked = "AttentionMask.keep(t) if nonzero means kept", "AttentionMask.blocked(t) if nonzero means blocked"
    readings = [keep, blocked]
    if other.is_floating_point():
        keep = "AttentionMask.keep(t.bool()) if nonzero means kept"
        readings = [keep, blocked, "AttentionMask.bias(t) if it is added to the scores"]
    elif other.dtype != torch.bool:
        readings.append("AttentionMask.lengths(t) if it holds lengths")
    return TypeError(
        f"AttentionMask & tensor: a {other.dtype} tensor {tuple(other.shape)} can be read in several ways. Combine "
        f"the mask with {'; '.join(readings)}."
    )
