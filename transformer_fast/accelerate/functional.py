"""``accelerate(model, functional=True)``: classes whose ``forward`` runs in a block of ``functional()``.

Each module that keeps its own code gets such a class, not the outermost module alone: a checkpoint, or a method other
than ``forward``, calls the modules inside by themselves.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..function_mode import FunctionalMode, is_in_block
from .registered import Registered, registered_class

NAME = "its code in tfast.functional()"
WAY = "where its code calls F.scaled_dot_product_attention"


class FunctionalCalls(Registered):
    """First base of a class whose ``forward`` runs in a block of ``functional()``."""

    computes_as_former = True


_KNOWN = ("builtins", "torch", "transformers", "typing")
"""Packages whose classes may have subclasses: nothing is registered."""


def obstacle(module: nn.Module) -> str:
    """Reason against a class whose ``forward`` runs in a block, or ""."""
    kind = type(module)
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if kind.forward is nn.Module.forward or _package(kind) == "torch":
        return "it has no forward of an author"
    registers = any("__init_subclass__" in vars(base) and _package(base) not in _KNOWN for base in kind.__mro__)
    return "its class registers subclasses" if registers else ""


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


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
