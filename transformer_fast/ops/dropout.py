"""Dropout fused with bias, ReLU and residual addition. The op itself is in csrc/ops/dropout.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from .. import backends, reference
from . import _plain, eager, seeds
from .argument_types import check_flag, check_number
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
    extension, by_triton, seed = eager.fast_path("dropout", x, p)
    if extension is not None:
        result = extension.dropout(by_triton, x, p, bias, residual, relu, seed)
        if result is not None:
            return result
    seed = seeds.as_tensor(seed, x)
    _check(x, p, bias, residual, relu)
    if p == 0.0 and bias is None and residual is None and not relu:
        return x
    if residual is not None and x.dtype != residual.dtype:
        x = x.to(residual.dtype)
    backend = backends.resolve("dropout", x.device, x.dtype)
    if backend == "reference" or (p == 0.0 and bias is None):  # plain PyTorch is one or two passes already
        return reference.dropout.dropout(x, p, seed, bias=bias, residual=residual, relu=relu)
    op = implementation("dropout", backend)
    if relu and residual is not None:
        # The backward takes the sign of ReLU's input from the op's output; a residual would hide the sign.
        return residual + op(x, bias, None, True, p, seed)
    return op(x, bias, residual, relu, p, seed)


def _check(x: Tensor, p: float, bias: Tensor | None, residual: Tensor | None, relu: bool) -> None:
    for name, t in (("x", x), ("bias", bias), ("residual", residual)):
        if t is None and name != "x":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"dropout: {name} must be a tensor, got {type(t).__name__}")
        if not t.is_floating_point():
            raise TypeError(f"dropout: {name} must be a float tensor, got {t.dtype}")
    if x.dim() == 0:
        raise ValueError("dropout: x must be (..., d), got a tensor without dimensions")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"dropout: residual must have the shape of x, got residual {tuple(residual.shape)} and x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(
            f"dropout: bias must be (d,) = ({x.shape[-1]},) for x {tuple(x.shape)}, got {tuple(bias.shape)}"
        )
    for name, t in (("bias", bias), ("residual", residual)):
        if t is not None and t.device != x.device:
            raise ValueError(f"dropout: x is on {x.device} but {name} on {t.device}")
    check_number("dropout", "p", p)
    check_flag("dropout", "relu", relu)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must lie in [0, 1], got {p}")


def _cases(draw: Draw) -> Iterator[Case]:
    x = {"x": draw.normal(77, 100)}
    residual, bias = x | {"residual": draw.normal(77, 100)}, x | {"bias": draw.normal(100)}
    yield Case("dropout", "residual + dropout 0.1", residual, partial(dropout, p=0.1))
    yield Case("dropout", "ReLU, dropout 0.3", x, partial(dropout, p=0.3, relu=True))
    yield Case("dropout", "bias, ReLU, dropout 0.3", bias, partial(dropout, p=0.3, relu=True))


register(Op("dropout", "dropout", "triton", (_plain.dropout,), _cases))
