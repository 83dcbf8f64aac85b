"""Triton's interpreter with a shorter way to replace the functions of ``triton.language``.

It replaces them at each call of a device function, and looks through all members of the language each time: a quarter
of what interpreted kernels take. Which members are its builtins does not change, so here they are looked for once.
"""

from __future__ import annotations

import functools
import inspect

from triton.language.core import is_builtin
from triton.runtime import interpreter

__all__ = ["install"]


@functools.cache
def builtin_names(package: object) -> tuple[str, ...]:
    """Names of the members of a module or class of the language that the interpreter replaces.

    Replaced members are no longer builtins, so the first question has to come before the first replacement: that of
    the interpreter's own first call.
    """
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def replace_builtins(package: object, *rest: object) -> None:
    """What ``interpreter._patch_builtin`` does; the rest is the interpreter's builder, and where it notes changes."""
    for name in builtin_names(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, *rest)


def install() -> None:
    """Let the interpreter of this process go the shorter way, from now on."""
    interpreter._patch_builtin = replace_builtins
