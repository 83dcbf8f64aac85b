"""Triton's interpreter, made faster, with products that are rounded in one way.

Two thirds of the time that interpreted kernels take have no part in what they compute. Here that is done once:

- The functions of ``triton.language`` are replaced at each call of a device function, by those of the interpreter, and
  all members of the language looked through each time.
- Sums and products of integers are computed again in 64 bits. Whether one overflows is then not looked at, unless the
  interpreter's builder is asked to debug.
- A tensor unwraps, checks and prints its shape when it is made, and a table of all types is made to look up one.

The interpreter's ``tl.dot`` is NumPy's product, whose order of summation depends on the shape and the processor: the
scores of one query differ between two tiles, and with them a weight from the sum of the weights, which no GPU does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from packaging.version import Version
from triton.language.core import is_builtin
from triton.runtime import interpreter

__all__ = ["install", "obstacle"]

PATCH_LANG, GET_NP_DTYPE = interpreter._patch_lang, interpreter._get_np_dtype
NEW_BLOCK_TYPE, NEW_TENSOR = tl.block_type.__init__, tl.tensor.__init__
EVERYTHING = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""Kernel that sees the language by both of its modules, as some device function does."""
NUMPY_DTYPES: dict[str, np.dtype] = {}
BLOCK_TYPES: dict[tuple[object, ...], dict[str, Any]] = {}
SIZES: dict[str, dict[str, Any]] = {}
REPLACED: list[tuple[object, str, Any]] = []
"""Replaced functions, with the owner and the name of each."""


@functools.cache
def builtin_names(package: object) -> tuple[str, ...]:
    """Names of the members of a module or class of the language that the interpreter replaces.

    Replaced members are no longer builtins, so the first question has to come before the first replacement: that of
    the interpreter's own first call.
    """
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def replace_builtins(package: object, *rest: object) -> None:
    """Replacement of ``interpreter._patch_builtin``; the remaining arguments are the interpreter's builder and the
    record of changes."""
    for name in builtin_names(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, *rest)


def patch_lang(function: Any) -> Any:
    """Replacement of ``interpreter._patch_lang`` for a kernel and all functions that it calls, which then need no
    patch."""
    return PATCH_LANG(EVERYTHING) if is_builtin(tl.load) else interpreter._LangPatchScope()


def numpy_dtype(kind: Any) -> np.dtype:
    """Replacement of ``interpreter._get_np_dtype``."""
    if kind.name not in NUMPY_DTYPES:
        NUMPY_DTYPES[kind.name] = GET_NP_DTYPE(kind)
    return NUMPY_DTYPES[kind.name]


def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Replacement of ``block_type.__init__``, with the attributes of an equal type."""
    key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if key not in BLOCK_TYPES:
        NEW_BLOCK_TYPE(self, element_ty, shape)
        BLOCK_TYPES[key] = dict(vars(self))
    vars(self).update(BLOCK_TYPES[key])


def new_tensor(self: Any, handle: Any, kind: Any) -> None:
    """Replacement of ``tensor.__init__``, with the sizes of another tensor of its type."""
    if kind.name not in SIZES:
        NEW_TENSOR(self, handle, kind)
        SIZES[kind.name] = {"numel": self.numel, "shape": self.shape}
    vars(self).update(SIZES[kind.name], handle=handle, type=kind, dtype=kind.scalar)


def dot(builder: Any, a: Any, b: Any, added: Any, *options: object) -> Any:
    """Replacement of ``create_dot`` of the interpreter's builder: each sum is rounded once, so its order does not
    matter."""
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(added.data.dtype)
    return interpreter.TensorHandle(product + added.data, added.dtype.scalar)


def obstacle(triton: str, numpy: str) -> str:
    """The reason why the interpreter of this version of Triton fails with this version of NumPy; empty where it runs.

    Triton converts arrays of one element to numbers before 3.7, which NumPy refuses from 2.4 on.
    """
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of Triton {triton} does not run with NumPy {numpy}: install Triton>=3.7 or numpy<2.4"
    return ""


def install() -> None:
    """Install the fast interpreter in this process, with equally rounded products."""
    builder = interpreter.interpreter_builder
    for owner, name, ours in (
        (interpreter, "_patch_builtin", replace_builtins),
        (interpreter, "_patch_lang", patch_lang),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (tl.block_type, "__init__", new_block_type),
        (tl.tensor, "__init__", new_tensor),
        (builder, "options", dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)),
    ):
        REPLACED.append((owner, name, getattr(owner, name)))
        setattr(owner, name, ours)
    interpreter.InterpreterBuilder.create_dot = dot
