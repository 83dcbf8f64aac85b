"""``Report.explain``: positions that a model computes for a batch, with padding and without, and calls of torch's
functions that are ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import backends
from ..function_mode import Calls, counted_calls
from ..layers.padded_calls import Pass, layers_of, recorded
from .functional import FunctionalCalls
from .report_text import wrapped


@dataclasses.dataclass
class Line:
    """Positions and tokens of a batch in the layers of one list.

    Attributes:
        path: path of the list or of the stack in the model.
        positions: number of positions of the batch, padding included.
        tokens: number of tokens; None if the layers kept the padding.
        reason: reason for keeping the padding, or "".
        layers: number of layers.
    """

    path: str
    positions: int
    tokens: int | None
    reason: str
    layers: int = 0

    @property
    def computed(self) -> int:
        """Number of positions that each layer computes."""
        return self.positions if self.tokens is None else self.tokens


def explained(model: nn.Module, batch: Any) -> str:
    """Table of the stacks of a packed model for one batch; the model is called once, without gradients.

    Args:
        model: model after ``accelerate(model, packed=True)``.
        batch: keyword arguments, a tuple of arguments, or one argument.
    """
    parameter = next(model.parameters())
    with torch.no_grad(), recorded() as passes, counted_calls() as calls:
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*(batch if isinstance(batch, tuple) else (batch,)))
    backend, why = backends.choose("attention", parameter.device, parameter.dtype)
    lines = [f"kernels: {backend} ({why})"]
    if calls or any(isinstance(module, FunctionalCalls) for module in model.modules()):
        lines += wrapped(f"torch's functions that this package computes: {_calls(calls)}")
    found = _lines(model, passes)
    if not found:
        return "\n".join([*lines, "this batch has no padding that the model's layers can skip"])
    header = ("layers", "positions", "tokens", "computed", "why not")
    rows = [header]
    for line in found:
        tokens = "" if line.tokens is None else str(line.tokens)
        rows.append((f"{line.path} ({line.layers})", str(line.positions), tokens, str(line.computed), line.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines += ["  ".join((row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:4], widths[1:])), row[4])).rstrip()
              for row in rows]  # fmt: skip
    return "\n".join([*lines, _summary(found)])


def _calls(calls: Calls) -> str:
    """Text: how many calls of each function were ours."""
    names = dict.fromkeys(name for name, _ in calls)
    parts = [f"{name} in {calls[name, True]} of {calls[name, True] + calls[name, False]} calls" for name in names]
    return ", ".join(parts) or "none was called"


def _lines(model: nn.Module, passes: list[Pass]) -> list[Line]:
    """Lines of the table: one per list of layers and outcome."""
    paths = {id(module): path for path, module in model.named_modules()}
    lines: dict[Any, Line] = {}
    for each in passes:
        path = paths.get(id(each.module), type(each.module).__name__)
        layers = layers_of(each.module)
        path = path.rpartition(".")[0] if layers[0] is each.module else path
        key = path, each.positions, each.tokens, each.reason
        lines.setdefault(key, Line(*key)).layers += len(layers)
    return list(lines.values())


def _summary(lines: list[Line]) -> str:
    positions = sum(line.positions * line.layers for line in lines)
    computed = sum(line.computed * line.layers for line in lines)
    left = 1 - computed / positions
    return f"these layers skip {left:.0%} of their positions, which are padding"
