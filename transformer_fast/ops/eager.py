"""Eager fast path to an op.

A call of PyTorch's dispatcher from Python takes some microseconds: on a small tensor, longer than the kernel. The
dispatcher is only needed for tracing, tensor subclasses and modes. So a public function first passes the whole call to
the door of its op (csrc/ops/op.h), which raises for a wrong call and returns None for one that needs the dispatcher.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import backends, extension
from . import seeds

_TRITON_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def native() -> Any | None:
    """The extension if it may take a whole call; None if a call is being compiled or another backend was requested.
    The extension's doors return None for tensors that are not plain CPU tensors."""
    if torch.compiler.is_compiling() or backends.current() not in ("auto", "native"):
        return None
    return extension.module()


def fast_path(
    function: str, x: Any, dropout_p: float = 0.0, plain: bool = True
) -> tuple[Any | None, bool, Tensor | None]:
    """Begin a call of a public function.

    Args:
        function: its name.
        x: the argument whose device and dtype choose the kernels.
        plain: False if the call has parts that the extension's function does not take.

    Returns:
        The extension if it may take the whole call, else None; True if Triton kernels compute the op; and the seed of
        the call's dropout, None without dropout.

    Raises:
        TypeError: if x is no tensor, where no door can say so.
    """
    if not isinstance(x, Tensor):  # the door says what was expected
        door = None if torch.compiler.is_compiling() else extension.module()
        if door is None:
            require_tensor(function, x)
        return None if backends.current() == "reference" else door, False, None
    taken, by_triton = None, False
    if plain and not torch.compiler.is_compiling():
        requested = backends.current()
        by_triton = not (x.is_cpu and requested != "triton") and _runs_on_triton(requested, function, x.device, x.dtype)
        if by_triton or requested in ("auto", "native"):
            taken = extension.module()
    return taken, by_triton, seeds.draw_launch_seed(x.device) if dropout_p != 0.0 else None


def require_tensor(function: str, x: Any) -> None:
    """Raise TypeError for an argument that is neither a tensor nor stands for one, where no door can say so."""
    if not isinstance(x, Tensor) and not hasattr(type(x), "__torch_function__"):
        raise TypeError(f"{function}: expected a tensor, got {type(x).__name__}")


def check(op: str, *arguments: Any) -> None:
    """Raise for a wrong call of an op that the reference will compute, by the op's own check.

    Calls that a graph, a mode or a transform observes are not checked. Without the extension nothing is: the
    reference's own errors are all there are.

    Args:
        op: its name.
        arguments: those of its schema, all of them, by position.
    """
    if not torch.compiler.is_compiling() and (module := extension.module()) is not None:
        getattr(module, f"{op}_check")(False, *arguments)


@functools.cache
def _runs_on_triton(requested: str, function: str, device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in _TRITON_TYPES or not (device.type == "cuda" or requested == "triton"):
        return False
    return backends.resolve(function, device, dtype) == "triton"


def autocast_enabled(t: Any) -> bool:
    """Return True if autocast is on for a tensor's device; False on the meta device, which has no autocast."""
    return isinstance(t, Tensor) and not t.is_meta and torch.is_autocast_enabled(t.device.type)
