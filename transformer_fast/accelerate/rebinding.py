"""Methods that call other functions than they were written to call: copies whose code has other names in their place.

``scaled_dot_product_attention`` and ``dropout`` are called by modules of any structure, so no pattern can know them.
What is known is the function. The code of a method says by which names it reaches it: ``F.dropout``, a name that was
imported, a function of the same program that calls it. The copy of the method has the same code, globals and cells but
for these names: in their place stand ours, which are put beside the originals. So nothing is switched on while a model
runs. What its code calls is decided when the copy is made, for ``torch.compile``, ``torch.export``, other threads, and
activation checkpointing, where backward calls functions of the module again, from outside of it. Other modules keep
their code.

A name may also stand for something else in the same code, as in ``F.dropout(x, self.dropout)``. Then only those
instructions get the new name that stand for the function.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

PREFIX = "_transformer_fast_"
_UNKNOWN = object()
_DEEPEST = 20  # calls from a method to the function; a model is not written in more
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (_LIBRARY + "site-packages", _LIBRARY + "dist-packages")
_TRANSPARENT = frozenset(
    {"CACHE", "COPY", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "SWAP"}
)

_FLAGS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": int(sys.version_info >= (3, 12)), "LOAD_SUPER_ATTR": 2}
"""How many bits of its own an instruction has below the number of its name."""


class Obstacle(Exception):
    """Why the calls of a class cannot be replaced."""


class Rebinding:
    """Copies of functions in which every call of one of ``replaced`` is one of the function that stands beside it.

    Args:
        replaced: pairs of functions, (old, new).
        prefix: of the names that are put beside the originals; each rebinding needs one of its own.
    """

    def __init__(self, replaced: Iterable[tuple[Callable[..., Any], Callable[..., Any]]], prefix: str = PREFIX) -> None:
        self._new = {id(old): (old, new) for old, new in replaced}
        self._prefix = prefix
        self._copies: dict[types.FunctionType, types.FunctionType | None] = {}
        self._depth = 0

    def methods(self, cls: type[nn.Module]) -> dict[str, Any]:
        """Copies of those attributes of a class whose own code reaches a function that is replaced, by name.

        Raises:
            Obstacle: where one of them is only reached through ``super()``, or its code cannot be changed by names.
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
                    raise Obstacle(
                        f"{first[name].__name__}.{name} calls super(), whose {base.__name__}.{name} calls it"
                    )
        return found

    def function(self, function: types.FunctionType) -> types.FunctionType | None:
        """A copy of a function that calls the new functions; None where it reaches none that is replaced."""
        if function not in self._copies and self._depth < _DEEPEST:
            self._copies[function] = None  # what a function that calls itself finds
            self._depth += 1
            try:
                self._copies[function] = self._copied(function)
            except Obstacle:
                del self._copies[function]
                raise
            finally:
                self._depth -= 1
        return self._copies.get(function)

    def _copied(self, f: types.FunctionType) -> types.FunctionType | None:
        package, file = (f.__module__ or "").partition(".")[0], f.__code__.co_filename
        if package == "transformer_fast" or (file.startswith(_LIBRARY) and not file.startswith(_INSTALLED)):
            return None
        cells = {name: _content(cell) for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ())}
        code = f.__code__
        if package != "torch" or f.__module__ == "torch.nn.functional":  # of torch's decorators only what they hold
            code = self._code(code, f.__globals__, cells)
        closure = tuple(self._cell(cell) for cell in f.__closure__ or ()) or None
        defaults = None if f.__defaults__ is None else tuple(self._or_same(value) for value in f.__defaults__)
        keywords = {name: self._or_same(value) for name, value in (f.__kwdefaults__ or {}).items()}
        if (code, closure, defaults, keywords) == (f.__code__, f.__closure__, f.__defaults__, f.__kwdefaults__ or {}):
            return None
        copy = types.FunctionType(code, f.__globals__, f.__name__, defaults, closure)
        copy.__kwdefaults__ = keywords or None
        copy.__qualname__, copy.__module__, copy.__doc__ = f.__qualname__, f.__module__, f.__doc__
        copy.__annotations__ = f.__annotations__
        vars(copy).update(vars(f))
        return copy

    def _attribute(self, value: Any) -> Any:
        """The copy of what a class holds under one name; None where it stays."""
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, staticmethod | classmethod):
            copy = self.value(value.__func__)
            return None if copy is None else type(value)(copy)
        if isinstance(value, property) and isinstance(value.fget, types.FunctionType):
            copy = self.function(value.fget)
            return None if copy is None else value.getter(copy)
        return None

    def value(self, value: Any) -> Any:
        """What stands in the place of a function, or of a part of its arguments; None where it stays."""
        if id(value) in self._new:
            return self._new[id(value)][1]
        if isinstance(value, functools.partial):
            copy = self.value(value.func)
            return None if copy is None else functools.partial(copy, *value.args, **value.keywords)
        return self.function(value) if isinstance(value, types.FunctionType) else None

    def _or_same(self, value: Any) -> Any:
        copy = self.value(value)
        return value if copy is None else copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        copy = self.value(_content(cell))
        return cell if copy is None else types.CellType(copy)

    def _code(self, code: types.CodeType, namespace: dict[str, Any], outer: dict[str, Any]) -> types.CodeType:
        """The code with other names where its own stand for what is replaced; the same object where none does."""
        known = dict.fromkeys(_arguments(code), _UNKNOWN)
        list(_uses(code, namespace, outer, known))  # a variable may be given another value below, and in a loop
        renamed: dict[str, set[int]] = {}
        kept: set[str] = set()
        for step, where, value in _uses(code, namespace, outer, known):
            copy = None if value is _UNKNOWN else self.value(value)
            if copy is None:
                kept.add(step.argval)
            else:
                renamed.setdefault(step.argval, set()).add(step.offset)
                where[self._prefix + step.argval] = copy
        inner = {**outer, **known}
        constants = tuple(
            self._code(constant, namespace, inner) if isinstance(constant, types.CodeType) else constant
            for constant in code.co_consts
        )
        if not renamed and all(a is b for a, b in zip(constants, code.co_consts)):
            return code
        names = {name: self._prefix + name for name in renamed}
        everywhere = tuple(name if name in kept else names.get(name, name) for name in code.co_names)
        code = code.replace(co_names=everywhere, co_consts=constants)
        for name in renamed.keys() & kept:
            code = _with_name(code, name, names[name], renamed[name])
        return code


def _uses(
    code: types.CodeType, namespace: dict[str, Any], outer: dict[str, Any], known: dict[str, Any]
) -> Iterator[tuple[dis.Instruction, dict[str, Any], Any]]:
    """Each use of a name of ``co_names``: its instruction, the namespace it is looked up in, its value or _UNKNOWN.

    ``known`` has the values of variables, and gets those that the code imports or takes from a module; one that may
    have two is _UNKNOWN.
    """
    value: Any = _UNKNOWN  # what the last instruction left on top of the stack
    module: Any = _UNKNOWN  # what the last import statement imports from
    constant: Any = None
    for step in dis.get_instructions(code):
        name, kind = step.argval, step.opname
        where: dict[str, Any] = {}
        if step.is_jump_target:  # it may come from elsewhere
            value = _UNKNOWN
        if kind in _TRANSPARENT:
            continue
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            where = namespace
            value = namespace.get(name, getattr(builtins, name, _UNKNOWN))
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            where, value = _member(value, name)
        elif kind == "IMPORT_NAME":
            module = value = sys.modules.get(name if constant else name.partition(".")[0], _UNKNOWN)
        elif kind == "IMPORT_FROM":
            where, value = _member(module, name)
            module = value if isinstance(value, types.ModuleType) and not constant else module
        elif kind.startswith("LOAD_FAST") and isinstance(name, str):
            value = known.get(name, _UNKNOWN)
        elif kind in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            value = known.get(name, outer.get(name, _UNKNOWN))
        elif kind in ("STORE_FAST", "STORE_DEREF"):
            known[name] = value if known.get(name, value) is value else _UNKNOWN
        else:
            value = _UNKNOWN
            if kind == "LOAD_CONST":
                constant = name
            elif kind.startswith("STORE_FAST"):  # one instruction with two variables
                known.update(dict.fromkeys(name, _UNKNOWN))
        if step.opcode in dis.hasname:
            yield step, where, _UNKNOWN if kind == "IMPORT_NAME" else value


def _with_name(code: types.CodeType, old: str, new: str, offsets: set[int]) -> types.CodeType:
    """The code with ``new`` for ``old`` in the instructions at some offsets. No instruction changes its place.

    Raises:
        Obstacle: where the code has so many names that the number of a new one does not fit.
    """
    before, index = list(dis.get_instructions(code)), len(code.co_names)
    changed = bytearray(code.co_code)
    for place, step in enumerate(before):
        if step.offset not in offsets or step.arg is None:
            continue
        flags = _FLAGS.get(step.opname, 0)
        argument = index << flags | step.arg & ((1 << flags) - 1)
        changed[step.offset + 1] = argument & 0xFF
        while place > 0 and before[place - 1].opname == "EXTENDED_ARG":
            place, argument = place - 1, argument >> 8
            changed[before[place].offset + 1] = argument & 0xFF
        if argument > 0xFF:
            raise Obstacle(f"{old} stands for two things in {code.co_qualname}, which has too many names")
    code = code.replace(co_code=bytes(changed), co_names=(*code.co_names, new))
    for step, other in zip(before, dis.get_instructions(code), strict=True):
        expected = new if step.offset in offsets else step.argval
        if step.opname != "EXTENDED_ARG" and (step.opcode, expected) != (other.opcode, other.argval):
            raise Obstacle(f"{old} stands for two things in {code.co_qualname}")
    return code


def _arguments(code: types.CodeType) -> tuple[str, ...]:
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


def _member(module: Any, name: str) -> tuple[dict[str, Any], Any]:
    """The namespace of a module and a value in it."""
    if not isinstance(module, types.ModuleType):
        return {}, _UNKNOWN
    return vars(module), vars(module).get(name, _UNKNOWN)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _UNKNOWN


def _calls_super(method: Any) -> bool:
    """Whether a method may call the one that it replaces; what is no plain function may."""
    return not isinstance(method, types.FunctionType) or "__class__" in method.__code__.co_freevars
