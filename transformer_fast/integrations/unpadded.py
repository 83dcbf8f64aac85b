"""A model call whose layers skip the padding of the batch.

The masks that transformers makes contain the padding. A mask made inside such a call refers to the call. So a layer
learns the packing of its inputs from its mask alone, also when it is recomputed for the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..layers.padded_calls import NO_TOKEN, PaddedCalls
from ..masks.packing import Packing, packing_of

_View = tuple[Any, ...]
_current: ContextVar[Unpadded | None] = ContextVar("unpadded", default=None)


class Unpadded:
    """One call of a model.

    Attributes:
        read: int64 (batch,), position per row that the head of a causal model reads; heads of other models read the
            first position. None if no head reads single positions.
        head: packing of the hidden states for the output layer; None if the output layer stays padded.
        head_was_called: True after the output layer was called with these hidden states.
        packs_logits: True if the output layer returns the logits of tokens, from which the loss is computed.
        is_plain: True if the model's own code runs with the arguments that it was given.
        held_back: True if the whole call runs with its padding.
    """

    def __init__(self, calls: PaddedCalls) -> None:
        self.read: Tensor | None = None
        self.head: Packing | None = None
        self.head_was_called = self.packs_logits = self.is_plain = self.held_back = False
        self._calls = calls
        self._noted: set[str] = set()
        self._packings: list[tuple[_View, Tensor, Packing]] = []
        self._full: dict[tuple[int, int], Packing] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current call of this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def hold_back(self, reason: str) -> None:
        """Run the whole call with its padding."""
        self.held_back = True
        self.add(reason)

    def add(self, reason: str) -> None:
        """Count a reason why a layer of this call keeps its padding, once per call."""
        if reason not in self._noted:
            self._noted.add(reason)
            self._calls.add(reason)

    def packing(
        self, keep: Tensor | None, batch: int, length: int, device: torch.device, causal: bool | None
    ) -> Packing | None:
        """Packing of a batch (batch, length); equal padding gives the same object.

        Args:
            keep: bool (batch, length), True at tokens; None for no padding.
            causal: True if queries see no later keys; None for the keys of cross-attention.

        Returns:
            None if the call must keep its padding.
        """
        if self.held_back:
            return None
        if keep is None:
            if (batch, length) not in self._full:
                self._full[batch, length] = packing_of(None, batch, length, device)
            return self._full[batch, length]
        if (packing := self._known(keep)) is not None:
            return packing
        packing = packing_of(keep, batch, length, device)
        if packing.total == 0:
            self.hold_back(NO_TOKEN)
            return None
        if causal is not None and self.read is not None:
            read = self.read if causal else torch.zeros_like(self.read)
            if read.shape[0] != batch or not bool(keep.gather(1, read.to(keep.device)[:, None]).all()):
                self.hold_back("the model's head reads a position that is padding")
                return None
        self._packings.append((_view(keep), keep, packing))
        return packing

    def _known(self, keep: Tensor) -> Packing | None:
        """Packing of an equal mask. A view of memory that was seen before is not read, which would wait for a GPU."""
        view = _view(keep)
        for seen, _, packing in self._packings:
            if seen == view:
                return packing
        for seen, known, packing in self._packings:
            if known.shape == keep.shape and seen == _view(known) and torch.equal(known, keep):
                self._packings.append((view, keep, packing))
                return packing
        return None


def _view(t: Tensor) -> _View:
    """Memory and layout of a tensor, and how often it was written to (inference tensors do not count)."""
    return t.data_ptr(), t.device, t.dtype, t.shape, t.stride(), None if t.is_inference() else t._version


def current() -> Unpadded | None:
    """Current call of this thread."""
    return _current.get()
