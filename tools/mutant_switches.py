"""C++ faults behind switches: one build contains all, and the environment variable ``PLANTED`` turns one on."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from mutant_rows.fault import Fault

HEADER = """\
#pragma once
#include <cstdlib>
inline const long planted_fault = std::getenv("PLANTED") ? std::atol(std::getenv("PLANTED")) : 0;
"""
OPEN, CLOSED = "([{", ")]}"

Piece = tuple[int, int, str]  # where the text begins and ends, and what takes its place


def number_of(fault: Fault) -> int:
    """Value of ``PLANTED`` for a fault; it depends on the fault's text only, so that other tests compile nothing."""
    return zlib.crc32(repr((fault.path, fault.old, fault.new)).encode())


def switched(text: str, faults: Iterable[Fault]) -> tuple[str, list[Fault]]:
    """Return the text of a file with those of its faults that a switch can turn on, and these faults."""
    pieces: list[Piece] = []
    chosen = []
    for fault in faults:
        piece = switch(text, fault)
        if piece and all(piece[1] <= start or end <= piece[0] for start, end, _ in pieces):
            pieces.append(piece)
            chosen.append(fault)
    for start, end, new in sorted(pieces, reverse=True):
        text = text[:start] + new + text[end:]
    return text, chosen


def switch(text: str, fault: Fault) -> Piece | None:
    """Return the expression or statement that a fault changes, and both forms of it with the switch between them.

    None where it is neither: a constant, several elements of a list, an if without its else.
    """
    if text.count(fault.old) != 1:
        return None
    first = text.index(fault.old)
    last, new = first + len(fault.old), fault.new
    while text[first : first + 1] == new[:1] and first < last and new:
        first, new = first + 1, new[1:]
    while text[last - 1 : last] == new[-1:] and first < last and new:
        last, new = last - 1, new[:-1]
    start, end = _start(text, first, last), _end(text, first, last)
    old, new = text[start:end], text[start:first] + new + text[last:end]
    ahead, behind = text[:start].rstrip(), text[end:].lstrip(";\n ")
    own = text[max(ahead.rfind(c) for c in ";}") + 1 : end]
    if any(_depth(code) for code in (old, new)) or "constexpr" in own or "else" in (*old.split()[:1], behind[:4]):
        return None
    sign = f"planted_fault == {number_of(fault)}"
    if old.rstrip().endswith(";"):
        return start, end, f"if ({sign}) {{ {new} }} else {{ {old} }}"
    if text[end] == ";" and ahead[-1] in ";{}" and _opening(text, start) == "{":
        return start, end + 1, f"if ({sign}) {{ {new}; }} else {{ {old}; }}"
    if ";" in old or any("," in _outside(code) or code.strip()[:1] in "{" for code in (old, new)):
        return None
    if new.strip() in ("false", "true"):
        old = f"!!({old})"  # of a pointer, say
    return start, end, f"({sign} ? ({new}) : ({old}))"


def _start(text: str, first: int, last: int) -> int:
    """Start of the expression or the statement that holds the text from `first` to `last`."""
    depth = 0
    for place in range(last - 1, -1, -1):
        c = text[place]
        if depth == 0 and place < first:
            assigns = c == "=" and text[place - 1] not in "=!<>" and text[place + 1] != "="
            block = c == "}" and text[place + 1] == "\n"
            if c in ";," or assigns or block or text[: place + 1].endswith("return "):
                return place + 1
        depth += (c in CLOSED) - (c in OPEN)
        if depth < 0 and place < first:
            return place + 1
        depth = max(depth, 0)  # a bracket that is closed behind `last`
    return 0


def _end(text: str, first: int, last: int) -> int:
    """Return the end of an expression or statement."""
    if text[first:last].rstrip().endswith(";"):
        return last
    depth = 0
    for place in range(first, len(text)):
        c = text[place]
        if depth == 0 and place >= last and c in ";," + CLOSED:
            return place
        depth = max(depth + (c in OPEN) - (c in CLOSED), 0)  # below 0: one that was opened before `first`
    return last


def _opening(text: str, place: int) -> str:
    """Return the open bracket at a position."""
    depth = 0
    for c in reversed(text[:place]):
        depth += (c in CLOSED) - (c in OPEN)
        if depth < 0:
            return c
    return ""


def _depth(code: str) -> int:
    """Brackets that are opened and not closed; 1 for some that are closed and not opened."""
    depth = 0
    for c in code:
        depth += (c in OPEN) - (c in CLOSED)
        if depth < 0:
            return 1
    return depth


def _outside(code: str) -> str:
    """Parts of a text that are in no bracket."""
    depth, found = 0, ""
    for c in code:
        depth += (c in OPEN) - (c in CLOSED)
        found += c if depth == 0 else ""
    return found
