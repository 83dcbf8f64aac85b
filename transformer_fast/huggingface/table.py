"""Look-up of the fast class of a class of transformers. A class is known because its object is in the table."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ..tensors import takes_fused_ops
from . import blocks, supported
from .blocks import Fast


def fast_class(kind: type[nn.Module]) -> type[Fast] | None:
    """Return the fast class of a class of transformers.

    Returns:
        None for a class that is not in the table, for a user's class, for a class whose ``forward`` was replaced, and
        for a version of transformers that the table does not have.
    """
    if supported.name_of(kind) is None or not supported.has_version() or not is_original(kind):
        return None
    return _made(kind)


def is_original(kind: type[nn.Module]) -> bool:
    """Return True if transformers' module holds this very class, and defines its ``forward``."""
    module = sys.modules.get(kind.__module__)
    if module is None or vars(module).get(kind.__qualname__) is not kind:
        return False
    forward: Any = kind.forward
    while (inner := getattr(forward, "__wrapped__", None)) is not None:  # checkpointing, renamed arguments
        if not _is_transformers(forward):
            return False
        forward = inner
    own = isinstance(forward, types.FunctionType) and forward.__globals__ is vars(module)
    return own and forward.__qualname__ == f"{kind.__qualname__}.forward"


def note(model: nn.Module) -> str:
    """Line of a report about a version of transformers that the table does not have; "" if there is none."""
    if supported.has_version() or all(supported.name_of(type(module)) is None for module in model.modules()):
        return ""
    return (
        f"transformers {supported.version()}: its classes are left, since the table is that of versions "
        f"{', '.join('.'.join(map(str, version)) for version in supported.VERSIONS)}; "
        'attn_implementation="transformer_fast" works with each version'
    )


@functools.cache
def _made(kind: type[nn.Module]) -> type[Fast]:
    base: type[Fast] = getattr(blocks, supported.name_of(kind) or "")
    _, _, stem = kind.__module__.rpartition(".")
    qualname = f"{kind.__qualname__}_of_{stem}"
    attributes = {"__module__": __name__, "__qualname__": qualname, "__doc__": kind.__doc__}
    return type(kind.__name__, (base, kind), {**attributes, "forward": _forward(kind, base.compute)})


def _forward(kind: type[nn.Module], compute: Callable[..., Any]) -> Callable[..., Any]:
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # After undo, a caller may hold this method; and somebody may replace the method of transformers.
        original = isinstance(self, Fast) and kind.forward is plain
        if original and takes_fused_ops(*args, *kwargs.values(), *self._parameters.values()):
            result = compute(self, *args, **kwargs)
            if result is not None:
                return result
        return kind.forward(self, *args, **kwargs)

    return forward


def _is_transformers(function: Any) -> bool:
    """Return True for a function that a module of transformers defines."""
    of: dict[str, Any] = getattr(function, "__globals__", {})
    name = of.get("__name__", "")
    return name.partition(".")[0] == "transformers" and of is getattr(sys.modules.get(name), "__dict__", None)


def __getattr__(name: str) -> type[nn.Module]:
    """Find a fast class by its name in a pickle; in a version that the table does not have, the class itself."""
    own, _, stem = name.partition("_of_")
    for path in supported.CLASSES if stem else ():
        place, _, known = path.rpartition(".")
        if known == own and place.endswith(f".{stem}"):
            kind = getattr(importlib.import_module(place), own)
            return fast_class(kind) or kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
