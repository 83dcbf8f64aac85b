"""Modules that leave the padding of a batch out, and the calls in which they could not.

``accelerate(model, packed=True)`` gives such a module a :class:`PaddedCalls`, which goes where the module goes: into a
copy and into a pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor, nn

from ..masks.packing import PackedMask

WITHOUT_PADDING = "_without_padding"
"""The attribute of a module that leaves padding out; its value is a :class:`PaddedCalls`."""

GAPS = "padding stands between tokens, and attention counts the distance between them"
NO_TOKEN = "a batch has no token at all"
NO_SOURCE = "a row of the encoder has no token"

_LOG = logging.getLogger("transformer_fast")


_LISTS = ("layers", "enc_layers", "dec_layers", "blks")


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a stack; of a layer, the layer itself."""
    lists = (module._modules.get(name) for name in _LISTS)
    return next((list(layers) for layers in lists if isinstance(layers, nn.ModuleList | nn.Sequential)), []) or [module]


class StaysPaddedError(Exception):
    """Reason for which a module computes a batch with its padding."""


class PaddedCalls:
    """Counts of the calls that kept their padding, by the reason.

    Attributes:
        reasons: counts by reason, in the order in which the reasons were first met.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}

    def add(self, reason: str) -> None:
        """Count a reason; the first time it is logged as well."""
        if reason not in self.reasons:
            _LOG.info("a batch runs with its padding: %s", reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call of a layer or a stack that leaves padding out where it can.

    Attributes:
        module: the layer or the stack.
        positions: how many positions the batch has, B * L.
        tokens: how many of them are tokens; None where the call kept its padding.
        reason: for keeping it, or "".
    """

    module: nn.Module
    positions: int
    tokens: int | None
    reason: str = ""


_passes: ContextVar[list[Pass] | None] = ContextVar("passes", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Pass]]:
    """Record the passes of this thread."""
    passes: list[Pass] = []
    token = _passes.set(passes)
    try:
        yield passes
    finally:
        _passes.reset(token)


def record(module: nn.Module, positions: int, tokens: int | None, reason: str = "") -> None:
    """Add a pass to the record, if there is one."""
    if (passes := _passes.get()) is not None:
        passes.append(Pass(module, positions, tokens, reason))


def stays_padded(module: nn.Module, calls: PaddedCalls, x: Tensor, reason: Exception) -> None:
    """Count the reason for which a module computes x (B, L, d), or (L, B, d), with its padding."""
    calls.add(str(reason))
    record(module, x.shape[0] * x.shape[1], None, str(reason))


def check_sources(cross: PackedMask) -> None:
    """Raise StaysPaddedError where a row has queries and no keys.

    A query without keys attends to all padded keys in most models, and to nothing where they are packed.
    """
    if bool(((cross.keys.cu_seqlens.diff() == 0) & (cross.queries.cu_seqlens.diff() > 0)).any()):
        raise StaysPaddedError(NO_SOURCE)


def padded_calls(module: nn.Module) -> PaddedCalls | None:
    """Return the record of a module that leaves padding out; None for every other."""
    return module.__dict__.get(WITHOUT_PADDING)
