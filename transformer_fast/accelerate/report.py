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

LOCK = threading.RLock()
"""Held while a model is changed."""

ALREADY = "it runs on the fused ops already"
"""Why a module is left that was swapped before, or is one of this package."""

_SHOWN = 2
"""Paths that a line shows of modules that were left for one reason."""

_FOLDED = ("nn.Dropout", "Dropout", "nn.Linear", "Linear")
"""Modules of which a model has many, and nobody asks for one of them."""


class Change(Protocol):
    """Something else than the class of a module that was changed."""

    def explain(self, batch: Any) -> str:
        """Say what the layers of the model do with a batch: positions, tokens, and what they compute, as a table.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the table says what
        that would leave out.

        Args:
            batch: what the model is called with: keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

    def undo(self) -> None:
        """Make it again what it was."""


_MISSING = object()


@dataclasses.dataclass
class Attribute:
    """An attribute of a module itself, and the value that it is given by :meth:`put`."""

    module: nn.Module
    name: str
    new: Any
    old: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.old = self.module.__dict__.get(self.name, _MISSING)

    def put(self) -> None:
        """Give it the new value."""
        self.module.__dict__[self.name] = self.new

    def undo(self) -> None:
        """Put the old value back, unless another one was put in since."""
        if self.module.__dict__.get(self.name, _MISSING) is not self.new:
            return
        if self.old is _MISSING:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.old


@dataclasses.dataclass(frozen=True)
class Row:
    """One module: its path in the model, what it was, what it is now (None: left as it was), and why it was left."""

    path: str
    was: str
    now: str | None
    why: str = ""

    @property
    def reason(self) -> str:
        """Reason for leaving it, without what is said of this module alone."""
        return self.why.partition(";")[0]


@dataclasses.dataclass
class Report:
    """Result of ``accelerate``: print it for the table, or :meth:`undo` it.

    Attributes:
        rows: a row for each module that was swapped, and for each that was left and might have been expected not to.
        plain: how many modules of ``torch.nn`` have nothing to gain (Linear, ReLU, containers), by class name.
        padded_calls: reasons for which calls of a packed model have kept their padding until now.
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
        """The modules that this call put on the fused ops."""
        return [row for row in self.rows if row.now is not None]

    @property
    def left(self) -> list[Row]:
        """The modules that were left as they were, each with the reason."""
        return [row for row in self.rows if row.now is None]

    @property
    def already(self) -> list[Row]:
        """Those among the left that run on the fused ops already: swapped by an earlier call, or ours."""
        return [row for row in self.rows if row.why == ALREADY]

    def explain(self, batch: Any) -> str:
        """Say what the layers of the model do with a batch: positions, tokens, and what they compute, as a table.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the table says what
        that would leave out.

        Args:
            batch: what the model is called with: keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

    def undo(self) -> None:
        """Make everything that this call changed again what it was. Parameters are those that the model has now."""
        with LOCK:
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
        """Return the first column of each line, and its row.

        Modules that were left for the same reason share a line. So do the many modules of one outcome.
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
    """One line for rows of one outcome: the first paths and the number of the others."""
    first, shown = rows[0], 1 if rows[0].now is not None else _SHOWN
    paths = ", ".join(row.path or "(model)" for row in rows[:shown])
    if len(rows) > shown:
        paths += f" and {len(rows) - shown} more"
    kinds, reasons = {row.was for row in rows}, {row.why for row in rows}
    was = first.was if len(kinds) == 1 else f"{len(kinds)} classes"
    return paths, Row(first.path, was, first.now, first.why if len(reasons) == 1 else first.reason)
