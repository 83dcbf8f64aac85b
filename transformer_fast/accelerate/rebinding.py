"""Copies of functions in which calls of some functions are redirected.

``scaled_dot_product_attention`` and ``dropout`` are called by modules of any structure, so no pattern can cover these
modules. The code of a method contains the names by which it reaches such a function: ``F.dropout``, an imported name,
or a function of the same program that calls it. The copy of the method has the same byte code, globals and cells; only
its table of names differs. A global name that leads to a replaced function is exchanged for a new name. The new name is
added to the same globals. The value of the name is our function, a copy of the caller, or a :class:`StandIn` of the
module. Other modules keep their code, and no mode is active while a model runs. So a copy calls the same functions
under ``torch.compile``, ``torch.export`` and activation checkpointing, and in every thread.

A copy with a separate globals dictionary would not compile: torch.compile looks a global up in the module that the
dictionary names.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

from torch import nn

from ..integrations.byte_code import content, instructions, names_in_code

PREFIX = "_transformer_fast_"
_DEEPEST = 20  # maximum depth of calls from a method to the function; models stay below it
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (_LIBRARY + "site-packages", _LIBRARY + "dist-packages")
_GLOBAL, _ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")


class Obstacle(Exception):
    """Error: the calls of a class cannot be redirected; the text is the reason."""


class StandIn(types.ModuleType):
    """Module that forwards attributes of another module, except those in its own dictionary."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        own = {name: vars(module).get(name) for name in ("__package__", "__loader__", "__spec__")}
        vars(self).update(own, _original=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_original"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_original"], name)


class Rebinding:
    """Maker of copies of functions, in which each call of an old function is a call of the new function.

    Args:
        replaced: pairs of functions, (old, new).
        prefix: prefix of the names added to globals; unique per rebinding.
    """

    def __init__(self, replaced: Iterable[tuple[Callable[..., Any], Callable[..., Any]]], prefix: str = PREFIX) -> None:
        self._new = {id(old): (old, new) for old, new in replaced}
        self._prefix = prefix
        self._copies: dict[types.FunctionType, types.FunctionType | None] = {}
        self._stand_ins: dict[types.ModuleType, StandIn] = {}
        self._depth = 0

    def methods(self, cls: type[nn.Module]) -> dict[str, Any]:
        """Copies of the attributes of a class whose own code reaches a replaced function, by name.

        Raises:
            Obstacle: if such a function is reached only through ``super()`` or by a name that cannot be redirected.
        """
        found: dict[str, Any] = {}
        first: dict[str, type] = {}
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] == "torch":
                continue
            for name, value in vars(base).items():
                copy = None if name in ("__init__", "__new__") else self._attribute(value)
                if first.setdefault(name, base) is base:
                    if copy is not None:
                        found[name] = copy
                elif copy is not None and _calls_super(vars(first[name])[name]):
                    raise Obstacle(f"{first[name].__name__}.{name} calls it through super(), in {base.__name__}.{name}")
        return found

    def function(self, function: types.FunctionType) -> types.FunctionType | None:
        """Copy of a function that calls the new functions; None if it reaches no replaced function."""
        if function not in self._copies and self._depth < _DEEPEST:
            self._copies[function] = None  # result for a function that calls itself
            self._depth += 1
            try:
                self._copies[function] = self._copied(function)
            except Obstacle:
                del self._copies[function]
                raise
            finally:
                self._depth -= 1
        return self._copies.get(function)

    def value(self, value: Any) -> Any:
        """Replacement of a function or of a partial; None if it stays."""
        if id(value) in self._new:
            return self._new[id(value)][1]
        if isinstance(value, functools.partial):
            copy = self.value(value.func)
            return None if copy is None else functools.partial(copy, *value.args, **value.keywords)
        return self.function(value) if isinstance(value, types.FunctionType) else None

    def _copied(self, f: types.FunctionType) -> types.FunctionType | None:
        package, file = (f.__module__ or "").partition(".")[0], f.__code__.co_filename
        if package == "transformer_fast" or (file.startswith(_LIBRARY) and not file.startswith(_INSTALLED)):
            return None
        code = f.__code__
        if package != "torch" or f.__module__ == "torch.nn.functional":  # else a decorator: read its cells only
            code = self._code(code, f.__globals__)
        free = {name: content(cell) for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ())}
        cells = {name: self.value(value) for name, value in free.items()}
        cells.update(self._read(f.__code__, free, ("LOAD_DEREF",), inside=True) if free else {})
        defaults = [self.value(value) for value in f.__defaults__ or ()]
        keywords = {name: self.value(value) for name, value in (f.__kwdefaults__ or {}).items()}
        if code is f.__code__ and all(new is None for new in (*cells.values(), *defaults, *keywords.values())):
            return None
        closure = [old if new is None else types.CellType(new) for old, new in zip(f.__closure__ or (), cells.values())]
        given = [old if new is None else new for old, new in zip(f.__defaults__ or (), defaults)]
        copy = types.FunctionType(code, f.__globals__, f.__name__, tuple(given), tuple(closure))
        copy.__kwdefaults__ = {**(f.__kwdefaults__ or {}), **{k: v for k, v in keywords.items() if v is not None}}
        copy.__qualname__, copy.__module__, copy.__doc__ = f.__qualname__, f.__module__, f.__doc__
        copy.__annotations__ = f.__annotations__
        vars(copy).update(vars(f))
        return copy

    def _attribute(self, value: Any) -> Any:
        """Copy of a class attribute; None if it stays."""
        if isinstance(value, staticmethod | classmethod):
            copy = self.value(value.__func__)
            return None if copy is None else type(value)(copy)
        if isinstance(value, property) and isinstance(value.fget, types.FunctionType):
            copy = self.function(value.fget)
            return None if copy is None else value.getter(copy)
        return self.function(value) if isinstance(value, types.FunctionType) else None

    def _code(self, code: types.CodeType, namespace: dict[str, Any]) -> types.CodeType:
        """Code object with new names for globals that lead to replaced functions; the same object if none does.

        Raises:
            Obstacle: if the code imports such a function, or uses its name for another value too.
        """
        for name, value in _imports(code, namespace):
            if self._reachable_replacement(value, [], names_in_code(code)) is not None:
                raise Obstacle(f"{code.co_qualname} imports {name} inside itself")
        renamed = self._read(code, namespace, _GLOBAL)
        for step in instructions(code) if renamed else ():
            if step.opcode in dis.hasname and step.argval in renamed and step.opname not in _GLOBAL:
                raise Obstacle(f"{code.co_qualname} uses the name {step.argval} for another value too")
        namespace.update({self._prefix + name: new for name, new in renamed.items()})
        constants = [self._code(old, namespace) if isinstance(old, types.CodeType) else old for old in code.co_consts]
        if not renamed and all(new is old for new, old in zip(constants, code.co_consts)):
            return code
        names = tuple(self._prefix + name if name in renamed else name for name in code.co_names)
        return code.replace(co_names=names, co_consts=tuple(constants))

    def _read(
        self, code: types.CodeType, values: dict[str, Any], kinds: tuple[str, ...], inside: bool = False
    ) -> dict[str, Any]:
        """Replacements of values that the given kinds of instructions read by name; ``inside``: also in inner
        functions."""
        found: dict[str, Any] = {}
        mentioned, steps = names_in_code(code), instructions(code)
        for place, step in enumerate(steps):
            if step.opname in kinds and step.argval in values:
                attributes = [after.argval for after in takewhile(lambda s: s.opname in _ATTRIBUTE, steps[place + 1 :])]
                if (new := self._reachable_replacement(values[step.argval], attributes, mentioned)) is not None:
                    found[step.argval] = new
        for inner in code.co_consts if inside else ():
            found.update(self._read(inner, values, kinds, inside) if isinstance(inner, types.CodeType) else {})
        return found

    def _reachable_replacement(
        self, value: Any, attributes: list[str], mentioned: frozenset[str], seen: tuple[types.ModuleType, ...] = ()
    ) -> Any:
        """Replacement of the value of a name; None if no replaced function is reached through the value.

        Args:
            value: a function, a module, or anything else.
            attributes: names read in a chain from the value; if empty, any of ``mentioned`` may be read.
            mentioned: all names in the code.
            seen: modules on the way to the value.
        """
        if not isinstance(value, types.ModuleType):
            return self.value(value)
        if value in seen:
            return None
        members = {name: vars(value).get(name) for name in attributes[:1] or mentioned}
        new = {
            name: self._reachable_replacement(old, attributes[1:], mentioned, (*seen, value))
            for name, old in members.items()
        }
        if found := {name: copy for name, copy in new.items() if copy is not None}:
            vars(self._stand_ins.setdefault(value, StandIn(value))).update(found)
        return self._stand_ins[value] if found else None


def _imports(code: types.CodeType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names that import statements in a code object take from loaded modules, with their values."""
    steps = instructions(code) if dis.opmap["IMPORT_NAME"] in code.co_code[::2] else []
    for place, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level, names = (before.argval for before in steps[place - 2 : place])
        try:
            path = importlib.util.resolve_name("." * level + step.argval, namespace.get("__package__"))
        except (ImportError, TypeError):
            continue
        module = sys.modules.get(path)
        if not names:
            yield path, module
        for name in names or ():
            yield f"{path}.{name}", getattr(module, "__dict__", {}).get(name, sys.modules.get(f"{path}.{name}"))


def _calls_super(method: Any) -> bool:
    """Return True for a method that may call the overridden method; this includes everything but plain functions."""
    return not isinstance(method, types.FunctionType) or "__class__" in method.__code__.co_freevars
