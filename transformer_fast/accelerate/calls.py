"""Modules of any structure that call functions of torch: the same functions of ours stand in their place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..layers import dropout
from . import sdpa
from .rebinding import PREFIX, Obstacle, Rebinding


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of ours and what it stands for.

    Attributes:
        theirs: the name of torch's function in reports.
        ours: the name of ours.
        op: the op whose kernels compute it.
        pairs: (torch's function, ours).
    """

    theirs: str
    ours: str
    op: str
    pairs: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...]


REPLACEMENTS = {
    "dropout": Replacement(
        "F.dropout",
        "tfast.dropout",
        "dropout",
        ((dropout.TORCH, dropout.dropout), (dropout.TORCH_BUILTIN, dropout.builtin_dropout)),
    ),
    "attention": Replacement(
        "F.scaled_dot_product_attention",
        sdpa.NAME,
        "attention",
        ((sdpa.TORCH, sdpa.scaled_dot_product_attention),),
    ),
}
"""By the names that pickles have of them."""

Held = tuple[tuple[str, Any], ...]
"""The attributes of a module that hold a function, or one that calls it, with their values."""


class CallsOurs:
    """The first base of a class whose methods call our functions; the last is the class that the module had."""

    made_from: tuple[type[nn.Module], Held, tuple[str, ...]]
    """The class, the attributes that hold functions, and the replacements."""

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made when the program runs, so a pickle says how to make it again.
        _, _, *rest = super().__reduce_ex__(protocol)
        return _rebuild, type(self).made_from, *rest


@dataclasses.dataclass
class Calls:
    """Functions that the code of a module calls.

    Attributes:
        found: by the name of a replacement, the methods and attributes of the module that reach its function.
        obstacles: by the name of a replacement, why its calls stay torch's.
    """

    found: dict[str, list[str]]
    obstacles: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.found or self.obstacles)

    def keep(self, obstacle: Callable[[str], str]) -> None:
        """Leave the functions for which ``obstacle`` (of an op) is not empty."""
        for name in list(self.found):
            if reason := obstacle(REPLACEMENTS[name].op):
                self.obstacles[name] = reason
                del self.found[name]

    def ours(self) -> str:
        """Text: our functions, and where they are called."""
        return "; ".join(f"{REPLACEMENTS[name].ours} in {', '.join(where)}" for name, where in self.found.items())

    def stays(self) -> str:
        """Text: the functions that stay torch's, and why."""
        return "; ".join(f"its {REPLACEMENTS[name].theirs} stays: {why}" for name, why in self.obstacles.items())


def calls_of(module: nn.Module) -> Calls:
    """Find the functions with a replacement that a module calls, and the places."""
    calls = Calls({}, {})
    for name in REPLACEMENTS:
        try:
            held = dict(_held(module, (name,)))
            if found := sorted({*held, *_methods(type(module), (name,))}):
                calls.found[name] = found
        except Obstacle as obstacle:
            calls.obstacles[name] = str(obstacle)
    return calls


def calling_ours(module: nn.Module, names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a module on the replacements of these names.

    Raises:
        Obstacle: where they cannot be replaced together.
    """
    held = _held(module, names)
    for name, _ in held:
        module.__dict__.pop(PREFIX + name, None)  # left by an earlier class of this package
    return _class(type(module), held, names)


def _held(module: nn.Module, names: tuple[str, ...]) -> Held:
    rebinding = _rebinding(names)
    return tuple(
        (name, value)
        for name, value in module.__dict__.items()
        if not name.startswith(PREFIX) and rebinding.value(value) is not None
    )


@functools.cache
def _rebinding(names: tuple[str, ...]) -> Rebinding:
    pairs = [pair for name in names for pair in REPLACEMENTS[name].pairs]
    return Rebinding(pairs, f"{PREFIX}{'_'.join(names)}_")


@functools.cache
def _methods(original: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    return _rebinding(names).methods(original)


@functools.cache
def _class(original: type[nn.Module], held: Held, names: tuple[str, ...]) -> type[nn.Module]:
    return type(original.__name__, (CallsOurs, original), {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "made_from": (original, held, names),
        **_methods(original, names),
        **{PREFIX + name: staticmethod(value) for name, value in held},
        **{name: _attribute(name, value, names) for name, value in held},
    })  # fmt: skip


def _attribute(name: str, held: Any, names: tuple[str, ...]) -> property:
    """An attribute that holds a function which calls torch's, or is it; who reads it gets one that calls ours.

    Its value is read under a second name, whose default is in the class: torch.compile of torch 2.11 takes a look-up
    of the attribute's own name in ``__dict__`` for a call of the property.
    """
    copy, second = _rebinding(names).value(held), PREFIX + name

    def get(self: nn.Module) -> Any:
        if name in self._modules:
            return self._modules[name]
        value = getattr(self, second)
        return copy if value is held else value

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = self.__dict__[second] = value

    return property(get, put)


def _rebuild(original: type[nn.Module], held: Held, names: tuple[str, ...]) -> nn.Module:
    made = _class(original, held, names)
    return made.__new__(made)
