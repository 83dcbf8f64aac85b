"""The two norms of the Transformer, in plain PyTorch, each with an optional residual and dropout before it."""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import dropout


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    std: bool = False,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension.

    ``std=False`` is LayerNorm (Ba, Kiros and Hinton, 2016): ``(x - mean) / sqrt(var + eps) * weight + bias`` with the
    biased variance. ``std=True`` is the Norm of the classic Transformer texts:
    ``weight * (x - mean) / (std + eps) + bias`` with the unbiased standard deviation and eps outside the root.

    Args:
        x: (..., d), any float dtype.
        weight, bias: (d,) or None.
        residual: (..., d). When given, ``residual + dropout(x)`` is normed.
        dropout_p, seed: elementwise dropout of ``x``.

    Returns:
        The norm; with ``residual`` the pair (norm, ``residual + dropout(x)``).
    """
    summed = x if residual is None else dropout(x, dropout_p, seed, residual=residual)
    mean = summed.mean(-1, keepdim=True)
    if std:
        scale = 1 / (summed.std(-1, keepdim=True) + eps)
    else:
        scale = torch.rsqrt(summed.var(-1, keepdim=True, unbiased=False) + eps)
    out = (summed - mean) * scale
    if weight is not None:
        out = weight * out
    if bias is not None:
        out = out + bias
    out = out.to(summed.dtype)
    return out if residual is None else (out, summed)
