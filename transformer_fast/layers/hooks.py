"""Whether a module may be computed without being called."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules import module as _module

Kind = TypeVar("Kind", bound=nn.Module)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps them."""


def has_hooks(*modules: nn.Module) -> bool:
    """Whether one of the modules has a hook, or all modules have one."""
    hooks = _module._has_any_global_hook()
    for m in modules:  # not any(...), which takes twice as long
        hooks = hooks or m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks)


def is_plain(module: nn.Module, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module may be computed without being called: it has no hook, no forward of its own in place of its
    class's, is not compiled, and where kinds are given, its class is exactly one of them."""
    if (kinds and type(module) not in kinds) or "forward" in module.__dict__:
        return False
    return module._compiled_call_impl is None and not has_hooks(module)
