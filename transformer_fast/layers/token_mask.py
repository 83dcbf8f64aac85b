"""Mask of the tokens that a layer of unknown code computes: attention inside it takes this mask for the layer's own.

The layer's code is given tokens (1, T, d), or (T, 1, d), as one sequence without padding, and a mask of its own kind
that keeps every token. What that code makes of such a mask says nothing, so attention reads the boundaries of the
sentences here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from ..masks.packing import PackedMask
from .padded_calls import StaysPaddedError

_CHECKPOINT = "it checkpoints a part of itself"
_READ = "its code reads attention weights"


class OnTokens:
    """One call of a layer on tokens.

    Attributes:
        mask: mask of the tokens.
        grad_enabled: True if gradients were on when the layer was called.
    """

    def __init__(self, mask: PackedMask) -> None:
        self.mask, self.grad_enabled = mask, torch.is_grad_enabled()
        self._weights: list[weakref.ref[UnreadWeights]] = []

    def weights(self) -> UnreadWeights:
        """Stand-in for attention weights, which nobody may read."""
        made = UnreadWeights()
        self._weights.append(weakref.ref(made))
        return made

    def check_weights(self) -> None:
        """Raise StaysPaddedError if the layer's code has kept attention weights."""
        if any(ref() is not None for ref in self._weights):
            raise StaysPaddedError(_READ)


class UnreadWeights:
    """Stand-in for attention weights (B, Lq, Lk) that a layer's code asks for, and mostly drops."""

    @classmethod
    def __torch_function__(cls, *args: Any) -> NoReturn:
        raise StaysPaddedError(_READ)

    def __getattr__(self, name: str) -> NoReturn:
        raise StaysPaddedError(_READ)


_call: ContextVar[OnTokens | None] = ContextVar("on_tokens", default=None)


@contextlib.contextmanager
def on_tokens(mask: PackedMask) -> Iterator[OnTokens]:
    """Give attention in this block the mask of the tokens."""
    call = OnTokens(mask)
    token = _call.set(call)
    try:
        with _no_checkpoint():
            yield call
    finally:
        _call.reset(token)


@contextlib.contextmanager
def _no_checkpoint() -> Iterator[None]:
    """Raise an error where a checkpoint begins, unless hooks of saved tensors are set around this block."""
    guard = disable_saved_tensors_hooks(_CHECKPOINT)
    try:
        guard.__enter__()
    except RuntimeError:
        yield
        return
    try:
        yield
    finally:
        guard.__exit__(None, None, None)


def call_on_tokens() -> OnTokens | None:
    """Return the call of the layer that computes tokens alone; None outside such a layer.

    Raises:
        StaysPaddedError: inside a checkpoint, whose second run comes after the call.
    """
    call = None if torch.compiler.is_compiling() else _call.get()
    if call is not None and call.grad_enabled and not torch.is_grad_enabled():
        raise StaysPaddedError(_CHECKPOINT)
    return call


def token_mask(mask: Any, *inputs: Tensor | None) -> Any:
    """Mask of the tokens inside such a layer, else the mask that is given.

    Args:
        mask: mask argument of an attention.
        inputs: its queries, keys and values (1, T, d); None for those that are the queries.

    Raises:
        StaysPaddedError: if the inputs are not the layer's tokens.
    """
    if (call := call_on_tokens()) is None:
        return mask
    expected = (1, call.mask.queries.total)
    if isinstance(mask, Tensor) and mask.numel() != expected[1]:
        raise StaysPaddedError("its attention has a mask that is not padding alone")
    if any(t is not None and tuple(t.shape[:2]) != expected for t in inputs):
        raise StaysPaddedError("its attention reads something else than the tokens of its layer")
    return call.mask
