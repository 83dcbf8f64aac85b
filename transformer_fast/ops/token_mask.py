"""Attention of a layer that computes the tokens of a batch alone.

The layer's code is given tokens (1, T, d), or (T, 1, d), as one sequence without padding, and a mask of its own kind
that keeps every token. What that code makes of such a mask says nothing, so ``attention`` and
``scaled_dot_product_attention`` read the boundaries of the sentences here.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from ..masks.packing import PackedMask
from .attention_packed import attention_packed

_CHECKPOINT = "it checkpoints a part of itself"
_READ = "its code reads attention weights"
_NOT_PADDING = "its attention has a mask that is not padding alone"


class StaysPaddedError(Exception):
    """Error whose text is the reason why a module computes a batch with its padding."""


class OnTokens:
    """One call of a layer on tokens.

    Attributes:
        mask: mask of the tokens.
        grad_enabled: True if gradients were on when the layer was called.
        reads: number of attentions that have read the mask.
        redirected: True if the layer's code called torch's ``scaled_dot_product_attention``.
    """

    def __init__(self, mask: PackedMask) -> None:
        self.mask, self.grad_enabled = mask, torch.is_grad_enabled()
        self.reads, self.redirected = 0, False
        self._weights: list[weakref.ref[UnreadWeights]] = []

    def read(self, *inputs: Tensor | None) -> PackedMask:
        """Mask of the tokens, for an attention with these queries, keys and values (1, T, ...); None for those that
        are the queries.

        Raises:
            StaysPaddedError: if the inputs are not the layer's tokens.
        """
        expected = (1, self.mask.queries.total)
        if any(t is not None and tuple(t.shape[:2]) != expected for t in inputs):
            raise StaysPaddedError("its attention reads something else than the tokens of its layer")
        self.reads += 1
        return self.mask

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: tuple[Tensor | None, ...],
        *,
        others: bool = False,
        return_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of tokens q, k and v (1, heads, T, d) -> (1, heads, T, d); or a tuple of it and
        :class:`UnreadWeights`.

        Args:
            q, k, v: queries, keys and values.
            masks: what the layer's code made of its mask: tensors with one value per key.
            others: True if the call has a mask of another kind, such as look-ahead.
            return_weights: also return the stand-in for weights.
            options: further arguments of :func:`transformer_fast.attention_packed`.

        Raises:
            StaysPaddedError: if the layer must compute the batch with its padding.
        """
        if others or not q.dim() == k.dim() == v.dim() == 4:
            raise StaysPaddedError(_NOT_PADDING)
        mask = self.read(*(t.transpose(1, 2) for t in (q, k, v)))
        if any(t is not None and _values(t) != mask.queries.total for t in masks):
            raise StaysPaddedError(_NOT_PADDING)
        bounds = mask.queries.cu_seqlens, mask.keys.cu_seqlens
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        options |= {"max_seqlen_q": mask.queries.max_length, "max_seqlen_k": mask.keys.max_length}
        out: Tensor = attention_packed(q, k, v, *bounds, **options)
        out = out.transpose(0, 1).unsqueeze(0)
        return (out, self.weights()) if return_weights else out

    def weights(self) -> UnreadWeights:
        """Stand-in for attention weights, which nobody may read."""
        made = UnreadWeights()
        self._weights.append(weakref.ref(made))
        return made

    def check_weights(self) -> None:
        """Raise StaysPaddedError if the layer's code has kept attention weights."""
        if any(ref() is not None for ref in self._weights):
            raise StaysPaddedError(_READ)


def _values(mask: Tensor) -> int:
    """Number of values of a mask, where an expanded dimension has one."""
    return math.prod(size for size, stride in zip(mask.shape, mask.stride()) if stride != 0)


class UnreadWeights:
    """Stand-in for attention weights (B, Lq, Lk) that a layer's code asks for, and mostly drops."""

    @classmethod
    def __torch_function__(cls, *args: Any) -> NoReturn:
        raise StaysPaddedError(_READ)

    def __getattr__(self, name: str) -> NoReturn:
        raise StaysPaddedError(_READ)


CALL: ContextVar[OnTokens | None] = ContextVar("on_tokens", default=None)
"""Call of the layer that computes tokens alone; :func:`call_on_tokens` reads it."""


@contextlib.contextmanager
def on_tokens(mask: PackedMask) -> Iterator[OnTokens]:
    """Give attention in this block the mask of the tokens."""
    call = OnTokens(mask)
    token = CALL.set(call)
    try:
        with _no_checkpoint():
            yield call
    finally:
        CALL.reset(token)


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
    call = None if torch.compiler.is_compiling() else CALL.get()
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
    if isinstance(mask, Tensor) and _values(mask) != call.mask.queries.total:
        raise StaysPaddedError(_NOT_PADDING)
    return call.read(*inputs)
