"""Names that the code of a module's ``forward`` may read, by its byte code.

An attribute that no such name reaches cannot change what a call computes: a flag of a trainer, a name for a log.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..integrations.byte_code import codes, content, instructions

_ANY = {
    *("__dict__", "vars", "dir", "locals", "__getattribute__", "__getattr__", "getattr_static"),
    *("attrgetter", "methodcaller"),
}
"""Names of ways to read attributes whose names the code does not contain."""
_GETTERS = (getattr, hasattr, vars, dir, object.__getattribute__)
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")


@functools.cache
def names_read(
    kind: type[nn.Module], held: tuple[type, ...] = (), functions: tuple[types.FunctionType, ...] = ()
) -> frozenset[str] | None:
    """Names in the code of ``forward`` and of the functions that it reaches; None if it may read any attribute.

    A name is that of a variable or an attribute, or a string. The walk follows methods of the class, and functions of
    the globals that are not torch's or the standard library's.

    Args:
        kind: class of a module.
        held, functions: classes of objects, and functions, that the attributes of the module hold (:func:`code_held`).
    """
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    if any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in bases):
        return None
    names: set[str] = set()
    seen: set[types.FunctionType] = set()
    holders = [*bases, *held]
    if any(_is_opaque(vars(base).get("forward")) for base in bases):
        return None
    todo = [*functions, *_functions(vars(base).get("forward") for base in bases)]
    todo += _functions(vars(base).get("__call__") for base in held)
    while todo:
        function = todo.pop()
        if function in seen or is_applied_to_subclasses(function):
            continue
        seen.add(function)
        found = _names_of(function.__code__)
        if found is None:
            return None
        names |= found
        values = [vars(base)[name] for base in holders for name in found if name in vars(base)]
        outside = [*_globals(function, found), *map(content, function.__closure__ or ())]
        if any(map(_is_opaque, (*values, *outside))):
            return None
        todo.extend(_functions(values))
        todo.extend(filter(_is_followed, _functions(outside)))
    return frozenset(names)


def _is_opaque(value: Any) -> bool:
    """Return True for a value whose code is not followed, and that may read any attribute: a descriptor or a decorator
    that is a class, ``getattr`` by another name, an object that is called."""
    if isinstance(value, operator.attrgetter | operator.methodcaller):
        return True
    kind = type(value)
    if isinstance(value, type | nn.Module | Tensor) or not is_authors(kind):
        return isinstance(value, types.BuiltinFunctionType | types.WrapperDescriptorType) and value in _GETTERS
    return callable(value) or hasattr(kind, "__get__")


def is_authors(value: Any) -> bool:
    """Return True for a class or a function that is not torch's, Python's or this package's."""
    package = (value.__module__ or "").partition(".")[0]
    return package not in ("torch", "numpy", "transformer_fast") and package not in sys.stdlib_module_names


def code_held(values: Iterable[Any], depth: int = 3) -> Iterator[type | types.FunctionType]:
    """Code in the attributes of a module: functions, also of methods and partials, and classes of the author's objects
    with their base classes."""
    for value in values if depth else ():
        if isinstance(value, types.FunctionType | types.MethodType):
            yield from filter(_is_followed, _functions((value,)))
            yield from code_held([getattr(value, "__self__", None)], depth - 1)
        elif isinstance(value, functools.partial):
            yield from code_held((value.func, *value.args, *value.keywords.values()), depth - 1)
        elif isinstance(value, dict):
            yield from code_held(value.values(), depth - 1)
        elif isinstance(value, list | tuple | set):
            yield from code_held(value, depth - 1)
        elif not isinstance(value, type | nn.Module | Tensor) and is_authors(type(value)):
            yield from (base for base in type(value).__mro__ if is_authors(base))


def is_applied_to_subclasses(function: Any) -> bool:
    """Return True for a decorator by ``__init_subclass__``, such as transformers' gradient checkpointing: a made class
    gets it too."""
    code = getattr(function, "__code__", None)
    return hasattr(function, "__wrapped__") and code is not None and ".__init_subclass__." in code.co_qualname


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Python functions among values: functions, methods, properties, partials, and what decorators wrap."""
    for value in values:
        if isinstance(value, property):
            yield from _functions((value.fget,))
        elif isinstance(value, functools.partial | functools.cached_property):
            yield from _functions((value.func,))
        elif isinstance(value, staticmethod | classmethod | types.MethodType | functools.partialmethod):
            yield from _functions((getattr(value, "__func__", getattr(value, "func", None)),))
        else:
            if isinstance(value, types.FunctionType):
                yield value
            if callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):  # also of functools.cache
                yield from _functions((value.__wrapped__,))


def _is_followed(function: types.FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names


def _globals(function: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """Values of a function's globals, and of the modules and the author's classes among them, that have one of the
    names."""
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from values
    for value in values:
        if isinstance(value, types.ModuleType):
            yield from (vars(value)[name] for name in names if name in vars(value))
        elif isinstance(value, type) and not issubclass(value, nn.Module) and is_authors(value):
            yield from (vars(value)[name] for name in (*names, "__init__", "__call__") if name in vars(value))


@functools.cache
def _names_of(code: types.CodeType) -> frozenset[str] | None:
    """Names and strings of a code object and the code inside it; None if it may read an attribute of another name."""
    names: set[str] = set()
    for one in codes(code):
        if not _ANY.isdisjoint(one.co_names) or not _reads_constants(one):
            return None
        names.update(one.co_names, _strings(one.co_consts))
    return frozenset(names)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    """Strings among constants, and in tuples among them, such as the attributes of a class pattern."""
    for value in constants:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple | frozenset):
            yield from _strings(value)


def _reads_constants(code: types.CodeType) -> bool:
    """Return True if each ``getattr`` and ``hasattr`` has a constant name: ``getattr(a.b, "name")``."""
    for place, step in enumerate(instructions(code)):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in ("getattr", "hasattr"):
            after = instructions(code)[place + 1 :]
            if not after or after[0].opname not in _LOADS:
                return False
            rest = [other for other in after[1:] if other.opname not in ("LOAD_ATTR", "LOAD_METHOD")]
            if not rest or rest[0].opname != "LOAD_CONST" or not isinstance(rest[0].argval, str):
                return False
            defaults = list(itertools.takewhile(lambda other: other.opname.startswith("LOAD_"), rest[1:]))
            used = rest[1 + len(defaults)]  # another step if the constant is a part of the name
            if used.opname not in ("PRECALL", "CALL") or used.argval != 2 + len(defaults):
                return False
    return True
