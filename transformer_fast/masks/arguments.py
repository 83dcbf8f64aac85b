"""Masks as arguments of functions: what a function takes for a mask, and the parts that it does not know."""

from __future__ import annotations

from torch import Tensor

from .checks import checked_offset
from .mask import PARTS, AttentionMask
from .parts import combine

_NO_MASK = AttentionMask()


def as_attention_mask(mask: AttentionMask | Tensor | None) -> AttentionMask:
    """Convert a ``mask`` argument of ``tfast.attention``: an AttentionMask, a bool or integer keep mask, or None."""
    if mask is None:
        return _NO_MASK
    return mask if isinstance(mask, AttentionMask) else AttentionMask.keep(mask)


def parts_beside(mask: AttentionMask, *names: str) -> list[str]:
    """Names of the parts that a mask has, in the order of its fields, except those that the caller knows.

    Code that refuses all other parts also refuses a part that is added later.
    """
    parts = {name: getattr(mask, name) for name in PARTS if name not in names}
    return [name for name, part in parts.items() if part is not None and not (isinstance(part, tuple) and not part)]


def and_causal(offset: int | None, causal: bool | int) -> int | None:
    """Combined causal offset of a mask with causal offset `offset` and of the argument ``causal`` of
    ``tfast.attention``."""
    if causal is False:
        return offset
    return combine("causal", offset, 0 if causal is True else checked_offset("causal offset", causal), min)
