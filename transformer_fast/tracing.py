"""Calls recorded into a graph that runs later: by torch.compile, torch.export or torch.jit.trace.

A graph of torch.jit.trace and one for ONNX leave PyTorch, or run where this package is not installed: ops are written
into them as plain PyTorch. torch.jit.trace records sizes too, as tensors; a comparison of two is then a warning and a
constant of the graph.

Whether anything at all records a call is asked in place: ``torch.compiler.is_compiling() or is_traced()``. A function
that asks it would be compiled by itself where torch.compile breaks a graph, and say yes to the eager code there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

is_traced = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Whether torch.jit.trace records a call, or the ONNX exporter that uses it."""


def needs_plain_ops() -> bool:
    """Return True if a call becomes part of a graph in which only PyTorch's own operators may be."""
    return is_traced() or (torch.compiler.is_compiling() and _goes_to_onnx())


def _goes_to_onnx() -> bool:
    onnx = sys.modules.get("torch.onnx")  # importing it takes a while, and nobody exports without it
    return onnx is not None and onnx.is_in_onnx_export()


# As torch.compiler.assume_constant_result, which would import the whole compiler to set this one mark.
_goes_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """A function of which torch.jit.trace records nothing: sizes are numbers in it, and may be compared."""

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
    """``t.shape``, in numbers also while torch.jit.trace runs: what of it is computed with is a constant of the graph.

    For what a graph may hold fixed, such as a width, and for checks.
    """
    return _fixed_shape(t) if is_traced() else t.shape


@unrecorded
def _fixed_shape(t: Tensor) -> torch.Size:
    return t.shape


@unrecorded
def number(n: int) -> int:
    """A size that torch.jit.trace may have recorded, for checks."""
    return int(n) if isinstance(n, Tensor) else n


def refuse_dropout(op: str, p: float) -> None:
    """Raise for an op with dropout in a graph of plain operators, which is not for training."""
    if p > 0.0:
        raise RuntimeError(
            f"{op}: torch.jit.trace, ONNX and decompositions() write no dropout into a graph, and here it is {p}: call "
            "model.eval() before, or set the probability to 0"
        )
