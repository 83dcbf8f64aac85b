"""Redirect calls of torch functions in arbitrary modules to the fused functions of this package."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..layers import dropout
from ..layers.hooks import is_as_made
from ..layers.scripted_as import scripted_as
from . import sdpa
from .made import Made, cached_by_class, change_of, forget, make_class, say
from .rebinding import PREFIX, Obstacle, Rebinding


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A function of this package, and the torch functions that it replaces.

    Attributes:
        theirs: name of torch's function in reports.
        ours: name of this package's function.
        op: op whose kernels compute the function.
        pairs: (torch's function, this package's function).
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
"""Replacements by name; pickles store these names."""

Held = tuple[tuple[str, Any], ...]
"""Attributes of a module that hold a replaced function, or a function that calls one, with their values."""


class Redirected(Made):
    """First base of a class whose methods call this package's functions."""

    proves = False


@dataclasses.dataclass
class Calls:
    """Replaceable functions that the code of a module calls.

    Attributes:
        found: methods and attributes of the module that reach a function, by name of the replacement.
        obstacles: reason why calls are not replaced, by name of the replacement.
    """

    found: dict[str, list[str]]
    obstacles: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.found or self.obstacles)

    def __or__(self, other: Calls) -> Calls:
        """Calls of both."""
        names = [name for name in REPLACEMENTS if name in self.found or name in other.found]
        return Calls(
            {name: [*self.found.get(name, ()), *other.found.get(name, ())] for name in names},
            self.obstacles | other.obstacles,
        )

    def keep(self, obstacle: Callable[[str], str]) -> None:
        """Keep torch's function wherever ``obstacle(op)`` is not empty."""
        for name in list(self.found):
            if reason := obstacle(REPLACEMENTS[name].op):
                self.obstacles[name] = reason
                del self.found[name]

    def ours(self) -> str:
        """Text: functions of this package and the places that call them."""
        return "; ".join(f"{REPLACEMENTS[name].ours} in {', '.join(where)}" for name, where in self.found.items())

    def stays(self) -> str:
        """Text: functions that stay torch's, and the reasons."""
        return "; ".join(f"its {REPLACEMENTS[name].theirs} stays: {why}" for name, why in self.obstacles.items())


def calls_of(module: nn.Module) -> Calls:
    """Find the replaceable functions that a module calls, and the places of the calls."""
    calls = Calls({}, {})
    for name in REPLACEMENTS:
        try:
            held = dict(_attributes_to_redirect(module, (name,)))
            if found := sorted({*held, *_methods(type(module), (name,))}):
                calls.found[name] = found
        except Obstacle as obstacle:
            calls.obstacles[name] = str(obstacle)
    return calls


def redirected_class(module: nn.Module, names: tuple[str, ...]) -> type[nn.Module]:
    """Class for a module whose calls are redirected to the replacements of these names.

    Raises:
        Obstacle: if the functions cannot be replaced together.
    """
    held = _attributes_to_redirect(module, names)
    for name, _ in held:
        module.__dict__.pop(PREFIX + name, None)  # left over from an earlier class of this package
    return _class(type(module), held, names)


def _attributes_to_redirect(module: nn.Module, names: tuple[str, ...]) -> Held:
    rebinding = rebinding_of(names)
    return tuple(
        (name, value)
        for name, value in module.__dict__.items()
        if not name.startswith(PREFIX) and rebinding.value(value) is not None
    )


@functools.cache
def rebinding_of(names: tuple[str, ...]) -> Rebinding:
    """Maker of copies of functions that call the replacements of these names."""
    pairs = [pair for name in names for pair in REPLACEMENTS[name].pairs]
    return Rebinding(pairs, f"{PREFIX}{'_'.join(names)}_")


@cached_by_class
def _methods(original: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    return rebinding_of(names).methods(original)


@cached_by_class
def _class(original: type[nn.Module], held: Held, names: tuple[str, ...]) -> type[nn.Module]:
    methods = _methods(original, names)
    redirected = methods.get("forward", original.forward)

    @scripted_as(redirected, same_signature=True)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_as_made(type(self)):
            return redirected(self, *args, **kwargs)
        if type(self) is not made or torch.compiler.is_compiling():
            return original.forward(self, *args, **kwargs)
        say(f"accelerate: a {original.__name__} runs its own code: {change_of(self)}")
        self.__class__ = original  # since the made class holds copies of all methods
        forget(self)
        return self.forward(*args, **kwargs)

    made = make_class(
        (Redirected,),
        original,
        (_class, held, names),
        **{**methods, "forward": forward},
        __jit_unused_properties__=[*getattr(original, "__jit_unused_properties__", ()), *(name for name, _ in held)],
        **{PREFIX + name: staticmethod(value) for name, value in held},
        **{name: _attribute(name, value, names) for name, value in held},
    )
    return made


def _attribute(name: str, held: Any, names: tuple[str, ...]) -> property:
    """Property for an attribute that holds torch's function or a caller of it; reading gives the redirected function.

    The value is read under a second name with a default in the class. torch.compile of torch 2.11 mistakes a look-up of
    the attribute's own name in ``__dict__`` for a call of the property.
    """
    copy, second = rebinding_of(names).value(held), PREFIX + name

    def get(self: nn.Module) -> Any:
        if name in self._modules:
            return self._modules[name]
        value = getattr(self, second)
        return copy if value is held else value

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = self.__dict__[second] = value

    return property(get, put)
