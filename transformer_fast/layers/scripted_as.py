"""``scripted_as``: a method of a swapped class that torch.jit.script compiles as the method before."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Method = Callable[..., Any]


def scripted_as(former: Method, *, same_signature: bool = False) -> Callable[[Method], Method]:
    """Make torch.jit.script compile another method in place of the decorated one.

    ``script`` finds the source through ``__wrapped__``, and the names of the source in the globals of the function that
    it was given. So the function has the globals of ``former``, if it lacks a name.

    Args:
        former: method to compile; anything but a Python function leaves the source of the decorated method.
        same_signature: the signature is that of ``former`` too, else that of the decorated method.
    """
    source = inspect.unwrap(former)

    def give(method: Method) -> Method:
        made, signature = method, inspect.signature(method)
        if isinstance(source, types.FunctionType):
            named = {name: source.__globals__[name] for name in source.__code__.co_names if name in source.__globals__}
            if any(method.__globals__.get(name) is not value for name, value in named.items()):
                cells = (types.CellType(method),)
                made = types.FunctionType(_caller(method).__code__, source.__globals__, closure=cells)
                functools.update_wrapper(made, method)
        if same_signature:
            functools.update_wrapper(made, former)
        else:
            made.__wrapped__, made.__signature__ = former, signature  # type: ignore[attr-defined]
        return made

    return give


def annotations_of(kind: type) -> dict[str, Any]:
    """Annotations of the attributes of a class, which torch.jit.script reads: those of the first class with any."""
    return next((vars(base)["__annotations__"] for base in kind.__mro__ if "__annotations__" in vars(base)), {})


def _caller(run: Method) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    return forward
