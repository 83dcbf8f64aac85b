"""Calls that torch.export records for ONNX, whose graphs run without this package: ops are recorded in them as plain
PyTorch operators. torch.jit.trace is refused: it records sizes as tensors, and what is decided by a size as a constant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

is_traced = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Return True if torch.jit.trace records a call."""


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as ``torch.compiler.assume_constant_result`` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def needs_plain_ops() -> bool:
    """Return True if a call is recorded into a graph that may hold only PyTorch's own operators."""
    return torch.compiler.is_compiling() and _goes_to_onnx()


@constant_when_compiled
def _goes_to_onnx() -> bool:
    onnx = sys.modules.get("torch.onnx")  # the import is slow, and every export has imported the module already
    return onnx is not None and onnx.is_in_onnx_export()


def refuse_torchscript(function: str) -> None:
    """Raise RuntimeError if torch.jit.trace records the call of a public function."""
    if is_traced():
        raise RuntimeError(
            f"{function}: torch.jit.trace, and torch.onnx.export(..., dynamo=False), which uses it, cannot record the "
            "fused ops; expected torch.export.export or torch.onnx.export(..., dynamo=True)"
        )


def refuse_dropout(op: str, p: float) -> None:
    """Raise for dropout in a graph of plain operators, because such a graph is not for training."""
    if p > 0.0:
        raise RuntimeError(
            f"{op}: ONNX and decompositions() cannot write dropout into a graph, but its probability is {p}; call "
            "model.eval() first, or set the probability to 0"
        )
