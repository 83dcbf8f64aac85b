"""Base of patterns: the structure of a hand-written module, and the fused ops that compute the module.

A pattern recognises a module by names and shapes (``matches``), computes the module on the fused ops
(``fused_forward``), and gives calls to test it with (``calls``). Names do not prove a formula, so ``accelerate`` first
compares both forwards on random input. Then the module gets a subclass of its class. The subclass adds no state and
keeps every method except forward.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...dialects.common import LastWeights
from ...layers import dropout
from ...layers.embedding import is_lookup
from ...layers.hooks import CHANGED, in_role, is_plain
from ...layers.padded_calls import StaysPaddedError, padded_calls
from ...layers.scripted_as import scripted_as
from ...layers.torch_modules import Embedding
from ...ops.token_mask import call_on_tokens
from ...tensors import takes_fused_ops
from ..made import (
    Made,
    author_class,
    cached_by_class,
    change_of,
    is_as_proven,
    make_class,
    say,
    watch_itself,
)

Kind = Callable[[nn.Module], bool]
"""Test for a child module."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Requirement on a child of a module.

    Attributes:
        is_one: test that the child must pass.
        fused: ``fused_forward`` computes the child without calling it. If the child has hooks, the module's own forward
            runs.
        swapped: the child is called with arguments that only its fused forward takes, so the child must be swapped.
        many: the child is a list of such modules.
        optional: the child may be missing.
        returns: number of values that the child returns, for a child that is called. The probe replaces the child by a
            witness, whose output depends on the arguments of the call.
        any_class: only the probe proves the child's class, so the child must keep the class that the probe saw.
    """

    is_one: Kind
    fused: bool = False
    swapped: bool = False
    many: bool = False
    optional: bool = False
    returns: int = 0
    any_class: bool = False


class Keywords(dict[str, Any]):
    """Keyword arguments, at the end of a test call."""


class Pattern:
    """One structure. A pattern has no state; its methods take the module as an argument."""

    parts: Mapping[str, Part] = types.MappingProxyType({})
    """Required children, by name."""
    parameters: frozenset[str] = frozenset()
    """Names of the module's own parameters."""
    arguments: int | None = None
    """Number of forward's arguments, if it distinguishes this structure from others."""
    weights: tuple[str, ...] = ()
    """Attributes in which the module stores its attention weights."""
    keywords: tuple[str, ...] = ()
    """Arguments of ``fused_forward`` that the module's own forward lacks; layers of this package pass them."""
    bases: tuple[type[nn.Module], ...] = ()
    """Additional base classes of a swapped module."""
    dropouts: tuple[str, ...] = ()
    """Attributes that hold a dropout probability as a number instead of an ``nn.Dropout``."""
    named: bool = False
    """True passes every argument to ``fused_forward`` by name, with the module's own defaults. The module's forward may
    then have ``**kwargs``. Its other arguments must have the names of those of ``fused_forward``."""
    roles: tuple[str, ...] = ()
    """Roles of ``layers.hooks`` in which a fused parent may compute a module swapped by this pattern."""
    padding: str | None = None
    """Reason why a layer or stack keeps padding; "" if it may skip padding; None if the module is no layer or stack."""
    attends: bool = False
    """True for attention itself; False for modules around attention."""
    passed_on: tuple[str, ...] = ()
    """Arguments that a named ``fused_forward`` takes in ``**others`` and passes on unchanged."""

    title = ""
    """Name of several patterns in a report: parts of one structure; "" for the pattern's own name."""

    def __init__(self, name: str = "") -> None:
        self.name = name or type(self).__name__
        _PATTERNS[self.name] = self

    def matches(self, m: Any) -> bool:
        """Return True for a module with this pattern's names and shapes."""
        names = {name for name, child in m._modules.items() if child is not None}
        if not names <= self.parts.keys() or {n for n, p in m._parameters.items() if p is not None} != self.parameters:
            return False
        if self.arguments is not None and len(parameters_of(type(m)) or ()) != self.arguments:
            return False
        if self.named and not self._knows_arguments(type(m)):
            return False
        if not all(isinstance(getattr(m, name, None), float | int) for name in self.dropouts):
            return False
        return self.members(m) is not None

    def _knows_arguments(self, original: type[nn.Module]) -> bool:
        names, parameters = names_of(original), inspect.signature(self.fused_forward).parameters
        known = {name for name, p in parameters.items() if p.kind != p.VAR_KEYWORD} - {"m"} | {*self.passed_on}
        return names is not None and names.defaults.keys() == known

    def members(self, m: Any) -> list[tuple[Part, nn.Module]] | None:
        """Each child, or each member of a list of children, with its Part; None if a child is missing or fails its
        test."""
        found = []
        for name, part in self.parts.items():
            child = m._modules.get(name)
            if child is None and part.optional:
                continue
            if child is None or (part.many and not isinstance(child, nn.ModuleList | nn.Sequential)):
                return None
            for member in child if part.many else (child,):
                if not part.is_one(member):
                    return None
                found.append((part, member))
        return found

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        """Test calls for a module; a call that the module itself refuses is skipped."""
        raise NotImplementedError

    def fused_forward(self, m: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a module's output on the fused ops; None if the module's own forward must run."""
        raise NotImplementedError

    def own_forward(
        self, m: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], ours: dict[str, Any]
    ) -> Any:
        """Call a module's own forward, for a module or an input that ``fused_forward`` does not take.

        Args:
            m: the module.
            forward: the forward of the module's former class.
            args, kwargs: arguments of the call.
            ours: arguments of the call that are ``keywords`` of the pattern.
        """
        return forward(m, *args, **kwargs)

    def fits(self, m: Any) -> bool:
        """Return True if a module still has the same parts and no skipped call would be observed by a hook."""
        if not is_as_proven(m) or (members := self.members(m)) is None:
            return False
        inlined = []
        for part, member in members:
            if CHANGED in member.__dict__ or (part.fused and not is_plain(member)):
                return False
            if part.any_class:
                if not is_as_proven(member):
                    return False
                inlined.append(author_class(type(member)))
            pattern = pattern_of(member) if part.fused or part.swapped else None
            if pattern is not None and not pattern.fits(member):
                return False
        return tuple(inlined) == type(m).inlined

    def inlined_children(self, m: Any) -> list[nn.Module]:
        """Fused children that only the probe has compared."""
        return [member for part, member in self.members(m) or () if part.any_class]

    def change(self, m: Any) -> str:
        """Describe what has changed in a module, or in a child that it fuses, since it was proven; "" for nothing."""
        fused = [member for part, member in self.members(m) or () if part.fused]
        return next(filter(None, map(change_of, (m, *fused))), "")


_PATTERNS: dict[str, Pattern] = {}


def declared() -> tuple[Pattern, ...]:
    """All patterns, in the order in which the imports of their files made them."""
    return tuple(_PATTERNS.values())


SWAPPED = "swapped"
"""Role of a class made by :func:`accelerated_class`."""


class Accelerated(Made):
    """First base of a class whose forward runs on the fused ops.

    Attributes:
        pattern: the pattern that computes the module.
        inlined: classes of the children that only the probe has compared.
    """

    pattern: Pattern
    inlined: tuple[type[nn.Module], ...]


def accelerated_class(pattern: Pattern, module: nn.Module) -> type[nn.Module]:
    """Return the fused class for a module with this pattern."""
    inlined = tuple(author_class(type(child)) for child in pattern.inlined_children(module))
    return _accelerated_class(type(module), pattern.name, inlined)


@cached_by_class
def _accelerated_class(original: type[nn.Module], name: str, inlined: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    pattern = _PATTERNS[name]
    parameters = parameters_of(original)
    names = names_of(original) if pattern.named else None
    keywords = [name for name in pattern.keywords if name not in inspect.signature(original.forward).parameters]

    @scripted_as(original.forward, same_signature=True)  # torch.export reads the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours: dict[str, Any] = {}
        if pattern.named:
            ordered, given = _by_name(names, args, kwargs)
        else:
            if kwargs and keywords:
                ours = {name: kwargs.pop(name) for name in keywords if name in kwargs}
            ordered, given = _in_order(parameters, args, kwargs) if kwargs else args, ours
        served = isinstance(self, Made) and takes_fused_ops(*args, *kwargs.values(), *self._parameters.values())
        if served and ordered is not None and pattern.fits(self):
            result = pattern.fused_forward(self, *ordered, **given)
            if result is not None:
                return result
        if pattern.attends and call_on_tokens() is not None:
            raise StaysPaddedError(f"a {original.__name__} runs its own forward")
        if not torch.compiler.is_compiling():
            if changed := pattern.change(self):
                say(f"accelerate: a {original.__name__} runs its own code: {changed}")
            if (calls := padded_calls(self)) is not None:
                why = changed or "it has a hook, or an unknown submodule or input"
                calls.add(f"a {original.__name__} runs its own forward: {why}")
        return pattern.own_forward(self, original.forward, args, kwargs, ours)

    made = make_class(
        (Accelerated, *pattern.bases),
        original,
        (_accelerated_class, name, inlined),
        forward=forward,
        pattern=pattern,
        inlined=inlined,
        probabilities=pattern.dropouts,
        **{name: LastWeights() for name in pattern.weights if not _is_property(original, name)},
    )
    for role in (SWAPPED, *pattern.roles):
        in_role(role)(made)
    watch_itself(made)
    return made


def _is_property(original: type[nn.Module], name: str) -> bool:
    """Return True for a property of the author, which may read the weights of the parts."""
    return isinstance(inspect.getattr_static(original, name, None), property)


def _in_order(parameters: tuple[inspect.Parameter, ...] | None, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Put keyword arguments in order; None if they do not fit, so that the original forward raises."""
    if parameters is None:
        return None
    rest, used = [], 0
    for parameter in parameters[len(args) :]:
        used += parameter.name in kwargs
        rest.append(kwargs.get(parameter.name, parameter.default))
        if rest[-1] is inspect.Parameter.empty:
            return None
    return (*args, *rest) if used == len(kwargs) else None


@dataclasses.dataclass(frozen=True)
class Names:
    """Signature of a forward: defaults by name, in order (``inspect.Parameter.empty`` for none); names of the
    positional arguments; and True if it takes ``**kwargs``."""

    defaults: dict[str, Any]
    positional: tuple[str, ...]
    others: bool


def names_of(original: type[nn.Module]) -> Names | None:
    """Signature of a module's forward; None if some arguments have no name."""
    _, *parameters = inspect.signature(original.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    named = [p for p in parameters if p.kind != p.VAR_KEYWORD]
    positional = tuple(p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD)
    return Names({p.name: p.default for p in named}, positional, len(named) < len(parameters))


def _by_name(names: Names | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple | None, dict[str, Any]]:
    """Bind every argument by name; (None, {}) if the arguments do not fit, so that the original forward raises."""
    if names is None or len(args) > len(names.positional):
        return None, {}
    given = dict(zip(names.positional, args))
    for name, value in kwargs.items():
        if name in given or not (names.others or name in names.defaults):
            return None, {}
        given[name] = value
    for name, default in names.defaults.items():
        if name not in given:
            if default is inspect.Parameter.empty:
                return None, {}
            given[name] = default
    return (), given


def parameters_of(original: type[nn.Module]) -> tuple[inspect.Parameter, ...] | None:
    """Return forward's parameters without ``self``; None if one of them is ``*``, ``**`` or keyword only."""
    parameters = list(inspect.signature(original.forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        return None
    return tuple(parameters)


def pattern_of(module: nn.Module) -> Pattern | None:
    """Return the pattern that a module was swapped by; None for an unswapped module or a subclass of a swapped
    class."""
    kind = type(module)
    return kind.pattern if getattr(kind, SWAPPED, None) is kind else None  # type: ignore[attr-defined]


def swapped_by(pattern: Pattern | type[Pattern]) -> Kind:
    """Return a test for modules swapped by a pattern, or by any pattern of a class."""
    if isinstance(pattern, Pattern):
        return lambda m: pattern_of(m) is pattern
    return lambda m: isinstance(pattern_of(m), pattern)


def children(**parts: Part) -> Mapping[str, Part]:
    """Children of a module, by name."""
    return parts


ANY = Part(lambda module: True)
INLINED = Part(lambda module: True, fused=True, any_class=True)
"""Module of any class without parameters; ``fused_forward`` computes its result."""
LINEAR = Part(lambda module: hasattr(module, "in_features") and hasattr(module, "out_features"))
"""``nn.Linear`` or a replacement by another library, such as a quantised layer; it is always called."""
DROPOUT = Part(lambda module: type(module) in dropout.KINDS, fused=True)
EMBEDDING = Part(lambda module: isinstance(module, Embedding) and is_lookup(module), fused=True)


def random_keep(*shape: int) -> Tensor:
    """Random keep mask with no empty row."""
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True
    return keep
