"""Dropout fused with bias, ReLU and residual addition. The op itself is in csrc/ops/dropout.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from .. import backends, reference
from . import _plain, eager, seeds
from .registry import Case, Draw, Op, implementation, register


def dropout(
    x: Tensor, p: float, *, bias: Tensor | None = None, residual: Tensor | None = None, relu: bool = False
) -> Tensor:
    """``[residual +] dropout([relu] (x [+ bias]))`` in one pass, with no mask stored for the backward.

    The mask is a pure function of a seed, drawn from torch's generator, and of each element's position (Philox 4x32-10;
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The backward pass draws the mask again.

    Args:
        x: (..., d); float32, float16, bfloat16 (float64 on CPU).
        p: probability of dropping an element, in [0, 1]; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs the draws. Every backend draws the same mask.
        bias: (d,), any float dtype, added first, such as the bias of the linear layer before. The backward pass sums
            the gradient of the bias in float32 and in a fixed order.
        residual: shape of ``x``, added last; the result then has the dtype of ``residual``.
        relu: apply ReLU to ``x`` (with its bias) first.

    Returns:
        (..., d), contiguous; ``x`` itself if there is nothing to do.

    Raises:
        TypeError: for non-tensors and non-float dtypes.
        ValueError: for shapes, devices or a ``p`` that do not fit; the message names them.
    """
    rows = x if residual is None else residual
    door, by_triton, seed = eager.fast_path("dropout", rows, p)
    if door is not None:
        result = door.dropout(by_triton, x, bias, residual, relu, p, seed)
        if result is not None:
            return result
    else:
        eager.check("dropout", x, bias, residual, relu, p, seed)
    if p == 0.0 and bias is None and residual is None and not relu:
        return x
    seed = seeds.on_device_of(rows, seed)
    backend = backends.resolve("dropout", rows.device, rows.dtype)
    if backend == "reference" or (p == 0.0 and bias is None):  # plain PyTorch is one or two passes already
        return reference.dropout.dropout(x.to(rows.dtype), p, seed, bias=bias, residual=residual, relu=relu)
    return implementation("dropout", backend)(x, bias, residual, relu, p, seed)


def _cases(draw: Draw) -> Iterator[Case]:
    x = {"x": draw.normal(77, 100)}
    residual, bias = x | {"residual": draw.normal(77, 100)}, x | {"bias": draw.normal(100)}
    yield Case("dropout", "residual + dropout 0.1", residual, partial(dropout, p=0.1))
    yield Case("dropout", "ReLU, dropout 0.3", x, partial(dropout, p=0.3, relu=True))
    yield Case("dropout", "bias, ReLU, dropout 0.3", bias, partial(dropout, p=0.3, relu=True))


register(Op("dropout", "dropout", "triton", (_plain.dropout,), _cases))
