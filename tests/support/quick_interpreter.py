"""Triton's interpreter with a shorter way to replace the functions of ``triton.language``, and rounding of one kind.

It replaces them at each call of a device function, and looks through all members of the language each time: a quarter
of what interpreted kernels take. Which members are its builtins does not change, so here they are looked for once.

Its ``tl.dot`` is NumPy's product, whose order of summation depends on the shape and the processor: the scores of one
query differ between two tiles, and with them a weight from the sum of the weights, which no GPU does.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
from packaging.version import Version
from triton.language.core import is_builtin
from triton.runtime import interpreter

__all__ = ["install", "obstacle"]


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


def dot(builder: Any, a: Any, b: Any, added: Any, *options: object) -> Any:
    """What ``create_dot`` of the interpreter's builder does, each sum rounded once: in any order it is the same."""
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(added.data.dtype)
    return interpreter.TensorHandle(product + added.data, added.dtype.scalar)


def obstacle(triton: str, numpy: str) -> str:
    """The reason why the interpreter of this version of Triton fails with this version of NumPy; empty where it runs.

    It converts arrays of one element to numbers, which NumPy refuses from 2.4 on; Triton 3.7 does so no more.
    """
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of Triton {triton} does not run with NumPy {numpy}: install Triton>=3.7 or numpy<2.4"
    return ""


def install() -> None:
    """Let the interpreter of this process go the shorter way, from now on, and round products alike."""
    interpreter._patch_builtin = replace_builtins
    interpreter.InterpreterBuilder.create_dot = dot
