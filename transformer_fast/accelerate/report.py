"""Report of what ``accelerate`` did to a model."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..layers.padded_calls import PaddedCalls
from .made import forget

LOCK = threading.RLock()
"""Lock, held while a model is changed."""

ALREADY = "it runs on the fused ops already"
"""Reason for a module that was swapped earlier or that belongs to this package."""

_SHOWN = 2
"""Maximum number of paths per line, for modules left for the same reason."""

_FOLDED = ("nn.Dropout", "Dropout", "nn.Linear", "Linear")
"""Module classes that are frequent in a model and are summed up by count."""


class Change(Protocol):
    """A change other than the class of a module."""

    def explain(self, batch: Any) -> str:
        """Table of a batch in the layers of the model: positions, tokens, and computed positions.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the table shows
        what packing would skip.

        Args:
            batch: arguments of the model: a dictionary of keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

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


@dataclasses.dataclass(frozen=True)
class Row:
    """One module: path in the model, former class, new class (None: unchanged), and the reason to leave it."""

    path: str
    was: str
    now: str | None
    why: str = ""

    @property
    def reason(self) -> str:
        """Reason to leave the module, without details of this single module."""
        return self.why.partition(";")[0]


@dataclasses.dataclass
class Report:
    """Result of ``accelerate``: print it for the table, or :meth:`undo` it.

    Attributes:
        rows: one row per swapped module, and per unchanged module that a reader might expect to be swapped.
        plain: number of ``torch.nn`` modules with nothing to gain (Linear, ReLU, containers), by class name.
        padded_calls: reasons why calls of a packed model kept their padding so far, with counts.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    plain: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    padded_calls: PaddedCalls = dataclasses.field(default_factory=PaddedCalls)
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
        """Table of a batch in the layers of the model: positions, tokens, and computed positions.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the table shows
        what packing would skip.

        Args:
            batch: arguments of the model: a dictionary of keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

    def undo(self) -> None:
        """Undo all changes of this call. Parameters keep their current values."""
        with LOCK:
            for module, original, fast, attributes in reversed(self._originals):
                if type(module) is fast:
                    module.__class__ = original
                    forget(module)
                    module.__dict__.update(attributes)
            self._originals.clear()
            for change in reversed(self._changes):
                change.undo()
            self._changes.clear()

    def __str__(self) -> str:
        header = ("module", "was", "is", "why not")
        table = [header, *((path, row.was, row.now or "the same", row.why) for path, row in self._folded())]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        lines = ["  ".join((*(c.ljust(w) for c, w in zip(line, widths)), line[3])).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in (*widths, len(header[3]))))
        done = self._summary()
        if self.plain:
            done += "; nothing to gain in " + ", ".join(f"{n} {name}" for name, n in sorted(self.plain.items()))
        calls = [f"{n} calls with padding: {reason}" for reason, n in self.padded_calls.reasons.items()]
        return "\n".join([*(lines if self.rows else ()), done, *calls])

    def _folded(self) -> list[tuple[str, Row]]:
        """Yield the first column and the row of each line.

        Modules left for the same reason share a line. Frequent modules with the same outcome share a line too.
        """
        lines: dict[Any, list[Row]] = {}
        for place, row in enumerate(self.rows):
            key = (row.was, row.now, row.why) if row.was in _FOLDED else place
            lines.setdefault(("", row.reason) if row.now is None else key, []).append(row)
        return [_line(rows) for rows in lines.values()]

    def _summary(self) -> str:
        already = len(self.already)
        left = f"{len(self.left) - already} left"
        if self.swapped:
            before = f"{already} on the fused ops already, " if already else ""
            return f"{len(self.swapped)} modules swapped, {before}{left}"
        if already:
            return f"nothing was changed: {already} modules of this model run on the fused ops already, {left}"
        return "nothing was changed: no module of this model runs faster on the fused ops"


def _line(rows: list[Row]) -> tuple[str, Row]:
    """First column of a line for rows with one outcome: the first paths and the number of further paths."""
    first, shown = rows[0], 1 if rows[0].now is not None else _SHOWN
    paths = ", ".join(row.path or "(model)" for row in rows[:shown])
    if len(rows) > shown:
        paths += f" and {len(rows) - shown} more"
    kinds, reasons = {row.was for row in rows}, {row.why for row in rows}
    was = first.was if len(kinds) == 1 else f"{len(kinds)} classes"
    return paths, Row(first.path, was, first.now, first.why if len(reasons) == 1 else first.reason)
