"""A call of a model whose layers run without the padding of its batch.

The masks that transformers makes say where the padding is. A mask that is made inside of such a call holds the call, so
a layer finds out from its mask alone how its inputs are packed; this holds too when it is computed again for backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ..layers.padded_calls import NO_TOKEN, PaddedCalls
from ..masks.packing import Packing, packing_of

_current: ContextVar[Unpadded | None] = ContextVar("unpadded", default=None)


class Unpadded:
    """One call of a model.

    Attributes:
        read: int64 (batch,), the position of each row that the head of a causal model reads; that of another model
            reads the first. None where no head reads single positions.
        head: how the hidden states are packed from which the output layer makes logits; None where it stays padded.
        head_was_packed: whether it was called since.
    """

    def __init__(self, calls: PaddedCalls) -> None:
        self.read: Tensor | None = None
        self.head: Packing | None = None
        self.head_was_packed = False
        self._calls = calls
        self._noted: set[str] = set()
        self._packings: list[tuple[Tensor, Packing]] = []
        self._full: dict[tuple[int, int], Packing] = {}
        self._held_back = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the call whose masks are made in this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def hold_back(self, reason: str) -> None:
        """Let the whole call run with its padding."""
        self._held_back = True
        self.note(reason)

    def note(self, reason: str) -> None:
        """Count a reason for which a layer of this call runs with its padding, once for the call."""
        if reason not in self._noted:
            self._noted.add(reason)
            self._calls.add(reason)

    def packing(
        self, keep: Tensor | None, batch: int, length: int, device: torch.device, causal: bool | None
    ) -> Packing | None:
        """Packing of a batch (batch, length), the same object for the same padding.

        Args:
            keep: bool (batch, length), True at tokens; None where all are.
            causal: whether its queries see no later keys; None for the keys of cross-attention.

        Returns:
            None where the call must run with its padding.
        """
        if self._held_back:
            return None
        if keep is None:
            if (batch, length) not in self._full:
                self._full[batch, length] = packing_of(None, batch, length, device)
            return self._full[batch, length]
        for known, packing in self._packings:
            if known.shape == keep.shape and torch.equal(known, keep):
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
        self._packings.append((keep, packing))
        return packing


def current() -> Unpadded | None:
    """The call that is running in this thread."""
    return _current.get()
