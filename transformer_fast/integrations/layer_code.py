"""Reader of names, arguments and constants in the byte code of transformers layers."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

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


@functools.cache
def adds_to_its_mask(layer: type[nn.Module]) -> bool:
    """Return True if a layer extends its mask by a tensor of the same dtype: it expects an additive mask."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)] if code is not None else []
    pairs = itertools.pairwise(steps)
    return any(first[1] == "attention_mask" and second == ("LOAD_ATTR", "dtype") for first, second in pairs)


@functools.cache
def own_arguments(layer: type[nn.Module]) -> tuple[str, ...]:
    """Arguments that only the eager attention in a layer's file has."""
    file = vars(sys.modules.get(layer.__module__, types))
    eager = file.get("eager_attention_forward") if calls_the_interface(layer) else None
    if not isinstance(eager, types.FunctionType):
        return ()
    return tuple(name for name in inspect.signature(eager).parameters if name not in _COMMON_ARGUMENTS)


@functools.cache
def keywords_of(layer: type[nn.Module]) -> frozenset[str]:
    """Names of keyword arguments in the calls of a layer's methods."""
    codes = (code for base in _own_bases(layer) for f in _functions(vars(base).values()) for code in _codes(f.__code__))
    tuples = (constant for code in codes for constant in code.co_consts if isinstance(constant, tuple))
    return frozenset(name for names in tuples for name in names if isinstance(name, str))


def is_layer(value: Any) -> bool:
    """Return True for a class of modules."""
    return isinstance(value, type) and issubclass(value, nn.Module)


@functools.cache
def names_of(layer: type[nn.Module]) -> frozenset[str]:
    """All names that the methods of a layer use; none for torch's own layers."""
    functions = [function for base in _own_bases(layer) for function in _functions(vars(base).values())]
    names: set[str] = set()
    seen: set[types.FunctionType] = set()
    while functions:
        function = functions.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in _codes(function.__code__):
            names.update(code.co_names)
            called = _functions(function.__globals__.get(name) for name in code.co_names)
            functions.extend(other for other in called if _package(other) == _package(function))
    return frozenset(names)


def named_by_init(cls: type[nn.Module]) -> Iterator[Any]:
    """Values of the globals used by the constructors of a class: layers that it makes, tables that it reads."""
    for base in _own_bases(cls):
        for function in _functions([vars(base).get("__init__")]):
            for code in _codes(function.__code__):
                yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _own_bases(cls: type[nn.Module]) -> Iterator[type]:
    """Classes that a layer or model inherits from, without torch's and transformers' base classes."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "torch" and not base.__module__.startswith("transformers.modeling_"):
            yield base


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Python functions among ``values``, without their decorators."""
    for value in values:
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield inspect.unwrap(function)


def _package(function: types.FunctionType) -> str:
    return function.__module__.rpartition(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code objects of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
