"""Patterns: the structure of a module that people write themselves, and the fused ops that compute it.

A pattern says by which names it knows a module (``matches``), how the fused ops compute it (``fused_forward``), and
which calls show that this is what the module computes (``calls``). Names do not prove a formula, so ``accelerate``
compares both on random input first. The module's class then becomes a subclass of the class it had, which adds no state
and keeps every method but forward.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...dialects.common import LAST_WEIGHTS, LastWeights
from ...layers import dropout
from ...layers.embedding import is_lookup
from ...layers.hooks import in_role, is_plain
from ...layers.padded_calls import padded_calls
from ...layers.torch_modules import Embedding
from ...tensors import is_served

Kind = Callable[[nn.Module], bool]
"""Whether a child is what it must be."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A child of a module.

    Attributes:
        is_one: whether a module is what the child must be.
        fused: ``fused_forward`` does its work without calling it. If it has hooks, the module runs as it was written.
        swapped: it is called in a way that only the fused form understands, so it must not run as it was written.
        many: it is a list of such modules.
        optional: it may be missing.
        returns: it is called, and how many values it returns. What the values are is no part of the proof, so another
            module answers in its place, from which the arguments of the call can be told.
        any_class: its class is proven by the probe alone, so it must stay the class that the probe saw.
    """

    is_one: Kind
    fused: bool = False
    swapped: bool = False
    many: bool = False
    optional: bool = False
    returns: int = 0
    any_class: bool = False


class Keywords(dict[str, Any]):
    """At the end of a call to try: arguments given by name."""


class Pattern:
    """One structure; a pattern has no state, and is passed the module that it is about."""

    parts: Mapping[str, Part] = types.MappingProxyType({})
    """The module's children by name."""
    parameters: frozenset[str] = frozenset()
    """The names of the module's own parameters."""
    arguments: int | None = None
    """How many arguments its forward must have, where the number tells it from others."""
    weights: tuple[str, ...] = ()
    """The attributes in which the module leaves its weights."""
    keywords: tuple[str, ...] = ()
    """Arguments of ``fused_forward`` that the module itself does not have; the layers of this package give them."""
    bases: tuple[type[nn.Module], ...] = ()
    """What else a swapped module is an instance of."""
    dropouts: tuple[str, ...] = ()
    """The module's attributes that are probabilities of dropout: numbers, where others have a ``nn.Dropout``."""
    named: bool = False
    """Whether ``fused_forward`` gets each argument by its name, with the module's own defaults for those not given, so
    that the module's forward may have ``**kwargs``. Its other arguments must be named as those of ``fused_forward``."""
    roles: tuple[str, ...] = ()
    """Roles of ``layers.hooks`` in which a fused parent may compute a module that was swapped by this pattern."""
    padding: str | None = None
    """Reason for which a layer or stack keeps the padding of a batch; "" where it may leave it out; None for others."""
    passed_on: tuple[str, ...] = ()
    """Arguments of a named ``fused_forward`` that it has among its ``**others``, and passes on as they are."""

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
        """Each child, or each member of it, with its part; None where one is missing or is something else."""
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
        """Arguments to try a module with; one that the module itself refuses is not tried."""
        raise NotImplementedError

    def fused_forward(self, m: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a module's output on the fused ops; None where they do not serve, and its own forward must run."""
        raise NotImplementedError

    def unfused_forward(self, m: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``fused_forward``, for tensors that the fused ops do not take; None where its own forward must run."""
        return None

    def fits(self, m: Any) -> bool:
        """Return True for a module with the same parts, where nobody would miss the calls that are left out."""
        fused = []
        if (members := self.members(m)) is None:
            return False
        for part, member in members:
            if part.fused:
                fused.append(member)
            pattern = pattern_of(member) if part.fused or part.swapped else None
            if pattern is not None and not pattern.fits(member):
                return False
        return self.inlined(m) == getattr(type(m), "inlined", ()) and all(map(is_plain, fused))

    def inlined(self, m: Any) -> tuple[type[nn.Module], ...]:
        """Return the classes of the children whose work is done here, and which only the probe has compared."""
        found = (m._modules.get(name) for name, part in self.parts.items() if part.any_class)
        return tuple(type(child) for child in found if child is not None)


_PATTERNS: dict[str, Pattern] = {}


SWAPPED = "swapped"
"""The role of a class that :func:`accelerated_class` made."""


class Accelerated:
    """The first base of a swapped class; the last is the class that the module had."""

    pattern_and_class: tuple[Pattern, type[nn.Module]]
    inlined: tuple[type[nn.Module], ...]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made when the program runs, so a pickle says how to make it again.
        _, _, state, *rest = super().__reduce_ex__(protocol)
        pattern, original = type(self).pattern_and_class
        state = {key: None if key == LAST_WEIGHTS else value for key, value in state.items()}
        return _rebuild, (pattern.name, original, type(self).inlined), state, *rest


def accelerated_class(pattern: Pattern, module: nn.Module) -> type[nn.Module]:
    """Return the class on the fused ops for a module that has this pattern."""
    return _accelerated_class(pattern, type(module), pattern.inlined(module))


@functools.cache
def _accelerated_class(
    pattern: Pattern, original: type[nn.Module], inlined: tuple[type[nn.Module], ...]
) -> type[nn.Module]:
    parameters = parameters_of(original)
    names = names_of(original) if pattern.named else None
    keywords = [name for name in pattern.keywords if name not in inspect.signature(original.forward).parameters]

    @functools.wraps(original.forward)  # torch.export reads the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        served = is_served(*args, *kwargs.values(), *self._parameters.values())
        if pattern.named:
            ordered, ours = _by_name(names, args, kwargs)
        else:
            ours = {name: kwargs.pop(name) for name in keywords if name in kwargs} if kwargs else {}
            ordered = _in_order(parameters, args, kwargs) if kwargs else args
        if ordered is not None and pattern.fits(self):
            compute = pattern.fused_forward if served else pattern.unfused_forward
            result = compute(self, *ordered, **ours)
            if result is not None:
                return result
        if not torch.compiler.is_compiling() and (calls := padded_calls(self)) is not None:
            calls.add(
                f"a {original.__name__} runs as it was written: it has a hook, or a part or input of another kind"
            )
        return original.forward(self, *args, **kwargs)

    made = type(original.__name__, (Accelerated, *pattern.bases, original), {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": forward,
        "pattern_and_class": (pattern, original),
        "inlined": inlined,
        **{name: LastWeights() for name in pattern.weights},
    })  # fmt: skip
    for role in (SWAPPED, *pattern.roles):
        in_role(role)(made)
    return made


def _rebuild(name: str, original: type[nn.Module], inlined: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    made = _accelerated_class(_PATTERNS[name], original, inlined)
    return made.__new__(made)


def _in_order(parameters: tuple[inspect.Parameter, ...] | None, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Keyword arguments put in order; None where they do not fit, so that the original says so."""
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
    """The arguments of a forward: their defaults (``inspect.Parameter.empty`` for none) by name, in order; the names
    of those that may be given without it; whether there may be others."""

    defaults: dict[str, Any]
    positional: tuple[str, ...]
    others: bool


def names_of(original: type[nn.Module]) -> Names | None:
    """The arguments of a module's forward; None where some have no name."""
    _, *parameters = inspect.signature(original.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    named = [p for p in parameters if p.kind != p.VAR_KEYWORD]
    positional = tuple(p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD)
    return Names({p.name: p.default for p in named}, positional, len(named) < len(parameters))


def _by_name(names: Names | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple | None, dict[str, Any]]:
    """Every argument by its name, and none in order; (None, {}) where they do not fit, so that the original says so."""
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
    """Return forward's parameters without ``self``; None where one of them is ``*``, ``**`` or keyword only."""
    parameters = list(inspect.signature(original.forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        return None
    return tuple(parameters)


def pattern_of(module: nn.Module) -> Pattern | None:
    """Return the pattern by which a module was swapped; None for one that was not, and for a subclass of its class."""
    kind = type(module)
    return kind.pattern_and_class[0] if getattr(kind, SWAPPED, None) is kind else None  # type: ignore[attr-defined]


def swapped_by(pattern: Pattern | type[Pattern]) -> Kind:
    """Return a test of a module: it was swapped by a pattern, or by one of a class of them."""
    if isinstance(pattern, Pattern):
        return lambda m: pattern_of(m) is pattern
    return lambda m: isinstance(pattern_of(m), pattern)


def children(**parts: Part) -> Mapping[str, Part]:
    """The children of a module by name."""
    return parts


ANY = Part(lambda module: True)
INLINED = Part(lambda module: True, fused=True, any_class=True)
"""A module of any class that has no parameters, whose work ``fused_forward`` does."""
LINEAR = Part(lambda module: hasattr(module, "in_features") and hasattr(module, "out_features"))
"""``nn.Linear``, or what another library put in its place, such as a quantised layer; it is called, not looked into."""
DROPOUT = Part(lambda module: type(module) in dropout.KINDS, fused=True)
EMBEDDING = Part(lambda module: isinstance(module, Embedding) and is_lookup(module), fused=True)


def random_keep(*shape: int) -> Tensor:
    """A random keep mask with no empty row."""
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True
    return keep
