"""Modules of torch.nn computed by torch's own operators, where a call has tensors that the fused ops do not take."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from .hooks import is_plain


def by_torch(kind: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The output of a module as ``kind`` computes it, the class of torch.nn that the module's class stands for.

    In a graph of torch.fx it is one call of the module where the tracer makes one of a module of ``kind``.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Proxy):
            tracer: Any = value.tracer
            if _is_leaf(tracer, kind, module):
                return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
            break
    return kind.forward(module, *args, **kwargs)


def norm_by_torch(kind: type[nn.Module], norm: nn.Module, x: Tensor, residual: Tensor | None, dropout_p: float) -> Any:
    """:func:`by_torch` of a norm: the norm of x, or with ``residual`` (norm of s, s), ``s = residual + dropout(x)``."""
    if residual is None or (isinstance(residual, Proxy) and _is_root(residual.tracer, norm)):
        return by_torch(kind, norm, x)  # for a root, a tracer makes proxies of all defaults
    summed = residual + F.dropout(x, dropout_p)
    return by_torch(kind, norm, summed), summed


def _is_leaf(tracer: Any, kind: type[nn.Module], module: nn.Module) -> bool:
    """Return True if a tracer records one call of a module of ``kind``, and nothing inside it.

    A module with hooks is recorded from inside: its hooks were recorded already, and would run a second time.
    """
    if not isinstance(tracer, Tracer) or _is_root(tracer, module) or not is_plain(module):
        return False
    twin = kind.__new__(kind)  # tracers know the modules of torch.nn by their class
    object.__setattr__(twin, "__dict__", module.__dict__)
    return tracer.is_leaf_module(twin, tracer.path_of_module(module))


def _is_root(tracer: Any, module: nn.Module) -> bool:
    """Return True if the graph is made of the module itself."""
    return getattr(tracer, "root", None) is module
