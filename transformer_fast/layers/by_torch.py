"""Fallback of modules to torch's own operators, for tensors that the fused ops do not take."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from .hooks import is_plain


def by_torch(kind: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of ``kind``, the class of torch.nn that the module's class replaces.

    A torch.fx tracer that records ``kind`` as one module call records this module as one call too.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Proxy):
            tracer: Any = value.tracer
            if _is_leaf(tracer, kind, module):
                return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
            break
    return kind.forward(module, *args, **kwargs)


def norm_by_torch(kind: type[nn.Module], norm: nn.Module, x: Tensor, residual: Tensor | None, dropout_p: float) -> Any:
    """:func:`by_torch` for a norm: the norm of x, or with ``residual`` (norm of s, s), ``s = residual +
    dropout(x)``."""
    if residual is None or (isinstance(residual, Proxy) and _is_root(residual.tracer, norm)):
        return by_torch(kind, norm, x)  # a tracer turns all default arguments of a root module into proxies
    summed = residual + F.dropout(x, dropout_p)
    return by_torch(kind, norm, summed), summed


def _is_leaf(tracer: Any, kind: type[nn.Module], module: nn.Module) -> bool:
    """Return True if a tracer records a module of ``kind`` as one call, without its inside.

    The inside of a module with hooks is recorded: its hooks are recorded already and would otherwise run twice.
    """
    if not isinstance(tracer, Tracer) or _is_root(tracer, module) or not is_plain(module):
        return False
    twin = kind.__new__(kind)  # tracers recognise modules of torch.nn by their class
    object.__setattr__(twin, "__dict__", module.__dict__)
    return tracer.is_leaf_module(twin, tracer.path_of_module(module))


def _is_root(tracer: Any, module: nn.Module) -> bool:
    """Return True if the module is the root of the graph."""
    return getattr(tracer, "root", None) is module
