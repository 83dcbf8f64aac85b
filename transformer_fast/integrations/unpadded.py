"""A model call whose layers skip the padding of the batch.

The masks that transformers makes contain the padding. A mask made inside such a call refers to the call. So a layer
learns the packing of its inputs from its mask alone, also when it is recomputed for the backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..layers.padded_calls import NO_TOKEN, PaddedCalls
from ..masks.packing import Packing, packing_of, packings_of

_View = tuple[Any, ...]
_current: ContextVar[Unpadded | None] = ContextVar("unpadded", default=None)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A mask that was read, and its packing.

    Attributes:
        kept: True if the positions that the head reads are tokens: the first ones, and those of a causal model.
    """

    view: _View
    keep: Tensor
    packing: Packing
    kept: tuple[bool, bool]


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
        self._seen: list[_Seen] = []
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

    def look_at(self, keeps: Iterable[Tensor], also: Sequence[Tensor] = ()) -> tuple[list[Packing], list[bool]]:
        """Packings of masks, bool (batch, length), and values of bool tensors (), all by one read."""
        keeps, read = list(keeps), self.read
        fits = [read is not None and read.shape[0] == keep.shape[0] for keep in keeps]
        for keep, fit in zip(keeps, fits):
            if fit:
                also = [*also, keep[:, 0].all(), keep.gather(1, read.to(keep.device)[:, None]).all()]  # type: ignore
        packings, values = packings_of(((keep, *keep.shape, keep.device) for keep in keeps), also)
        for keep, packing, fit in zip(reversed(keeps), reversed(packings), reversed(fits)):
            last, first = (values.pop(), values.pop()) if fit else (read is None, read is None)
            self._seen.append(_Seen(_view(keep), keep, packing, (first, last)))
        return packings, values

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
        if (seen := self.seen(keep)) is None:
            self.look_at([keep])
            seen = self._seen[-1]
        if seen.packing.total == 0:
            self.hold_back(NO_TOKEN)
        elif causal is not None and not seen.kept[causal]:
            self.hold_back("the model's head reads a position that is padding")
        return None if self.held_back else seen.packing

    def seen(self, keep: Tensor) -> _Seen | None:
        """Find an equal mask among those that were read. Memory that was read before is not read again."""
        view = _view(keep)
        for seen in self._seen:
            if seen.view == view:
                return seen
        for seen in self._seen:
            if seen.keep.shape == keep.shape and seen.view == _view(seen.keep) and torch.equal(seen.keep, keep):
                self._seen.append(dataclasses.replace(seen, view=view, keep=keep))
                return seen
        return None


def known(mask: Tensor, keep: Tensor) -> Tensor:
    """Alias of a mask whose conversion to bool is this tensor, so that nothing must compare the two."""
    if mask.is_inference():
        return mask
    alias, views = mask.detach(), (_view(mask), _view(keep))

    def to(*args: Any, **kwargs: Any) -> Tensor:
        made = mask.to(*args, **kwargs)
        is_keep = made.dtype == torch.bool and made.device == keep.device and views == (_view(mask), _view(keep))
        return keep if is_keep else made

    alias.to = to  # type: ignore[method-assign]
    return alias


def has_padding(keep: Tensor) -> bool:
    """Return True if a mask is not True everywhere; one that the current call has seen is not read again."""
    call = _current.get()
    seen = None if call is None else call.seen(keep)
    return not (bool(keep.all()) if seen is None else seen.packing.is_full)


def _view(t: Tensor) -> _View:
    """Memory and layout of a tensor, and how often it was written to (inference tensors do not count)."""
    return t.data_ptr(), t.device, t.dtype, t.shape, t.stride(), None if t.is_inference() else t._version


def current() -> Unpadded | None:
    """Current call of this thread."""
    return _current.get()
