"""Report of what ``accelerate`` did to a model."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..dialects.common import LAST_WEIGHTS
from ..layers.padded_calls import PaddedCalls
from .report_text import text_of
from .row import ALREADY, Row

LOCK = threading.RLock()
"""Lock, held while a model is changed."""


class Change(Protocol):
    """A change other than the class of a module."""

    def undo(self) -> None:
        """Undo the change."""


_MISSING = object()


@dataclasses.dataclass
class Attribute:
    """A module's own attribute, and the new value that :meth:`put` sets."""

    module: nn.Module
    name: str
    new: Any
    old: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.old = self.module.__dict__.get(self.name, _MISSING)

    def put(self) -> None:
        """Set the new value."""
        self.module.__dict__[self.name] = self.new

    def undo(self) -> None:
        """Restore the old value, unless the attribute was changed since."""
        if self.module.__dict__.get(self.name, _MISSING) is not self.new:
            return
        if self.old is _MISSING:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.old


@dataclasses.dataclass
class Report:
    """Result of ``accelerate``: print it for at most ten lines, or :meth:`undo` it.

    Attributes:
        rows: one row per swapped module, and per unchanged module that a reader might expect to be swapped.
        plain: number of ``torch.nn`` modules with nothing to gain (Linear, ReLU, containers), by class name.
        packed: True if the padding was to be skipped.
        padded_calls: reasons why calls of a packed model kept their padding so far, with counts.
        attention: one row per attention module; ``now`` is the way in which the kernels compute the module, None if
            they do not.
        notes: requests that this model cannot meet, with the reasons; with ``quantize``, numbers and memory.
        int8: paths of the layers that this call gave int8 weights.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    plain: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    packed: bool = False
    padded_calls: PaddedCalls = dataclasses.field(default_factory=PaddedCalls)
    attention: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    int8: tuple[str, ...] = ()
    _originals: list[tuple[nn.Module, type[nn.Module], type[nn.Module], dict[str, Any]]] = dataclasses.field(
        default_factory=list, repr=False
    )
    _changes: list[Change] = dataclasses.field(default_factory=list, repr=False)
    _explain: Callable[[Any], str] = dataclasses.field(default=str, repr=False)

    @property
    def swapped(self) -> list[Row]:
        """Modules that this call swapped."""
        return [row for row in self.rows if row.now is not None]

    @property
    def left(self) -> list[Row]:
        """Unchanged modules, each with the reason."""
        return [row for row in self.rows if row.now is None]

    @property
    def already(self) -> list[Row]:
        """Unchanged modules that already run on the fused ops: swapped by an earlier call, or of this package."""
        return [row for row in self.rows if row.why == ALREADY]

    def explain(self, batch: Any) -> str:
        """Count the calls of a batch that reach the kernels, and the positions that the layers compute.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the text shows
        what packing would skip. With ``functional=True`` a line counts the calls of torch's functions that are ours.

        Args:
            batch: arguments of the model: a dictionary of keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

    def undo(self) -> None:
        """Undo all changes of this call. Parameters keep their current values.

        Raises:
            RuntimeError: if ``quantize=Int8(free=True)`` freed weights; nothing is undone then.
        """
        with LOCK:
            if reasons := [why for change in self._changes if (why := getattr(change, "refusal", str)())]:
                raise RuntimeError(f"undo is not possible: {reasons[0]}")
            for module, original, fast, attributes in reversed(self._originals):
                if type(module) is fast:
                    module.__class__ = original
                    module.__dict__.pop(LAST_WEIGHTS, None)
                    module.__dict__.update(attributes)
            self._originals.clear()
            for change in reversed(self._changes):
                change.undo()
            self._changes.clear()

    def __str__(self) -> str:
        calls = [f"{n} calls with padding: {reason}" for reason, n in self.padded_calls.reasons.items()]
        return text_of(self.rows, self.attention, [*self.notes, *calls], packed=self.packed)
