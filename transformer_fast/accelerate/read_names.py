"""Names that the code of a module's ``forward`` may read, by its byte code.

An attribute that no such name reaches cannot change what a call computes: a flag of a trainer, a name for a log.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from itertools import dropwhile
from typing import Any

from torch import nn

from ..integrations.byte_code import codes, content, instructions

_ANY = {"__dict__", "vars", "__getattribute__", "attrgetter", "methodcaller", "__getattr__", "dir", "locals"}
"""Names of ways to read attributes whose names the code does not contain."""
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")


@functools.cache
def names_read(kind: type[nn.Module]) -> frozenset[str] | None:
    """Names in the code of ``forward`` and of the functions that it reaches; None if it may read any attribute.

    A name is that of a variable or an attribute, or a string. The walk follows methods of the class, and functions of
    the globals that are not torch's or the standard library's.
    """
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    if any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in bases):
        return None
    methods = {
        name: [vars(base)[name] for base in bases if name in vars(base)] for base in bases for name in vars(base)
    }
    if any(map(_is_opaque, methods.get("forward", ()))):
        return None
    names: set[str] = set()
    seen: set[types.FunctionType] = set()
    todo = list(_functions(methods.get("forward", ())))
    while todo:
        function = todo.pop()
        if function in seen or is_applied_to_subclasses(function):
            continue
        seen.add(function)
        found = _names_of(function.__code__)
        if found is None:
            return None
        names |= found
        called = [method for name in found for method in methods.get(name, ())]
        if any(map(_is_opaque, called)):
            return None
        todo.extend(_functions(called))
        todo.extend(
            filter(_is_followed, _functions((*_globals(function, found), *map(content, function.__closure__ or ()))))
        )
    return frozenset(names)


def is_applied_to_subclasses(function: Any) -> bool:
    """Return True for a decorator by ``__init_subclass__``, such as transformers' gradient checkpointing: a made class
    gets it too."""
    code = getattr(function, "__code__", None)
    return hasattr(function, "__wrapped__") and code is not None and ".__init_subclass__." in code.co_qualname


def _is_opaque(method: Any) -> bool:
    """Return True for a class attribute that may get the module and whose code cannot be read."""
    known = isinstance(method, type | types.BuiltinFunctionType) or any(True for _ in _functions((method,)))
    return not known and (callable(method) or hasattr(type(method), "__get__"))


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Python functions among values: functions, methods, properties, partials, and what decorators wrap."""
    for value in values:
        if isinstance(value, property):
            yield from _functions((value.fget,))
        elif isinstance(value, functools.partial):
            yield from _functions((value.func,))
        elif isinstance(value, staticmethod | classmethod | types.MethodType | functools.partialmethod):
            yield from _functions((getattr(value, "__func__", getattr(value, "func", None)),))
        else:
            if isinstance(value, types.FunctionType):
                yield value
            if callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):
                yield from _functions((value.__wrapped__,))


def _is_followed(function: types.FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names


def _globals(function: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """Values of a function's globals, and of the modules among them, that have one of the names."""
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from values
    for module in values:
        if isinstance(module, types.ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


@functools.cache
def _names_of(code: types.CodeType) -> frozenset[str] | None:
    """Names and strings of a code object and the code inside it; None if it may read an attribute of another name."""
    names: set[str] = set()
    for one in codes(code):
        if not _ANY.isdisjoint(one.co_names) or not _reads_constants(one):
            return None
        names.update(one.co_names, (value for value in one.co_consts if isinstance(value, str)))
    return frozenset(names)


def _reads_constants(code: types.CodeType) -> bool:
    """Return True if each ``getattr`` and ``hasattr`` is a call with a constant name: ``getattr(a.b, "name", c)``."""
    for place, step in enumerate(instructions(code)):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in ("getattr", "hasattr"):
            first, *rest = instructions(code)[place + 1 :]
            name, *after = dropwhile(lambda other: other.opname in ("LOAD_ATTR", "LOAD_METHOD"), rest)
            if first.opname not in _LOADS or name.opname != "LOAD_CONST" or not isinstance(name.argval, str):
                return False
            default = after[0].opname.startswith("LOAD_")
            if not after[default].opname.endswith("CALL"):
                return False
    return True
