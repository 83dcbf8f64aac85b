"""``nn.Dropout`` and torch's function of dropout on the fused op."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from .. import backends, extension
from ..function_mode import outside_blocks
from ..ops.dropout import dropout as dropout_op
from ..tensors import takes_fused_ops
from .by_torch import by_torch
from .devices import left_to_torch
from .hooks import is_plain

TORCH = F.dropout  # bound at import, so that torch's function stays reachable if a program patches torch.nn.functional

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop-in replacement of ``torch.nn.functional.dropout`` on the fused op.

    A call that the op does not serve goes to torch: devices other than the CPU (``devices.left_to_torch``), compiled
    and traced calls, ``inplace``, ``p`` of 0 or 1, no elements, integer, complex, sparse and nested tensors,
    subclasses, views with gaps, transforms of ``torch.func``, forward-mode differentiation, a machine without kernels,
    and every invalid call, so that torch raises its own error. The mask differs from torch's; ``torch.manual_seed``
    governs both.
    The backward pass draws the mask again, and cannot be differentiated itself.

    Args:
        input: (...), float32, float16, bfloat16 or float64, of one dimension or more.
        p: probability of dropping an element.
        training: False returns ``input`` itself.
        inplace: write the result into ``input``.

    Returns:
        (...) with the dtype and the strides of torch's result.

    Raises:
        ValueError, TypeError, RuntimeError: torch's own errors, for invalid calls.
    """
    out = None if inplace is not False else fused_dropout(input, p, training)
    return TORCH(input, p, training, inplace) if out is None else out


class Dropout(nn.Dropout):
    """``nn.Dropout`` on the fused op; :func:`dropout` lists the calls that go to torch."""

    @outside_blocks
    def forward(self, input: Tensor) -> Tensor:
        """Drop elements: (...) -> (...), of the same dtype; ``input`` itself in evaluation."""
        if not isinstance(input, Tensor):
            return by_torch(nn.Dropout, self, input)
        return dropout(input, self.p, self.training, self.inplace)


def dropout_of_any(
    x: Tensor, p: float, *, bias: Tensor | None = None, residual: Tensor | None = None, relu: bool = False
) -> Tensor:
    """:func:`transformer_fast.ops.dropout`, or torch's operators for tensors that the op does not take."""
    if takes_fused_ops(x, bias, residual):
        return dropout_op(x, p, bias=bias, residual=residual, relu=relu)
    x = x if bias is None else x + bias
    x = F.dropout(x.relu() if relu else x, p)
    return x if residual is None else residual + x


KINDS = (nn.Dropout, Dropout)
"""Dropout classes that a fused op may compute without calling the module."""


def fused_p(module: nn.Module) -> float | None:
    """Return the probability that a plain dropout module applies now: its ``p`` in training, 0 in evaluation.

    None for a module that must be called: a subclass, a hooked or patched dropout, or a module of another class.
    """
    if not is_plain(module, *KINDS):
        return None
    return module.p if module.training else 0.0


def apply_dropout(drop: nn.Module | float, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """Compute ``[residual +] drop(x)`` for a dropout module or a probability, in one pass if the module is plain."""
    if not isinstance(drop, nn.Module):
        return dropout_of_any(x, drop, residual=residual)
    p = fused_p(drop)
    if p is not None:
        return dropout_of_any(x, p, residual=residual)
    x = drop(x)
    return x if residual is None else residual + x


def fused_dropout(x: Any, p: Any, training: Any) -> Tensor | None:
    """Result of the op, or x itself in evaluation; None for a call that goes to torch."""
    if torch.compiler.is_compiling():
        return None
    if (type(x) is not Tensor and type(x) is not Parameter) or type(p) is not float or not 0.0 < p < 1.0:
        return None
    if training is not True:
        return x if training is False else None
    if x.dtype not in _DTYPES or not takes_fused_ops(x) or x.dim() == 0 or x.numel() == 0:
        return None
    if left_to_torch("dropout", x.device):
        return None
    if backends.current() == "auto" and not extension.load():  # torch's is better than our reference
        return None
    if x.is_contiguous():
        return dropout_op(x, p)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda i: -strides[i])  # torch's result keeps the order of the strides
    inner = x.permute(order)
    if not inner.is_contiguous():
        return None
    return dropout_op(inner, p).permute([order.index(i) for i in range(x.dim())])
