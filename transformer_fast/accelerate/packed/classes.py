"""Classes for modules that skip padding, derived from the module's own class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ...layers.quantised_as import NAME as QUANTISED_AS
from ...layers.scripted_as import scripted_as
from ..made import Made, cached_by_class, make_class

Forward = Callable[..., Any]

JUDGED = "_packed_judged"
"""Attribute of a layer that was tried without padding."""


class Packed(Made):
    """First base of such a class; the last base is the module's former class."""

    packed_part: str
    """Name of the module's part."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (judged := self.__dict__.get(JUDGED)) is not None:
            judged.adopt(self)


_FORWARDS: dict[str, Callable[[type[nn.Module]], Forward]] = {}


def part(name: str) -> Callable[[Callable[[type[nn.Module]], Forward]], Callable[[type[nn.Module]], Forward]]:
    """Register a function that makes the ``forward`` of a part from the module's former class."""

    def register(make: Callable[[type[nn.Module]], Forward]) -> Callable[[type[nn.Module]], Forward]:
        _FORWARDS[name] = make
        return make

    return register


@cached_by_class
def packed_class(base: type[nn.Module], name: str) -> type[nn.Module]:
    """Return the class for a module with the part of this name."""
    # Trainer and torch.export read the signature.
    forward = scripted_as(base.forward, same_signature=True)(_FORWARDS[name](base))
    quantised_as = {QUANTISED_AS: vars(base)[QUANTISED_AS]} if QUANTISED_AS in vars(base) else {}
    return make_class((Packed,), base, (packed_class, name), forward=forward, packed_part=name, **quantised_as)


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
