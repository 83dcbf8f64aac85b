"""Rows and text of a report: at most ``LINES`` lines of ``WIDTH`` columns. Attention and padding come first."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

ALREADY = "it runs on the fused ops already"
"""Reason for a module that was swapped earlier or that belongs to this package."""
OWN_FORWARD = "it keeps its own forward"
"""Reason of a module that no table has."""
NO_ATTENTION = "attention: none was found by its class or name; code that writes it out can call tfast.attention"


@dataclasses.dataclass(frozen=True)
class Row:
    """One module: path in the model, former class, new class (None: unchanged), and the reason to leave it.

    Attributes:
        is_stack: True for a row about layers that skip padding, or keep it for the reason.
    """

    path: str
    was: str
    now: str | None
    why: str = ""
    is_stack: bool = False

    @property
    def reason(self) -> str:
        """Reason to leave the module, without details of this single module."""
        return self.why.partition(";")[0]


LINES = 10
WIDTH = 120
_CLASSES = 36
"""Columns for the names of classes."""


def text_of(rows: list[Row], attention: list[Row], notes: list[str], *, packed: bool) -> str:
    """Text of a report. Notes about padding begin with "packed: ". The last line says where the modules and reasons are
    that have no line."""
    padding = [note.removeprefix("packed: ") for note in notes if note.startswith("packed: ")]
    stacks = [row for row in rows if row.is_stack]
    skipped = [row for row in stacks if row.now is not None or row.why == ALREADY]
    first = _attention(attention, padding, skipped if packed else None)
    # Without what is said of attention.
    described = {row.why for row in attention if row.now is None}
    names = "attn_implementation="
    rows = [row for row in rows if not (row.is_stack or row.why in described or (row.now or "").startswith(names))]
    swapped, already = len({row.path for row in rows if row.now is not None}), sum(row.why == ALREADY for row in rows)
    left = sum(row.now is None for row in rows) - already
    numbers = f"{swapped} modules swapped, {f'{already} on the fused ops already, ' if already else ''}{left} left"
    parts = [*first, *(note for note in notes if not note.startswith("packed: ")), numbers]
    lines = [line for part in parts for line in wrapped(part)]
    groups = _groups(rows, lambda row: (row.now, row.why if row.now else row.reason))
    # First what has a reason of its own to be left, then what is swapped.
    groups.sort(key=lambda group: 1 if group[0].now is not None else 2 * (group[0].reason in (ALREADY, OWN_FORWARD)))
    classes = [f"{len(group):>3} {_classes(group)}" for group in groups]
    width = max(map(len, classes), default=0)
    table = [_shortened(f"{name:<{width}} {_outcome(group)}", WIDTH) for name, group in zip(classes, groups)]
    if len(lines) + len(table) <= LINES:
        return "\n".join([*lines, *table])
    room = max(LINES - 1 - len(lines), 0)
    more = sum(map(len, groups[room:]))
    last = f"{more} more modules: report.rows"
    last += "; more reasons: report.attention, report.notes" if len(lines) >= LINES else ""
    return "\n".join([*lines[: LINES - 1], *table[:room], last])


def wrapped(text: str) -> list[str]:
    """Lines of a text."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _attention(rows: list[Row], padding: list[str], skipped: list[Row] | None) -> list[str]:
    """Texts about the attention that is fused, about padding, and about the attention that is not fused.

    Args:
        rows: rows of attention modules.
        padding: texts about layers that keep their padding.
        skipped: rows of stacks that skip padding; None if that was not requested.
    """
    texts = [] if rows else [NO_ATTENTION]
    if fused := [row for row in rows if row.now is not None]:
        ways = [
            f"{_classes(group)}, {group[0].now}" if (group[0].now or "").startswith("where ") else _classes(group)
            for group in _groups(fused, lambda row: row.now)
        ]
        if skipped is None:
            padding = ["padding is computed: packed=True was not given"]
        elif skipped:
            padding = [f"padding is skipped in {_places(skipped, 2)}", *padding]
        said = f"attention: fused in {len(fused)} of {len(rows)} modules ({'; '.join(ways)})"
        texts, padding = ["; ".join([said, *padding[:1]])], padding[1:]
    for group in _groups((row for row in rows if row.now is None), lambda row: row.why):
        texts.append(f"attention: not fused in {len(group)} {_classes(group)}: {group[0].why} ({_places(group)})")
    return texts + padding


def _outcome(group: list[Row]) -> str:
    """New class, or the reason to leave the modules, and the first place."""
    row = group[0]
    if row.now is None:
        why = row.why if len({row.why for row in group}) == 1 else row.reason
        return f"{'' if row.why == ALREADY else 'left: '}{why} ({_places(group)})"
    return f"-> {row.now} ({_places(group)}){'; ' if row.why else ''}{row.why}"


def _places(rows: list[Row], most: int = 1) -> str:
    """The paths of the rows, or the first one and the number of the others."""
    paths = [row.path or "the model" for row in rows]
    return " and ".join(paths) if len(paths) <= most else f"{paths[0]} and {len(paths) - 1} more"


def _groups(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _classes(group: list[Row]) -> str:
    """Names of the classes, or the number of them."""
    names = list(dict.fromkeys(row.was for row in group))
    text = ", ".join(names)
    if len(names) > 1 and len(text) > _CLASSES:
        return f"modules of {len(names)} classes"
    return _shortened(text, _CLASSES)


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 3]}..."
