"""Reader of names, arguments and constants in the byte code of transformers layers."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from .byte_code import codes

_LOOKUPS = {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface"}
_FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward", "flash_attn_func", "flash_attn_varlen_func"}

_COMMON_ARGUMENTS = {
    "module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
    "dropout", "is_causal", "position_bias", "sliding_window", "softcap", "s_aux", "output_attentions", "training",
    "kwargs", "args",
}  # fmt: skip


def calls_the_interface(layer: type[nn.Module]) -> bool:
    """Return True if a layer looks an attention implementation up."""
    return not _LOOKUPS.isdisjoint(names_of(layer))


@functools.cache
def uses_masks_by_itself(layer: type[nn.Module]) -> bool:
    """Return True if a layer uses a mask and a softmax, or a fused attention, and looks no implementation up."""
    names = names_of(layer)
    return (
        any(name.endswith("mask") for name in inspect.signature(layer.forward).parameters)
        and _LOOKUPS.isdisjoint(names)
        and (any("softmax" in name.lower() for name in names) or not _FUSED.isdisjoint(names))
    )


def own_arguments(layer: type[nn.Module]) -> tuple[str, ...]:
    """Arguments that only the eager attention in a layer's file has. torch.compile does not trace into it."""
    return _own_arguments(layer)


own_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py


@functools.cache
def _own_arguments(layer: type[nn.Module]) -> tuple[str, ...]:
    file = vars(sys.modules.get(layer.__module__, types))
    eager = file.get("eager_attention_forward") if calls_the_interface(layer) else None
    if not isinstance(eager, types.FunctionType):
        return ()
    return tuple(name for name in inspect.signature(eager).parameters if name not in _COMMON_ARGUMENTS)


@functools.cache
def keywords_of(layer: type[nn.Module]) -> frozenset[str]:
    """Names of keyword arguments in the calls of a layer's methods."""
    tuples = (constant for constant in _constants(layer) if isinstance(constant, tuple))
    return frozenset(name for names in tuples for name in names if isinstance(name, str))


@functools.cache
def strings_of(layer: type[nn.Module]) -> frozenset[str]:
    """Strings in the code of a layer's methods, also those in tuples."""
    return keywords_of(layer).union(text for text in _constants(layer) if isinstance(text, str))


def _constants(layer: type[nn.Module]) -> Iterator[Any]:
    for function in _methods(layer):
        for code in codes(function.__code__):
            yield from code.co_consts


@functools.cache
def names_of(layer: type[nn.Module]) -> frozenset[str]:
    """All names that the methods of a layer use; none for torch's own layers."""
    functions = list(_methods(layer))
    names: set[str] = set()
    seen: set[types.FunctionType] = set()
    while functions:
        function = functions.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in codes(function.__code__):
            names.update(code.co_names)
            called = _functions(function.__globals__.get(name) for name in code.co_names)
            functions.extend(other for other in called if _package(other) == _package(function))
    return frozenset(names)


def _methods(layer: type[nn.Module]) -> Iterator[types.FunctionType]:
    """Methods of a layer, without those of torch's and transformers' base classes.

    A method that overrides another hides it, unless it has a closure, through which it may call the other (super).
    """
    hidden: set[str] = set()
    for base in layer.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base.__module__.startswith("transformers.modeling_"):
            continue
        for name, value in vars(base).items():
            for function in _functions([value]) if name not in hidden else ():
                yield function
                if not getattr(value, "__closure__", None) and not hasattr(value, "__wrapped__"):
                    hidden.add(name)


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Python functions among ``values``, without their decorators."""
    for value in values:
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield inspect.unwrap(function)


def _package(function: types.FunctionType) -> str:
    return function.__module__.rpartition(".")[0]
