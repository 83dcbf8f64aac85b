"""Whether a module may be computed without being called."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps them."""


def unwatched(*modules: nn.Module) -> bool:
    """Whether no hook would miss it if these modules were computed without being called."""
    if _module._has_any_global_hook():
        return False
    for m in modules:
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return False
    return True
