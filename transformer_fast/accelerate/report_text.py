"""Text of a report: attention first, then one line per kind of module, at most ``WIDTH`` columns wide."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from .row import ALREADY, Row

WIDTH = 120
_CLASSES, _NEW, _PLACES = 36, 44, 30
"""Columns for the classes, for the new class, and at least for places; a longer text is shortened, or takes a line."""

_NUMBER = "0123456789 "
"""Characters of the number of layers before their class."""


def attention_text(rows: list[Row]) -> list[str]:
    """Lines that say in which attention modules the kernels run, and why not in the others."""
    fused, left = ([row for row in rows if (row.now is not None) == now] for now in (True, False))
    lines = []
    if not rows:
        lines.append("attention: not fused: no attention was found in this model")
    if fused:
        ways = [", ".join(filter(None, (_classes(group), way))) for way, group in _groups(fused, lambda row: row.now)]
        lines.append(f"attention: fused in {len(fused)} of {len(rows)} modules ({'; '.join(ways)})")
    for reason, group in _groups(left, lambda row: row.why):
        start = "  not fused in" if lines else "attention: not fused in"
        lines.append(f"{start} {len(group)} {_classes(group)}: {reason} ({places(group)})")
    return [part for line in lines for part in wrapped(line, "    ")]


def summary(rows: list[Row], plain: collections.Counter[str], *, changed: bool) -> list[str]:
    """Lines with the numbers of modules that were swapped and left.

    Args:
        rows: rows of the table.
        plain: number of modules with nothing to gain, by class name.
        changed: True if anything in the model was changed.
    """
    rows = [row for row in rows if not _is_stack(row)]
    left = [row for row in rows if row.now is None]
    already = sum(row.why == ALREADY for row in left)
    swapped = len({row.path for row in rows if row.now is not None})
    others = f"{len(left) - already} left"
    if changed:
        before = f"{already} on the fused ops already, " if already else ""
        done = f"{swapped} modules swapped, {before}{others}"
    elif already:
        done = f"nothing was changed: {already} modules of this model run on the fused ops already, {others}"
    else:
        done = f"nothing was changed: no module of this model runs faster on the fused ops, {others}"
    if plain:
        done += "; nothing to gain in " + ", ".join(f"{n} {name}" for name, n in sorted(plain.items()))
    return wrapped(done)


def table(rows: list[Row]) -> list[str]:
    """Lines of the modules: number, former class, and new class or reason, with the places in the model.

    Modules with one outcome share a line; layers of a stack do so with those of their class.
    """
    groups = [group for _, group in _groups(rows, _outcome_of)]
    groups.sort(key=lambda group: group[0].now is None)
    counts = [str(sum(map(_count, group))) for group in groups]
    names = [_classes(group) for group in groups]
    new = max((len(group[0].now) for group in groups if group[0].now and len(group[0].now) <= _NEW), default=0)
    lines = []
    for count, name, group in zip(counts, names, groups):
        start = f"{count:>{max(map(len, counts))}} {name:<{max(map(len, names))}} "
        lines += wrapped(start + _outcome(group, WIDTH - len(start), new), " " * len(start))
    return lines


def places(rows: list[Row], room: int = 60) -> str:
    """Paths of modules; paths that differ by numbers are one pattern, ``layers.*.norm``.

    The first is always in the text, and others as far as there is room; then comes the number of further modules.
    """
    room -= len(f" and {len(rows)} more")
    shown: list[str] = []
    rest = len(rows)
    for _, group in _groups(rows, lambda row: re.sub(r"\d+", "*", row.path)):
        path = _pattern(group) if shown else _shortened_path(_pattern(group), room)
        if len(", ".join((*shown, path))) > room:
            break
        shown.append(path)
        rest -= len(group)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _outcome_of(row: Row) -> tuple[str | None, str, str]:
    kind = row.was.lstrip(_NUMBER) if _is_stack(row) else ""
    return row.now, row.why if row.now else row.reason, kind


def _outcome(group: list[Row], room: int, new: int) -> str:
    """New class and places, or the reason to leave the modules and places."""
    row = group[0]
    if row.now is None:
        why = row.why if len({row.why for row in group}) == 1 else row.reason
        text = f"{'' if why == ALREADY else 'left: '}{why} ("
        return f"{text}{places(group, _rest(room, len(text) + 1))})"
    text = f"-> {row.now:<{new}}  "
    return f"{text}{places(group, _rest(room, len(text)))}{'; ' if row.why else ''}{row.why}"


def _rest(room: int, used: int) -> int:
    """Columns for places: those after a text in its last line, or a line of their own."""
    rest = room - used % room
    return rest if rest >= _PLACES else room


def _groups(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def _is_stack(row: Row) -> bool:
    """Return True for a row about the layers of a stack: the class begins with their number."""
    return row.was[:1].isdigit()


def _count(row: Row) -> int:
    return int(row.was.partition(" ")[0]) if _is_stack(row) else 1


def _classes(group: list[Row]) -> str:
    """Names of the classes, or the number of them."""
    names = list(dict.fromkeys(row.was.lstrip(_NUMBER) for row in group))
    text = ", ".join(names)
    return _shortened(text, _CLASSES) if len(names) == 1 or len(text) <= _CLASSES else f"of {len(names)} classes"


def _pattern(group: list[Row]) -> str:
    """One path for all: numbers that differ become a star."""
    parts = zip(*(re.split(r"(\d+)", row.path) for row in group), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts) or "the model"


def _shortened_path(path: str, room: int) -> str:
    """The first and the last names of a path."""
    names = path.split(".")
    while len(path) > room and len(names) > 2:
        del names[len(names) // 2]
        middle = (len(names) + 1) // 2
        path = ".".join([*names[:middle], "..", *names[middle:]])
    return _shortened(path, room)


def _shortened(text: str, room: int) -> str:
    """The beginning and the end of a text."""
    half = (room - 3) // 2
    return text if len(text) <= room else f"{text[:half]}...{text[-half:]}"


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Lines of a text."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
