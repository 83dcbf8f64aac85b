"""Linear layer and label-smoothed cross entropy as one op. The op itself is in csrc/ops/cross_entropy.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, reference
from ..tracing import unrecorded
from . import _eager
from ._plain import implementation

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits that exist at a time: on a CPU not far from what its caches hold, on a GPU enough rows to fill it."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias), target, ...)`` without ever holding all logits, nor any in float32.

    The logits are made in chunks of rows; each chunk gives its losses and, where a gradient will be needed, is turned
    into its own gradient in place and multiplied into those of x, weight and bias at once.

    Args:
        x: (..., d); float32, float16, bfloat16 (float64 on CPU). Under autocast, x and weight are cast as
            ``F.linear`` would.
        weight: (vocabulary, d) in x's dtype.
        bias: (vocabulary,) or None.
        target: int64 (...), each in [0, vocabulary), or ``ignore_index``.
        label_smoothing: mass spread evenly over the vocabulary, in [0, 1].
        ignore_index: positions with this target count nowhere.
        reduction: "mean" over the positions that count (NaN if none does) or "sum".

    Returns:
        A scalar in float32 (float64 for float64).

    Raises:
        TypeError: for non-tensors and for dtypes that do not fit.
        ValueError: for shapes, devices or options that do not fit; the message names them.
        IndexError: on CPU, for a target outside the vocabulary; names it and its place. On a GPU, where looking would
            stall it, the loss is NaN.
    """
    if direct := _eager.native():
        args = x, weight, bias, target, label_smoothing, ignore_index, reduction, CHUNK_ELEMENTS["cpu"]
        if (loss := direct.linear_cross_entropy(*args)) is not None:
            return loss
    autocast = _eager.autocast_enabled(x)
    _check(x, weight, bias, target, label_smoothing, reduction, autocast)
    backend = backends.resolve("cross_entropy", x.device, x.dtype)
    if backend == "reference":
        return reference.cross_entropy.linear_cross_entropy(
            x, weight, bias, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
        )
    options = float(label_smoothing), ignore_index, reduction == "mean"
    no_gradients = [False] * 3  # autograd asks for those that it needs
    op = implementation("linear_cross_entropy", backend)
    rows, target = x.flatten(0, -2), target.flatten()
    return op(rows, weight, bias, target, *options, no_gradients, CHUNK_ELEMENTS[x.device.type], backend)[0]


@unrecorded
def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    reduction: str,
    autocast: bool,
) -> None:
    for name, t in (("x", x), ("weight", weight), ("bias", bias), ("target", target)):
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"linear_cross_entropy: {name} must be a tensor, got {type(t).__name__}")
        if t.device != x.device:
            raise ValueError(f"linear_cross_entropy: x is on {x.device} but {name} on {t.device}")
        if name == "target":
            if t.dtype != torch.int64:
                raise TypeError(f"linear_cross_entropy: target must be int64, got {t.dtype}")
        elif not t.is_floating_point():
            raise TypeError(f"linear_cross_entropy: {name} must be a float tensor, got {t.dtype}")
        elif t.dtype != x.dtype and not autocast:
            raise TypeError(f"linear_cross_entropy: {name} must have the dtype of x, {x.dtype}, got {t.dtype}")
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: expected x (..., d) with at least one leading dimension and weight (vocabulary, d), "
            f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: target must be {tuple(x.shape[:-1])} for x {tuple(x.shape)}, got "
            f"{tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias must be (vocabulary,) = ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"linear_cross_entropy: label_smoothing must lie in [0, 1], got {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'linear_cross_entropy: reduction must be "mean" or "sum", got {reduction!r}')
