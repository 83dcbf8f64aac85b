"""``is_plain``: the test that lets a fused parent compute a child module without calling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules import module as _module

Kind = TypeVar("Kind", bound=nn.Module)

CHANGED = "_transformer_fast_changed"
"""Attribute of a module that is no longer what its class was made for: the proven values, by name of an attribute."""
FORMER_CLASSES = "former_classes"
"""Attribute of a class that ``accelerate`` made: the classes of the module's author, whose code it stands for."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes that hold the hooks of a module."""


def is_plain(module: nn.Module, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Return True if calling a module would only run the forward of its class, so that a parent need not call it.

    A plain module has no hooks, its ``forward`` was not replaced on the instance, no attribute that its code reads was
    changed since ``accelerate``, and it was not compiled in place. No global hook is set. If kinds are given, the
    module's class must be exactly one of them; a subclass, a parametrized module and an adapter are then not plain.
    """
    if (kinds and type(module) not in kinds) or "forward" in module.__dict__ or CHANGED in module.__dict__:
        return False
    if module._compiled_call_impl is not None or _module._has_any_global_hook():
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooked


TAKES_RESIDUAL = "takes_residual"
"""Role of a norm whose ``forward`` takes ``residual`` and ``dropout_p``."""
LOOKS_UP = "looks_up"
"""Role of an embedding that returns rows of its ``weight``."""
TAKES_NEED_WEIGHTS = "takes_need_weights"
"""Role of an attention module or attention layer whose ``forward`` takes ``need_weights``."""
SCALED_DOT_PRODUCT = "scaled_dot_product"
"""Role of an attention module without projections, which the parent may compute for all heads at once."""


def in_role(role: str) -> Callable[[type[Kind]], type[Kind]]:
    """Mark a class as one that a fused parent may compute in a role. Subclasses do not inherit the mark."""

    def mark(kind: type[Kind]) -> type[Kind]:
        setattr(kind, role, kind)
        return kind

    return mark


def has_role(module: nn.Module, role: str) -> bool:
    """Return True for a plain module whose class, not a base class, was marked by :func:`in_role`."""
    return getattr(type(module), role, None) is type(module) and is_plain(module) and is_as_made(type(module))


def is_as_made(kind: type[nn.Module]) -> bool:
    """Return True unless a class was made from a class whose attributes were changed since.

    A compiled graph holds the answer of the time at which it was compiled.
    """
    try:
        for now, proven, former in getattr(kind, FORMER_CLASSES, ()):
            if now != proven and not former.is_unchanged():
                return False
    except Exception:  # values that cannot be compared, such as tensors, are not the same objects
        return False
    return True


is_as_made._dynamo_marked_constant = True  # type: ignore[attr-defined] # as torch.compiler.assume_constant_result
