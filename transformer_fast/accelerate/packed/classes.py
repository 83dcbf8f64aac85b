"""Arguments of a call, by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Forward = Callable[..., Any]


class Arguments:
    """Arguments of a call, by name.

    Attributes:
        given: values by name, in the order of the call.
    """

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positional = names[: len(args)]
        self.given = dict(zip(names, args)) | kwargs
        self.fits = len(args) <= len(names)

    def replaced(self, changes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call, with some values changed or added."""
        values = self.given | changes
        args = tuple(values.pop(name) for name in self._positional)
        return args, values


@functools.cache
def positional_names(forward: Forward) -> tuple[str, ...]:
    """Names of a method's positional arguments, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
