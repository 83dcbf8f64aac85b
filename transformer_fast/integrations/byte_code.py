"""Reader of the byte code of Python functions: code objects, instructions, closures."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

_SKIPPED = ("EXTENDED_ARG", "CACHE", "PUSH_NULL")


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.cache
def instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Instructions of a code object, without those that only prepare others."""
    return [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]


def content(cell: types.CellType) -> Any:
    """Content of a closure's cell; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
