"""Origin of classes and functions: whether torch, transformers or this package holds them, by identity.

A user may derive a class, or replace one, and the new code may read padding. A name does not show that. So a class
counts as a library's if the library's module holds this very object.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ...integrations.byte_code import codes
from ...integrations.lazy_bias import LazyBiased
from ..made import author_class

_WRAPPERS = ("torch", "transformers", "transformer_fast", "accelerate")
"""Packages whose functions may stand around a forward. The last one wraps models for ``Trainer``."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Head of the models in some tables of transformers.

    Attributes:
        tables: names of the tables, ``MODEL_FOR_..._MAPPING_NAMES``; "" is that of models without a head.
        on_tokens: True if the output layer and the loss may run on tokens alone.
        labels_per_token: True if there is one label for each position.
        one_position: True if the head reads one position of a row, the first or the last; others read each by itself.
    """

    tables: tuple[str, ...]
    on_tokens: bool = False
    labels_per_token: bool = False
    one_position: bool = False


WORDS = (
    "MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "VISION_2_SEQ", "SPEECH_SEQ_2_SEQ",
)  # fmt: skip
"""Tables of models that predict tokens."""
ROW = Head(("SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION"), one_position=True)
HEADS = (
    Head(WORDS, on_tokens=True, labels_per_token=True),
    Head(("TOKEN_CLASSIFICATION",), labels_per_token=True),
    ROW,
    ANSWER := Head(("QUESTION_ANSWERING",)),
    STATES := Head(("TEXT_ENCODING", "")),
    Head(("PRETRAINING",), one_position=True),
)
"""Heads in the order of the search. A new one is a line here, and one in docs/packed.md; the tests take both."""


def is_held(kind: type) -> bool:
    """Return True for a class that a module of torch or transformers holds under the class's name."""
    package = kind.__module__.partition(".")[0]
    if package not in ("torch", "transformers"):
        return False
    try:
        return operator.attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    except (AttributeError, KeyError):
        return False


@functools.cache
def bare(kind: type[nn.Module]) -> type[nn.Module]:
    """Class that a module had before this package, or FSDP, changed it."""
    if (author := author_class(kind)) is not kind:
        return bare(author)
    if issubclass(kind, LazyBiased) and "made_from" in vars(kind):
        return bare(kind.made_from)
    if kind.__module__.startswith("torch.distributed.") and not is_held(kind):
        return bare(kind.__bases__[-1])
    if kind.__module__.startswith("transformer_fast."):
        return next((base for base in kind.__mro__[:-1] if base is not nn.Module and is_held(base)), kind)
    return kind


def is_own_code(function: Any, inner: Any = None) -> bool:
    """Return True for a function that a library defined, and that only libraries have wrapped.

    Args:
        inner: function that counts as a library's.
    """
    while function is not inner:
        if function is None:
            return False
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):
            function = function.func
            continue
        if isinstance(function, types.FunctionType):
            module = function.__globals__.get("__name__", "")
            if function.__globals__ is not getattr(sys.modules.get(module), "__dict__", None):
                return False
        else:
            module = type(function).__module__
        if module.partition(".")[0] not in _WRAPPERS:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def library_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Class of a library that a class is, or is derived from without a change of what the library's code does.

    Returns:
        None if a class in between, a user's, replaces a method or a property.
    """
    between, held = _derived(bare(kind))
    replaced = any(hasattr(held, name) for cls in between for name in _code(cls) if name not in _BESIDE)
    return None if replaced else held


@functools.cache
def adds_code(kind: type[nn.Module]) -> bool:
    """Return True for a class of a user with code of its own, which may call the modules inside."""
    return any(_code(cls) for cls in _derived(bare(kind))[0])


def _derived(kind: type[nn.Module]) -> tuple[list[type], type]:
    """Classes of a user that a class is derived from, itself included, and the library's class that they extend."""
    between: list[type] = []
    for base in kind.__mro__:
        if is_held(base):
            return between, base
        if not _MADE & vars(base).keys():
            between.append(base)
    return between, nn.Module


_MADE = {"recipe", "made_from"}
"""Attributes of the classes that this package makes at run time."""
_FREE = {"__init__", "__annotate__", "__annotate_func__", "config_class"}
"""Attributes that add no code to a model's call."""

_BESIDE = {
    "_init_weights", "prepare_inputs_for_generation", "generate", "save_pretrained", "from_pretrained", "extra_repr",
    "__repr__",
}  # fmt: skip
"""Methods of models of transformers that no forward calls."""


def _code(cls: type) -> list[str]:
    """Names of the methods and properties of a class."""
    return [
        name
        for name, value in vars(cls).items()
        if name not in _FREE
        and (callable(value) or isinstance(value, property | classmethod | staticmethod | functools.cached_property))
    ]


@functools.cache
def head_of(kind: type[nn.Module]) -> Head | None:
    """Head of a class that transformers holds; None for classes in none of the tables."""
    return next((head for head in HEADS if any(kind.__name__ in listed(table) for table in head.tables)), None)


@functools.cache
def listed(table: str) -> frozenset[str]:
    """Names of the classes in a table of transformers; "" is the table of models without a head."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    found = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES", {})
    return frozenset(name for names in found.values() for name in ((names,) if isinstance(names, str) else names))


@functools.cache
def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Names of globals, attributes and local variables in a function and the functions inside it."""
    return frozenset(
        name for code in codes(inspect.unwrap(function).__code__) for name in (*code.co_names, *code.co_varnames)
    )


def variables_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments and local variables of a function."""
    return inspect.unwrap(function).__code__.co_varnames


@functools.cache
def names_of_forward(kind: type[nn.Module]) -> frozenset[str]:
    """Names in a class's forward, and in the forward of a base class that it calls through ``super()``."""
    names: frozenset[str] = frozenset()
    for base in kind.__mro__:
        if "forward" in vars(base):
            found = names_in(vars(base)["forward"])
            names |= found
            if "super" not in found:
                break
    return names


@functools.cache
def made_by(kind: type[nn.Module]) -> frozenset[str]:
    """Names in the constructors of a class: among them are the classes of the modules that it makes."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base) and base is not object]
    return frozenset().union(*(names_in(f) for f in constructors if isinstance(f, types.FunctionType)))
