"""Record of calls in which a module that skips padding had to compute a batch with its padding.

``accelerate(model, packed=True)`` sets a :class:`PaddedCalls` on each module that skips padding. Copies and pickles of
the module keep the record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from torch import nn

from ..masks.packing import Packing
from ..ops.token_mask import StaysPaddedError as StaysPaddedError

WITHOUT_PADDING = "_without_padding"
"""Name of the attribute that holds the :class:`PaddedCalls` of a module that skips padding."""

GAPS = "padding stands between tokens, and attention counts the distance between them"
NO_TOKEN = "a batch has no token at all"
NO_SOURCE = "a row of the encoder has no token"

_LOG = logging.getLogger("transformer_fast")
_LISTS = ("layers", "enc_layers", "dec_layers", "blks", "layer", "block", "h", "albert_layer_groups")


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers of a stack; a single layer is returned as it is."""
    lists = (module._modules.get(name) for name in _LISTS)
    return next((list(layers) for layers in lists if isinstance(layers, nn.ModuleList | nn.Sequential)), []) or [module]


class PaddedCalls:
    """Number of calls that kept their padding, by reason.

    Attributes:
        reasons: counts by reason, in order of first occurrence.
        warns: log a reason at its first occurrence.
    """

    warns = False

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}

    def add(self, reason: str) -> None:
        """Count a reason."""
        if self.warns and reason not in self.reasons:
            _LOG.warning("packed=True: a batch runs with its padding: %s", reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call of a layer or a stack that skips padding if possible.

    Attributes:
        module: the layer or the stack.
        positions: number of positions in the batch, B * L.
        packing: places of the tokens; None if the call kept its padding.
        reason: reason for keeping the padding, or "".
    """

    module: nn.Module
    positions: int
    packing: Packing | None
    reason: str = ""

    @property
    def computed(self) -> int:
        """Number of positions that were computed."""
        return self.positions if self.packing is None else self.packing.total


_passes: ContextVar[list[Pass] | None] = ContextVar("passes", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Pass]]:
    """Record the calls of this thread."""
    passes: list[Pass] = []
    token = _passes.set(passes)
    try:
        yield passes
    finally:
        _passes.reset(token)


def record(module: nn.Module, positions: int, packing: Packing | None, reason: str = "") -> None:
    """Add a call to the record, if recording is on."""
    if (passes := _passes.get()) is not None:
        passes.append(Pass(module, positions, packing, reason))


def padded_calls(module: nn.Module) -> PaddedCalls | None:
    """Return the record of a module that skips padding; None for other modules."""
    return module.__dict__.get(WITHOUT_PADDING)
