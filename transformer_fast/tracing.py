"""Calls recorded into a graph that runs later: by torch.compile, torch.export or torch.jit.trace.

Graphs of torch.jit.trace and for ONNX may run outside PyTorch or without this package. So ops are recorded in them as
plain PyTorch operators. torch.jit.trace also records sizes, as tensors; comparing two sizes then gives a warning and a
constant in the graph.

Callers check in place if a call is recorded: ``torch.compiler.is_compiling() or is_traced()``. A helper function would
be wrong: after a graph break torch.compile compiles the helper alone, and it returns True to eager code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

is_traced = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Return True if torch.jit.trace, or the ONNX exporter that uses it, records a call."""


def needs_plain_ops() -> bool:
    """Return True if a call is recorded into a graph that may hold only PyTorch's own operators."""
    return is_traced() or (torch.compiler.is_compiling() and _goes_to_onnx())


def _goes_to_onnx() -> bool:
    onnx = sys.modules.get("torch.onnx")  # the import is slow, and every export has imported the module already
    return onnx is not None and onnx.is_in_onnx_export()


# As torch.compiler.assume_constant_result does, without importing the compiler.
_goes_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """Hide a function from torch.jit.trace: inside the function sizes are ints and may be compared."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_traced():
            return function(*args, **kwargs)
        state = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_tracing_state(state)

    return call


def sizes(t: Tensor) -> torch.Size:
    """Shape of a tensor as ints, also under torch.jit.trace; the sizes become constants of the graph.

    For sizes that a graph may fix, such as a width, and for checks.
    """
    return _fixed_shape(t) if is_traced() else t.shape


@unrecorded
def _fixed_shape(t: Tensor) -> torch.Size:
    return t.shape


def is_recorded_size(n: object) -> TypeGuard[int]:
    """Return True for a size, or an int computed from sizes, that torch.jit.trace has recorded as a tensor."""
    return isinstance(n, Tensor) and n.dim() == 0 and n.dtype == torch.int64 and is_traced()


def least(a: int, b: int) -> int:
    """Smaller of two ints, which torch.jit.trace may have recorded as tensors; it then records the choice too."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.where(a < b, a, b)
    return min(a, b)  # without a guard on a symbolic size in a compiled graph


def greatest(a: int, b: int) -> int:
    """Greater of two ints; see :func:`least`."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.where(a > b, a, b)
    return max(a, b)


def number(n: int | Tensor) -> int:
    """Convert a size that torch.jit.trace may have recorded to an int, for checks."""
    return _fixed_number(n) if isinstance(n, Tensor) else n


@unrecorded
def _fixed_number(n: Tensor) -> int:
    return int(n)


def refuse_dropout(op: str, p: float) -> None:
    """Raise for dropout in a graph of plain operators, because such a graph is not for training."""
    if p > 0.0:
        raise RuntimeError(
            f"{op}: torch.jit.trace, ONNX and decompositions() cannot write dropout into a graph, but its probability "
            f"is {p}; call model.eval() first, or set the probability to 0"
        )
