"""Modules that leave the padding of a batch out, and the calls in which they could not.

``accelerate(model, packed=True)`` gives such a module a :class:`PaddedCalls`, which goes where the module goes: into a
copy and into a pickle.
"""

from __future__ import annotations

import logging

from torch import nn

WITHOUT_PADDING = "_without_padding"
"""The attribute of a module that leaves padding out; its value is a :class:`PaddedCalls`."""

GAPS = "padding stands between tokens, and attention counts the distance between them"
NO_TOKEN = "a batch has no token at all"
NO_SOURCE = "a row of the encoder has no token"

_LOG = logging.getLogger("transformer_fast")


class StaysPaddedError(Exception):
    """Reason for which a module computes a batch with its padding."""


class PaddedCalls:
    """How many calls kept their padding, by the reason.

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


def padded_calls(module: nn.Module) -> PaddedCalls | None:
    """Return the record of a module that leaves padding out; None for every other."""
    return module.__dict__.get(WITHOUT_PADDING)
