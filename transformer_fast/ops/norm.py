"""LayerNorm, Norm and RMSNorm, alone or of residual + dropout(x). The op itself is in csrc/ops/norm.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Never, overload

import torch
from torch import Tensor

from .. import backends, reference
from . import _plain, eager, seeds
from .registry import Case, Draw, Op, implementation, register
from .unknown_names import unknown_names

_SHAPE = (int, tuple, list)


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None = 1e-5, *, kind: str = "layer",
    residual: None = None, dropout_p: float = 0.0,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None = 1e-5, *, kind: str = "layer",
    residual: Tensor, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None = 1e-5, *, kind: str = "layer",
    residual: Tensor | None, dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None = 1e-5,
    *,
    kind: str = "layer",
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension, in one pass together with the residual and the dropout before it.

    ``kind="layer"`` is LayerNorm (Ba, Kiros and Hinton, "Layer Normalization", 2016):
    ``weight * (x - mean) / sqrt(var + eps) + bias`` with the biased variance. ``kind="std"`` is the Norm of the
    classic Transformer texts: ``weight * (x - mean) / (std + eps) + bias`` with the unbiased standard deviation and
    eps outside the root. A constant row gives ``bias``, and finite gradients. ``kind="rms"`` is RMSNorm (Zhang and
    Sennrich, "Root Mean Square Layer Normalization", 2019): ``x / sqrt(mean(x * x) + eps) * weight``, without a bias.

    In 16-bit types every kind computes in float32 and rounds once, at the end, as ``torch.nn.RMSNorm`` does. The
    RMSNorm code of Llama and T5 rounds ``x / sqrt(...)`` before the product with a 16-bit weight, and rounds the
    product again. The result of that code differs by up to two units in the last place, and is less exact.

    Args:
        x: (..., d); float32, float16, bfloat16 (float64 on CPU). The statistics are float32 (float64 for float64).
        weight, bias: (d,) or None, any float dtype: float32 weights go with 16-bit activations. "rms" has no bias.
        eps: added to the variance ("layer"), to the standard deviation ("std") or to the mean of the squares ("rms").
            None is the machine epsilon of the statistics' dtype, as in ``torch.nn.RMSNorm``.
        residual: (..., d), the shape of ``x``. When given, ``residual + dropout(x)`` is normed, in the dtype of
            ``residual``.
        dropout_p: probability of dropping an element of ``x`` before it is added to ``residual``; kept ones are
            scaled by ``1 / (1 - p)``. ``torch.manual_seed`` governs the draws. Every backend draws the same mask.

    Returns:
        The norm (..., d) in the dtype of ``x``; with ``residual`` the pair (norm, ``residual + dropout(x)``) in the
        dtype of ``residual``. Autocast changes neither dtype: 16-bit rows are already accumulated in float32.

    Raises:
        TypeError: for non-tensors and non-float dtypes.
        ValueError: for shapes, devices or options that do not fit; the message names them.

    Example:
        >>> x, residual = torch.randn(2, 2, 5, 32)
        >>> weight, bias = torch.ones(32), torch.zeros(32)
        >>> normed, total = tfast.layer_norm(x, weight, bias, residual=residual, dropout_p=0.1)
        >>> normed.shape, total.shape
        (torch.Size([2, 5, 32]), torch.Size([2, 5, 32]))
    """
    if unknown:
        raise unknown_names(layer_norm, unknown)
    rows = x if residual is None else residual
    if eps is None:
        eps = machine_epsilon(rows)
    door, by_triton, seed = eager.fast_path("layer_norm", rows, dropout_p)
    if door is not None:
        try:
            result = door.layer_norm(by_triton, x, residual, weight, bias, eps, kind, dropout_p, seed)
        except TypeError as error:
            if isinstance(weight, _SHAPE):
                raise TypeError(f"{error}; unlike torch's, this layer_norm takes no normalized_shape") from None
            raise
        if result is not None:
            return result
    else:
        eager.check("layer_norm", x, residual, weight, bias, eps, kind, dropout_p, seed)
    seed = seeds.on_device_of(rows, seed)
    backend = backends.resolve("layer_norm", rows.device, rows.dtype)
    if backend == "reference":
        return reference.norm.layer_norm(
            x.to(rows.dtype), weight, bias, eps, kind=kind, residual=residual, dropout_p=dropout_p, seed=seed
        )
    op = implementation("layer_norm", backend)
    out, summed, _, _ = op(x, residual, weight, bias, eps, kind, dropout_p, seed)
    return out if residual is None else (out, summed)


def eager_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, kind: str, residual: Tensor | None
) -> Any:
    """Compute :func:`layer_norm` without dropout, for a valid call of plain CPU tensors in eager mode; None for any
    other call, so that PyTorch's own module raises its own errors."""
    if not (door := eager.native()):
        return None
    if eps is None:
        eps = machine_epsilon(x if residual is None else residual)
    try:
        return door.layer_norm(False, x, residual, weight, bias, eps, kind, 0.0, None)
    except (TypeError, ValueError):
        return None


def machine_epsilon(rows: Any) -> float:
    return 2.0**-52 if getattr(rows, "dtype", None) == torch.float64 else 2.0**-23


def _cases(draw: Draw) -> Iterator[Case]:
    plain = {"x": draw.normal(61, 3, 100, shift=2.0), "weight": draw.normal(100, shift=1.0), "bias": draw.normal(100)}
    added = plain | {"residual": draw.normal(61, 3, 100)}
    for kind, eps, name in (("layer", 1e-5, "LayerNorm"), ("std", 1e-6, "Norm (std)")):
        norm = partial(layer_norm, eps=eps, kind=kind)
        yield Case("layer_norm", name, plain, norm)
        yield Case("layer_norm", f"{name}, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))
    plain, added = ({name: t for name, t in inputs.items() if name != "bias"} for inputs in (plain, added))
    norm = partial(layer_norm, bias=None, eps=1e-6, kind="rms")
    yield Case("layer_norm", "RMSNorm", plain, norm)
    yield Case("layer_norm", "RMSNorm, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))


register(Op("layer_norm", "norm", "triton", (_plain.layer_norm,), _cases))
