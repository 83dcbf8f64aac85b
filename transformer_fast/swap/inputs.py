"""Module and inputs that a user gives to the check of ``register``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

SIZES = ((2, 1), (3, 2), (5, 5), (3, 17), (2, 97), (2, 300))
"""Batch sizes and lengths for which a function of the user makes inputs."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call of a module, and their description; ``varied`` if the check has changed a mask."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    varied: bool = False


@dataclasses.dataclass(frozen=True)
class Sample:
    """Module of a registered class, and calls of it."""

    module: nn.Module
    calls: tuple[Call, ...]


def samples_of(kind: type[nn.Module], check: Any) -> list[Sample]:
    """Read the argument ``check`` of ``register``.

    Raises:
        TypeError: if the argument is no pair (module, inputs) and no list of pairs.
        ValueError: if a function that makes inputs fails.
    """
    samples = []
    for pair in check if isinstance(check, list) and check else [check]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
            raise TypeError(
                f"register: check must be (module, inputs) or a list of such pairs, got {_described(pair)}; module is "
                f"a {kind.__name__}, inputs are the arguments of its forward, or a function of batch and length"
            )
        module, inputs = pair
        if type(module) is not kind:
            raise TypeError(
                f"register: check has a module of class {type(module).__name__}, expected {kind.__name__} exactly"
            )
        if not callable(inputs):
            calls = [_call(inputs, "the given inputs")]
        else:
            calls = []
            for batch, length in SIZES:
                try:
                    made = inputs(batch, length)
                except Exception as error:
                    raise ValueError(f"register: inputs({batch}, {length}) failed: {first_line(error)}") from error
                calls.append(_call(made, f"batch {batch}, length {length}"))
        samples.append(Sample(module, tuple(calls)))
    return samples


def _call(inputs: Any, where: str) -> Call:
    if isinstance(inputs, Tensor):
        return Call((inputs,), {}, where)
    if isinstance(inputs, tuple):
        return Call(inputs, {}, where)
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs), where)
    raise TypeError(
        f"register: inputs must be a tuple of arguments, a dict of keyword arguments, a tensor, or a function of batch "
        f"and length, got {_described(inputs)}"
    )


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(inner).__name__ for inner in value) or 'nothing'}"
    return type(value).__name__


def first_line(error: BaseException) -> str:
    """Class name of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
