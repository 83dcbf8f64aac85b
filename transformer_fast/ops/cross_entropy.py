"""Linear layer and label-smoothed cross entropy as one op.

The op of csrc/ops/cross_entropy.cpp computes the mean and the sum of the losses of class targets.
:mod:`._cross_entropy_rows` computes all other cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from . import _cross_entropy_rows as _rows  # the import registers its ops
from . import _plain, eager
from .argument_types import check_int
from .registry import Case, Draw, Op, implementation, register

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Number of logits in memory at a time: on a CPU about the size of the caches, on a GPU enough rows to fill the
device."""

REDUCTIONS = ("none", "mean", "sum")
NO_GRADIENTS = (False, False, False)
"""Gradients that a call of the op requests; autograd requests those that it needs."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias), target, ...)`` without all logits in memory at once.

    The logits are made in chunks of rows, in the dtype of x. Each chunk gives its losses. If a gradient is needed, the
    chunk is then overwritten by the gradient of its logits, which is multiplied into the gradients of x, weight and
    bias at once. With ``class_weight``, with probabilities as targets and with reduction "none", the logits of a chunk
    are float32, and the backward pass makes them again. On one core (2,048 rows of width 256, 16,000 classes, float32,
    class weights and smoothing) that took 1.2 times as long as PyTorch's two functions, and a third of their memory.

    Args:
        x: (..., d) or (d,); float32, float16, bfloat16 (float64 on CPU). Under autocast, x and weight are cast as
            ``F.linear`` would.
        weight: (vocabulary, d) in x's dtype.
        bias: (vocabulary,) or None.
        target: int64 (...), each in [0, vocabulary), or ``ignore_index``. Or the probabilities of all classes, float
            (..., vocabulary), of any float dtype; they may require a gradient.
        class_weight: (vocabulary,) in x's dtype, a factor for the loss of each class; None for 1. The weight of a class
            gets no gradient.
        label_smoothing: mass spread evenly over the vocabulary, in [0, 1].
        ignore_index: positions with this target are left out. With probabilities as targets ``ignore_index`` must be
            negative.
        reduction: "none"; "sum"; or "mean", which divides the sum by the number of positions that count, or by the sum
            of the class weights of their targets (NaN if that sum is 0). With probabilities "mean" divides by the
            number of positions.
        dtype: of the result; None for that of ``F.cross_entropy``.

    Returns:
        A scalar, or (...) for "none". The dtype is that of x; under autocast at least float32; with probabilities the
        wider of the dtypes of x and target. The losses are always computed in float32 (float64 for float64);
        ``dtype=torch.float32`` returns them unrounded.

    Raises:
        TypeError: for non-tensors and for dtypes that do not fit.
        ValueError: for shapes, devices or options that do not fit; the message names them.
        IndexError: on CPU, for a target outside the vocabulary; the message names the target and its place. On a GPU
            the loss is NaN instead, because a check would stall the device.

    Example:
        >>> x, weight = torch.randn(5, 32), torch.randn(100, 32)
        >>> target = torch.tensor([3, 14, 15, 92, -100])  # -100: left out
        >>> loss = tfast.linear_cross_entropy(x, weight, None, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, target), rtol=1e-4)
        True
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"linear_cross_entropy: dtype must be a float dtype, got {dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f'linear_cross_entropy: reduction must be "none", "mean" or "sum", got {reduction!r}')
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    by_class = class_weight is None and not probabilities and reduction != "none"
    if by_class:
        options = label_smoothing, ignore_index, reduction == "mean", NO_GRADIENTS, CHUNK_ELEMENTS["cpu"]
        if not (door := eager.native()):
            eager.check("linear_cross_entropy", x, weight, bias, target, *options)
        elif (loss := door.linear_cross_entropy(False, x, weight, bias, target, *options)) is not None:
            return loss.to(x.dtype if dtype is None else dtype)
    autocast = eager.autocast_enabled(x)
    if not by_class:
        _check(x, weight, bias, target, class_weight, label_smoothing, ignore_index, autocast)
    if dtype is None:
        dtype = _result_dtype(x, target, autocast)
    backend = backends.resolve("linear_cross_entropy", x.device, x.dtype)
    if backend == "reference":
        loss = reference.cross_entropy.linear_cross_entropy(
            x,
            weight,
            bias,
            target,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        return loss.to(dtype)
    chunk_elements = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS["cpu"])
    if by_class:
        op = implementation("linear_cross_entropy", backend)
        options = label_smoothing, ignore_index, reduction == "mean", NO_GRADIENTS, chunk_elements
        return op(x, weight, bias, target, *options)[0].to(dtype)
    shape = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    target = target.reshape(-1, weight.shape[0]) if probabilities else target.reshape(-1)
    if autocast:
        bias = None if bias is None else _rows.autocast(bias)
        rows, weight = _rows.autocast(rows), _rows.autocast(weight)
    op = implementation("linear_cross_entropy_rows", backend)
    # Several float32 tensors of the size of a chunk's logits are in memory at a time.
    losses = op(rows, weight, bias, target, class_weight, float(label_smoothing), ignore_index, chunk_elements // 4)
    if reduction == "none":
        return losses.reshape(shape).to(dtype)
    loss = losses.sum()
    if reduction == "mean":
        loss = loss / _count(losses, target, class_weight, ignore_index)
    return loss.to(dtype)


def _count(losses: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """Divisor of a mean, in the dtype of the losses (rows,)."""
    if target.is_floating_point():
        return torch.ones_like(losses).sum()
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum()
    weights = F.pad(class_weight.detach().to(losses.dtype), (0, 1))  # one more, for a vocabulary of 0
    # A target outside the vocabulary has already made the loss NaN (GPU) or raised (CPU).
    total = weights[target.clamp(0, class_weight.shape[0] - 1)].masked_fill(~counts, 0.0).sum()
    return total.masked_fill(total == 0.0, torch.nan)


def _result_dtype(x: Tensor, target: Tensor, autocast: bool) -> torch.dtype:
    """Dtype of the result of ``F.cross_entropy``."""
    dtype = torch.promote_types(x.dtype, torch.float32) if autocast else x.dtype
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    autocast: bool,
) -> None:
    """Raise unless a call of the op of rows is valid: by the op's own check, and for what the op does not know."""
    name = "linear_cross_entropy"
    check_int(name, "ignore_index", ignore_index)
    _rows.check(name, x, weight, bias, target, class_weight, label_smoothing, any_dtype=autocast)
    if target.is_floating_point() and ignore_index >= 0:
        raise ValueError(
            f"{name}: targets that are probabilities have no ignore_index; expected a negative one, got {ignore_index}"
        )
    if class_weight is None:
        return
    if class_weight.dtype != x.dtype and not autocast:
        raise TypeError(f"{name}: class_weight must have the dtype of x, {x.dtype}, got {class_weight.dtype}")
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: class_weight has no gradient: expected class_weight.detach()")


def wide_loss(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """``linear_cross_entropy`` before it is rounded to a 16-bit dtype."""
    return linear_cross_entropy(x, *args, **options, dtype=torch.promote_types(x.dtype, torch.float32))


def _cases(draw: Draw) -> Iterator[Case]:
    linear = {"x": draw.normal(70, 40), "weight": draw.normal(50, 40), "bias": draw.normal(50)}
    loss = partial(wide_loss, target=draw.integers(0, 50, 70), label_smoothing=0.1, ignore_index=3)
    yield Case("cross_entropy", "linear layer, label smoothing 0.1", linear, loss)


_PLAIN = _plain.linear_cross_entropy, _plain.linear_cross_entropy_rows
register(Op("linear_cross_entropy", "cross_entropy", "triton", _PLAIN, _cases))
