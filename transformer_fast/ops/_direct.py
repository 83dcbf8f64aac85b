"""The short way to an op's implementation.

Going through PyTorch's dispatcher costs a Python op some 10 microseconds a call, as much as the kernel itself on a
small tensor. Its services - tracing, subclasses, modes - are only needed where somebody uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _library


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing watches the dispatcher: no compilation, no mode, no tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or type(t) is Tensor or type(t) is Parameter for t in tensors)


def run(op: Any, implementation: Callable[..., Any], tensors: int, *args: Any) -> Any:
    """What ``op(*args)`` computes, without autograd; ``args`` starts with ``tensors`` optional tensors."""
    if is_plain(*args[:tensors]):
        return implementation(*args)
    with _library.below_autograd():
        return op(*args)
