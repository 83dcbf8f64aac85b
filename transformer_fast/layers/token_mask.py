"""Mask of the tokens that a layer of unknown code computes: attention inside it takes this mask for the layer's own.

The layer's code is given tokens (1, T, d) as one sequence without padding, and a mask of its own kind that keeps every
token. What that code makes of such a mask says nothing, so attention reads the boundaries of the sentences here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ..masks.packing import PackedMask
from .padded_calls import StaysPaddedError

_mask: ContextVar[PackedMask | None] = ContextVar("token_mask", default=None)


@contextlib.contextmanager
def on_tokens(mask: PackedMask) -> Iterator[None]:
    """Give attention in this block the mask of the tokens."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


def is_on_tokens() -> bool:
    """Return True inside a layer that computes tokens alone."""
    return _mask.get() is not None


def token_mask(mask: Any, *inputs: Tensor | None) -> Any:
    """Mask of the tokens inside such a layer, else the mask that is given.

    Args:
        mask: mask argument of an attention.
        inputs: its queries, keys and values (1, T, d); None for those that are the queries.

    Raises:
        StaysPaddedError: if the inputs are not the layer's tokens.
    """
    tokens = _mask.get()
    if tokens is None:
        return mask
    expected = (1, tokens.queries.total)
    if any(t is not None and tuple(t.shape[:2]) != expected for t in inputs):
        raise StaysPaddedError("its attention reads something else than the tokens of its layer")
    return tokens
