"""Redirect calls of torch functions in objects that modules hold, and that are no modules themselves.

Some libraries keep the attention of a module in an exchangeable object: ``attn.processor(attn, hidden)``. A module
gets a copy of the object, of a class whose methods call this package's functions. The object itself is left, because
other models may hold it too.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..integrations.layer_code import names_of
from .calls import REPLACEMENTS, Calls, rebinding_of
from .rebinding import Obstacle
from .report import Attribute


class RedirectedObject:
    """First base of a class whose methods call this package's functions; the last base is the object's former class."""

    made_from: tuple[type, tuple[str, ...]]
    """Former class, and names of the replacements."""

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made at run time, so a pickle stores how to make the class again.
        make, args, *rest = super().__reduce_ex__(protocol)
        former, names = type(self).made_from
        return _rebuild, (names, make, tuple(former if arg is type(self) else arg for arg in args)), *rest


def redirected_objects(module: nn.Module) -> Iterator[Any]:
    """Objects of a module that are redirected already."""
    return (value for value in module.__dict__.values() if issubclass(type(value), RedirectedObject))


class HeldObjects:
    """Redirection of the objects in a model. An object in several modules gets one copy."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}

    def calls_of(self, module: nn.Module) -> Calls:
        """Find the replaceable functions that the objects of a module call, and the places: ``processor.__call__``."""
        calls = Calls({}, {})
        for name in REPLACEMENTS:
            for attribute, value in _objects(module):
                try:
                    methods = _methods(type(value), (name,))
                    if not methods:
                        continue
                    if why := _obstacle(value):
                        raise Obstacle(why)
                    calls.found.setdefault(name, []).extend(f"{attribute}.{method}" for method in sorted(methods))
                except Obstacle as obstacle:
                    calls.obstacles[name] = f"it is called by {attribute}, a {type(value).__name__}: {obstacle}"
        return calls

    def changes(self, module: nn.Module, names: tuple[str, ...]) -> list[Attribute]:
        """Changes that redirect the objects of a module to the replacements of these names."""
        return [
            Attribute(module, attribute, self._copy(value, names))
            for attribute, value in _objects(module)
            if _reaches(type(value), names) and not _obstacle(value)
        ]

    def _copy(self, value: Any, names: tuple[str, ...]) -> Any:
        key = id(value), names
        if key not in self._copies:
            made = _class(type(value), names)
            copy = object.__new__(made)
            vars(copy).update(vars(value))
            self._copies[key] = value, copy  # the value too, so that its id is not given away
        return self._copies[key][1]


def _objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that hold an object of an author's class, no module and no tensor. The module's code calls the object,
    or names one of its methods."""
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind.__flags__ & _HEAP_TYPE and not issubclass(kind, nn.Module | Tensor | type | RedirectedObject):
            named = names_of(type(module))
            if name in named and (callable(value) or not named.isdisjoint(_own_names(kind))):
                yield name, value


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it


def _obstacle(value: Any) -> str:
    """Reason why an object cannot get a copy of another class, or ""."""
    kind = type(value)
    own = [base for base in kind.__mro__ if base is not object and base.__module__ != "typing"]
    if type(kind) not in (type, abc.ABCMeta) or kind.__new__ is not object.__new__ or not hasattr(value, "__dict__"):
        return "its class cannot have a subclass with other methods"
    if any(vars(base).get("__slots__") for base in own):
        return "it has __slots__"
    return "its class registers subclasses" if any("__init_subclass__" in vars(base) for base in own) else ""


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    bases = (base for base in kind.__mro__ if base is not object)
    return frozenset(name for base in bases for name in vars(base) if not name.startswith("__"))


def _reaches(kind: type, names: tuple[str, ...]) -> bool:
    try:
        return bool(_methods(kind, names))
    except Obstacle:
        return False


@functools.cache
def _methods(kind: type, names: tuple[str, ...]) -> dict[str, Any]:
    return rebinding_of(names).methods(kind)


@functools.cache
def _class(kind: type, names: tuple[str, ...]) -> type:
    return type(kind)(kind.__name__, (RedirectedObject, kind), {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "made_from": (kind, names),
        "__class__": property(_former_class),  # some libraries look an object's class up in a table
        **_methods(kind, names),
    })  # fmt: skip


def _former_class(value: RedirectedObject) -> type:
    former, _ = type(value).made_from
    return former


def _rebuild(names: tuple[str, ...], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    value = make(*args)
    object.__setattr__(value, "__class__", _class(type(value), names))
    return value
