"""Classes that are made at run time from a module's class, and the test that a module is still what its class was
made for.

``accelerate`` proves that a module may run on the fused ops, and gives it a made class: a subclass of its own class.
The proof depends on the module's attributes and on the code of its class. A module that has changed since runs its own
code. Two things show a change: ``__setattr__`` of the made class notes attributes that the code reads and whose value
differs from the proven one, and :class:`FormerClass` compares the attributes of a class.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..dialects.common import LAST_WEIGHTS, LastWeights
from ..integrations import transformers as integration
from ..layers.hooks import CHANGED, FORMER_CLASSES, is_as_made
from ..layers.padded_calls import WITHOUT_PADDING
from ..layers.scripted_as import annotations_of
from .read_names import code_held, is_authors, names_read

HELD = "_transformer_fast_held"
"""Attribute of a module: pairs (container that the module's code reads, copy of its content when it was proven)."""

READ = "_transformer_fast_read"
"""Attribute of a proven module: names that its code, or that of a fused parent, reads; None for any."""

_UNREAD = {*nn.Module().__dict__, "__class__"}
_OURS = ("_transformer_fast_", LAST_WEIGHTS, WITHOUT_PADDING)
_LOG = logging.getLogger("transformer_fast")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_KEPT = ("__call__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__bool__", "__len__")
"""Special methods that calls depend on; Python sets other special attributes by itself."""
_MISSING = "missing"
_DEPTH = 7  # containers inside containers
_CONTAINERS = (list, dict, set, tuple, collections.deque)
_NO_CONTAINERS = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, property, staticmethod, classmethod)


class FormerClass:
    """Class of an author, with its attributes at the time of a proof."""

    def __init__(self, kind: type) -> None:
        self.now = vars(kind)  # a view
        self.proven = dict(self.now)

    def is_unchanged(self) -> bool:
        """Return True if the class has the attributes that it had."""
        if self.now != self.proven:
            if _own(self.now) != _own(self.proven):
                return False
            for name in self.proven.keys() - self.now.keys():
                self.proven.pop(name, None)
            self.proven.update(self.now)
        return True

    def compared(self) -> tuple[Any, ...]:
        """Return what each call compares: the attributes, those at the time of the proof, and the snapshot."""
        return self.now, self.proven, self


def _own(attributes: Any) -> dict[str, Any]:
    """Attributes without those that Python or pickle set by themselves."""
    return {k: v for k, v in attributes.items() if k in _KEPT or not (k.startswith("__") and k.endswith("__"))}


_former: weakref.WeakKeyDictionary[type, FormerClass] = weakref.WeakKeyDictionary()


def former_classes(kind: type) -> tuple[FormerClass, ...]:
    """Snapshots of a class and its base classes, without torch's and made ones; equal ones are one object."""
    found = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing") or issubclass(base, Made):
            continue
        if (known := _former.get(base)) is None or not known.is_unchanged():
            known = _former[base] = FormerClass(base)
        found.append(known)
    return tuple(found)


def cached_by_class(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the results for a class and further arguments, until an attribute of the class or of a base is changed."""

    @functools.cache
    def cached(kind: type[nn.Module], classes: tuple[FormerClass, ...], *args: Any) -> Any:
        return function(kind, *args)

    @functools.wraps(function)
    def of_now(kind: type[nn.Module], *args: Any) -> Any:
        return cached(kind, former_classes(kind), *args)

    return of_now


class Swapped:
    """First base of a class that is made at run time, with a module's class as its last base.

    Attributes:
        former: the module's class.
        recipe: a function and its arguments; with the former class as the first argument it returns the made class.
    """

    former: type[nn.Module]
    recipe: tuple[Any, ...]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # No module holds the class, so a pickle stores how to make it again. The author's own __reduce__ decides the
        # rest.
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        kind, recipes = type(self), []
        while "recipe" in vars(kind):
            recipes.append(kind.recipe)
            kind = kind.former
        make, args, *rest = (kind if value is type(self) else value for value in reduced)
        args = tuple(kind if value is type(self) else value for value in args)
        if rest and isinstance(rest[0], dict):  # weights of the last call are computed by a function, and not copied
            rest[0] = {k: None if k == LAST_WEIGHTS else v for k, v in rest[0].items() if k != HELD}
        return _remake, (tuple(recipes), make, args), *rest


class Made(Swapped):
    """First base of a made class that stands for a proof.

    Attributes:
        probabilities: attributes that hold a probability of dropout, for which the proof holds with any value.
    """

    probabilities: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _hold_contents(self)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        before = _read_value(self, name)
        super().__setattr__(name, value)
        _note(self, name, before)

    def __delattr__(self, name: str) -> None:
        before = _read_value(self, name)
        super().__delattr__(name)
        _note(self, name, before)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See ``nn.Module.register_parameter``."""
        before = _read_value(self, name)
        super().register_parameter(name, param)  # type: ignore[misc]
        _note(self, name, before)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """See ``nn.Module.register_buffer``."""
        before = _read_value(self, name)
        super().register_buffer(name, tensor, persistent)  # type: ignore[misc]
        _note(self, name, before)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See ``nn.Module.add_module``."""
        before = _read_value(self, name)
        super().add_module(name, module)  # type: ignore[misc]
        _note(self, name, before)


def _remake(recipes: tuple[Any, ...], make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    if "transformers.modeling_utils" in sys.modules:  # a new process: the model's configs may name our attention
        integration.register()
    module = make(*args)
    for function, *others in reversed(recipes):
        module.__class__ = function(type(module), *others)
    return module


def make_class(
    bases: tuple[type, ...],
    former: type[nn.Module],
    recipe: tuple[Any, ...],
    **attributes: Any,
) -> type[nn.Module]:
    """Make a class from a module's class, as that class is now.

    Args:
        bases: a subclass of :class:`Made`, and further base classes.
        former: the module's class.
        recipe: see :class:`Made`.
        attributes: further attributes of the class.
    """
    return type(former.__name__, (*bases, former), {
        "__module__": former.__module__,
        "__qualname__": former.__qualname__,
        "__doc__": former.__doc__,
        "__annotations__": annotations_of(former),
        "former": former,
        "recipe": recipe,
        FORMER_CLASSES: tuple(one.compared() for one in former_classes(former)),
        **attributes,
    })  # fmt: skip


def watch_itself(made: type[nn.Module]) -> None:
    """Count attributes that are set on a made class, by ``type(module).forward = ...``, as changes of its class."""
    itself = FormerClass(made)
    setattr(made, FORMER_CLASSES, (*getattr(made, FORMER_CLASSES), itself.compared()))
    itself.proven.update(itself.now)


@cached_by_class
def watched_class(former: type[nn.Module]) -> type[nn.Module]:
    """Return the class for a module whose code stays, and whose changes are noted."""
    return make_class((Made,), former, (watched_class,))


def author_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Class from which a class was made, or the class itself."""
    while "recipe" in vars(kind):
        kind = kind.former  # type: ignore[attr-defined]
    return kind


def _read_value(module: nn.Module, name: str) -> tuple[str, Any] | None:
    """Place and value of an attribute; None for an attribute that the module's code does not read.

    Parameters, buffers, children and probabilities may be exchanged: the fused ops read the current ones, and a pattern
    tests the children at each call. So their values count only as present or None.
    """
    attributes = module.__dict__
    names = _names_of(module)
    if name in _UNREAD or name.startswith(_OURS) or (names is not None and name not in names):
        return None
    for registry in _REGISTRIES:
        if name in attributes.get(registry, ()):
            return registry, attributes[registry][name] is None
    if isinstance(getattr(type(module), name, None), LastWeights):
        return None
    if hasattr(getattr(type(module), name, None), "__set__"):  # it may set any attribute
        return "descriptor", {k: v for k, v in own_attributes(module) if names is None or k in names}
    value = attributes.get(name, _MISSING)
    if name in type(module).probabilities and isinstance(value, float | int):  # type: ignore[attr-defined]
        return "probabilities", None
    return "__dict__", value


def _note(module: nn.Module, name: str, before: tuple[str, Any] | None) -> None:
    """Note an attribute that was set or deleted, unless it has its proven value again."""
    if before is None:
        return
    changed = dict(module.__dict__.get(CHANGED, ()))
    before = changed.pop(name, before)
    if not _is_same(before, _read_value(module, name)):
        changed[name] = before
    if changed:
        module.__dict__[CHANGED] = changed
    else:
        module.__dict__.pop(CHANGED, None)


def _is_same(before: tuple[str, Any], after: tuple[str, Any] | None) -> bool:
    if after is None or before[0] != after[0]:
        return False
    old, new = before[1], after[1]
    if before[0] == "descriptor":
        return old.keys() == new.keys() and all(_is_same(("", old[key]), ("", new[key])) for key in old)
    return old is new or (type(old) is type(new) and isinstance(old, _SCALARS) and bool(old == new))


def hold(module: nn.Module) -> None:
    """Keep what the proof of a module depends on: the names that its code reads, and the content of containers.

    The code of a fused parent may read attributes of its children, so a child gets the names that its parent reads.
    """
    names = names_read_by((module,))
    for part in module.modules():
        if isinstance(part, Made):
            known = part.__dict__.get(READ, frozenset())
            part.__dict__[READ] = None if known is None or names is None else known | names
            _hold_contents(part)


def _names_of(module: nn.Module) -> frozenset[str] | None:
    """Names that the code of a module reads; None for any."""
    return module.__dict__.get(READ)


def _hold_contents(module: nn.Module) -> None:
    names = _names_of(module)
    of_classes = (pair for base in author_class(type(module)).__mro__[::-1] for pair in _own(vars(base)).items())
    values = {**dict(of_classes), **dict(own_attributes(module))}
    read = [value for name, value in values.items() if names is None or name in names]
    if held := list(_contents(read)):
        module.__dict__[HELD] = held


def names_read_by(modules: Iterable[nn.Module]) -> frozenset[str] | None:
    """Names that the code of modules may read; None if one may read any attribute."""
    found = []
    for module in modules:
        held = list(dict.fromkeys(code_held(value for _, value in own_attributes(module))))
        functions = tuple(code for code in held if isinstance(code, types.FunctionType))
        classes = tuple(code for code in held if isinstance(code, type))
        found.append(names_read(author_class(type(module)), classes, functions))
    return None if None in found else frozenset().union(*found)  # type: ignore[arg-type]


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes of a module beside those that each ``nn.Module`` and this package have."""
    return [(k, v) for k, v in module.__dict__.items() if k not in _UNREAD and not k.startswith(_OURS)]


def _contents(values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs (container, copy) of the values that can change their content, and of the containers inside them."""
    seen: set[int] = set()
    todo = [(value, 0) for value in values]
    for value, depth in todo:
        if isinstance(value, _NO_CONTAINERS) or depth == _DEPTH or id(value) in seen:
            continue
        seen.add(id(value))
        inner = [getattr(value, name, None) for name in _slots(type(value))]
        if inner:
            yield Slots(value), inner.copy()
        container = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
        if isinstance(container, _CONTAINERS):
            inner += container.values() if isinstance(container, dict) else container
            if not isinstance(container, tuple):
                yield container, container.copy()
        todo += [(each, depth + 1) for each in inner]


class Slots:
    """View of the values in the ``__slots__`` of an object; it equals a list of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __eq__(self, other: object) -> bool:
        return [getattr(self.holder, name, None) for name in _slots(type(self.holder))] == other


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of the ``__slots__`` of an author's class."""
    if not is_authors(kind):
        return ()
    found = (vars(base) for base in kind.__mro__)
    return tuple(name for of in found for name, value in of.items() if isinstance(value, types.MemberDescriptorType))


def forget(module: nn.Module) -> None:
    """Remove the attributes of a proof."""
    for name in (LAST_WEIGHTS, CHANGED, HELD, READ):
        module.__dict__.pop(name, None)


def change_of(module: nn.Module) -> str:
    """Describe what has changed in a module since it was proven; "" for nothing."""
    if changed := module.__dict__.get(CHANGED):
        return f"its attribute {', '.join(changed)} was set after accelerate"
    if not is_as_made(type(module)):
        return f"its class {type(module).__name__} was changed after accelerate"
    return "" if held_as_proven(module) else "the content of an attribute was changed after accelerate"


def is_as_proven(module: nn.Module) -> bool:
    """Return True if no attribute that a module's code reads, and no class of its author, was changed."""
    attributes = module.__dict__
    return CHANGED not in attributes and is_as_made(type(module)) and (HELD not in attributes or held_as_proven(module))


def held_as_proven(module: nn.Module) -> bool:
    """Return True if the containers of a module have the content that they had."""
    try:
        return all(now == proven for now, proven in module.__dict__.get(HELD, ()))
    except Exception:  # values that cannot be compared are not the proven ones, which are the same objects
        return False


@functools.cache
def say(text: str) -> None:
    """Log a change, once."""
    _LOG.warning("%s", text)
