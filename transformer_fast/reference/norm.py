"""The norms of Transformers, in plain PyTorch, each with an optional residual and dropout before it."""

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
    kind: str = "layer",
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension.

    ``kind="layer"`` is LayerNorm (Ba, Kiros and Hinton, 2016): ``(x - mean) / sqrt(var + eps) * weight + bias`` with
    the biased variance. ``kind="std"`` is the Norm of the classic Transformer texts:
    ``weight * (x - mean) / (std + eps) + bias`` with the unbiased standard deviation and eps outside the root.
    ``kind="rms"`` is RMSNorm (Zhang and Sennrich, 2019): ``x / sqrt(mean(x * x) + eps) * weight``; 16-bit rows are
    normed in float32, as in every model with RMSNorm, because squares in float16 overflow above 65504.

    Args:
        x: (..., d), any float dtype.
        weight, bias: (d,) or None; ``kind="rms"`` has no bias.
        residual: (..., d). When given, ``residual + dropout(x)`` is normed.
        dropout_p, seed: elementwise dropout of ``x``.

    Returns:
        The norm; with ``residual`` the pair (norm, ``residual + dropout(x)``).
    """
    summed = x if residual is None else dropout(x, dropout_p, seed, residual=residual)
    if kind == "rms":
        wide = summed.float() if summed.dtype in (torch.float16, torch.bfloat16) else summed
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    else:
        mean = summed.mean(-1, keepdim=True)
        if kind == "std":
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
