"""Classes that are made at run time from a module's class, and classes that a user has registered with a fast class.

A made class is found again by its recipe: a pickle stores the author's class and the recipe, so the other process need
not register anything.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..dialects.common import LAST_WEIGHTS
from ..function_mode import FunctionalMode, is_in_block
from ..huggingface import attention as integration
from ..layers.hooks import bases_for
from ..layers.padded_calls import StaysPaddedError
from ..ops.token_mask import call_on_tokens
from ..tensors import takes_fused_ops

FAST: dict[type[nn.Module], Any] = {}
"""Registered classes: the registration, whose ``now`` is the class that computes the same."""


class Registered:
    """First base of a made class.

    Attributes:
        former: class of the module before.
        recipe: function and its arguments; with the former class as the first argument it returns the made class.
    """

    former: type[nn.Module]
    recipe: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        kind: Any = type(self)
        recipes = []
        while "recipe" in vars(kind):
            recipes.append(kind.recipe)
            kind = kind.former
        make, args, *rest = (kind if value is type(self) else value for value in reduced)
        args = tuple(kind if value is type(self) else value for value in args)
        if rest and isinstance(rest[0], dict):  # weights of the last call are computed by a function, and not copied
            rest[0] = {key: None if key == LAST_WEIGHTS else value for key, value in rest[0].items()}
        return _remake, (tuple(recipes), make, args), *rest


def _remake(recipes: tuple[Any, ...], make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    if "transformers.modeling_utils" in sys.modules:  # a new process: the model's configs may name our attention
        integration.register()
    module = make(*args)
    for function, *others in reversed(recipes):
        module.__class__ = function(type(module), *others)
    return module


def registered_class(
    kind: type[nn.Module],
    bases: tuple[type, ...],
    recipe: tuple[Any, ...],
    forward: Callable[..., Any],
    **attributes: Any,
) -> type[nn.Module]:
    """Make a class with another ``forward`` from a module's class and further bases."""
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {"former": kind, "recipe": recipe, "forward": forward}
    first = () if any(issubclass(base, Registered) for base in bases) else (Registered,)
    others = tuple(base for base in bases if base is not kind)
    return type(kind.__name__, bases_for(kind, *first, *others), own | attributes)


def author_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Class from which a class was made, or the class itself."""
    while "recipe" in vars(kind):
        kind = kind.former  # type: ignore[attr-defined]
    return kind


@functools.cache
def fast_class(kind: type[nn.Module], fast: type[nn.Module]) -> type[nn.Module]:
    """Class for modules of a registered class: ``forward`` of the fast class, all else of both.

    The author's ``forward`` runs for keyword arguments that the fast one lacks, and for tensors that the fused ops do
    not take.

    Raises:
        TypeError: if Python cannot derive a class from both.
    """
    names = keywords_of(fast)

    @functools.wraps(kind.forward)  # the signature names the mask of a layer
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = names is None or names.issuperset(kwargs)
        if known and takes_fused_ops(*args, *kwargs.values(), *self._parameters.values()) and isinstance(self, fast):
            return fast.forward(self, *args, **kwargs)
        if call_on_tokens() is not None:
            raise StaysPaddedError(f"a {kind.__name__} runs its own forward")
        return kind.forward(self, *args, **kwargs)

    return registered_class(kind, (fast, kind), (fast_class, fast), forward)


def is_swapped(module: nn.Module) -> bool:
    """Return True for a module of a class that :func:`fast_class` has made."""
    return vars(type(module)).get("recipe", (None,))[0] is fast_class


def keywords_of(fast: type[nn.Module]) -> frozenset[str] | None:
    """Names of the arguments of a class's ``forward``; None if it takes any."""
    parameters = inspect.signature(fast.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


IN_BLOCK = "its code in tfast.functional()"
WAY = "where its code calls F.scaled_dot_product_attention"


class FunctionalCalls(Registered):
    """First base of a class whose ``forward`` runs in a block of ``functional()``."""

    computes_as_former = True


def functional_obstacle(module: nn.Module) -> str:
    """Reason against a class whose ``forward`` runs in a block, or ""."""
    kind = type(module)
    if "forward" in module.__dict__:
        return "its forward was replaced"
    packages = {base: base.__module__.partition(".")[0] for base in kind.__mro__}
    if kind.forward is nn.Module.forward or packages[kind] == "torch":
        return "it has no forward of an author"
    known = ("builtins", "torch", "transformers", "typing")  # their classes do not register subclasses
    registers = any("__init_subclass__" in vars(base) and name not in known for base, name in packages.items())
    return "its class registers subclasses" if registers else ""


@functools.cache
def functional_class(former: type[nn.Module]) -> type[nn.Module]:
    """Class for a module whose ``forward`` runs in a block."""

    @functools.wraps(former.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_in_block() or not isinstance(self, FunctionalCalls):  # after undo, a caller may hold this method
            return former.forward(self, *args, **kwargs)
        with FunctionalMode():
            return former.forward(self, *args, **kwargs)

    return registered_class(former, (FunctionalCalls, former), (functional_class,), forward)
