"""Classes for modules that skip padding, derived from the module's own class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Packed:
    """First base of such a class; the second base is the module's former class."""

    made_by: tuple[str, type[nn.Module]]
    """Name of the module's part, and its former class."""

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made at run time, so a pickle stores how to make the class again.
        make, args, *rest = super().__reduce_ex__(protocol)
        part, base = type(self).made_by
        args = (base, *args[1:]) if args and args[0] is type(self) else args
        return _rebuild, (part, make, args), *rest


_FORWARDS: dict[str, Callable[[type[nn.Module]], Forward]] = {}


def part(name: str) -> Callable[[Callable[[type[nn.Module]], Forward]], Callable[[type[nn.Module]], Forward]]:
    """Register a function that makes the ``forward`` of a part from the module's former class."""

    def register(make: Callable[[type[nn.Module]], Forward]) -> Callable[[type[nn.Module]], Forward]:
        _FORWARDS[name] = make
        return make

    return register


@functools.cache
def packed_class(name: str, base: type[nn.Module]) -> type[nn.Module]:
    """Return the class for a module with the part of this name."""
    forward = functools.wraps(base.forward)(_FORWARDS[name](base))  # Trainer and torch.export read the signature
    return type(base.__name__, (Packed, base), {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": forward,
        "made_by": (name, base),
    })  # fmt: skip


def _rebuild(name: str, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    module.__class__ = packed_class(name, type(module))
    return module


class Arguments:
    """Arguments of a call, by name.

    Attributes:
        given: values by name, in the order of the call.
    """

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positional = names[: len(args)]
        self.given = dict(zip(names, args)) | kwargs
        self.fits = len(args) <= len(names)

    def replaced(self, changes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call, with some values changed or added."""
        values = self.given | changes
        args = tuple(values.pop(name) for name in self._positional)
        return args, values


@functools.cache
def positional_names(forward: Forward) -> tuple[str, ...]:
    """Names of a method's positional arguments, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


@functools.cache
def argument_names(forward: Forward) -> frozenset[str]:
    """Names of all arguments of a method."""
    return frozenset(inspect.signature(forward).parameters) - {"self"}
