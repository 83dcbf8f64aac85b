"""The ops in PyTorch's own operators, for graphs that run without this package: ONNX, ATen.

Each function has the arguments and results of the op with the same name (csrc/ops). Sizes may be symbolic. The formulas
are those of :mod:`transformer_fast.reference`, which most functions call. Dropout, which is for training, is missing.
``_plain_attention.py`` has the functions of attention; they let a NaN in a blocked key reach queries that do not see
the key, as eager PyTorch does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..tracing import refuse_dropout


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm (..., d), the normed sum (empty if x itself was normed), and per row the mean (empty for "rms") and
    factor.

    LayerNorm is PyTorch's own operator, because other runtimes have a kernel for it.
    """
    refuse_dropout("layer_norm", dropout_p)
    summed = x if residual is None else residual + x.to(residual.dtype)
    if kind != "layer" or any(t is not None and t.dtype != summed.dtype for t in (weight, bias)):
        out = reference.norm.layer_norm(summed, weight, bias, eps, kind=kind)
    else:
        out = F.layer_norm(summed, summed.shape[-1:], weight, bias, eps)
    assert isinstance(out, Tensor)
    wide = summed if summed.dtype == torch.float64 else summed.float()
    if kind == "std":
        factor = 1 / (wide.std(-1) + eps)
    else:
        factor = torch.rsqrt((wide.square().mean(-1) if kind == "rms" else wide.var(-1, unbiased=False)) + eps)
    mean = wide.new_empty(0) if kind == "rms" else wide.mean(-1).flatten()
    return out, x.new_empty(0) if residual is None else summed, mean, factor.flatten()


def dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, p: float, seed: Tensor | None
) -> Tensor:
    """Compute ``[residual +] [relu] (x [+ bias])`` (..., d)."""
    refuse_dropout("dropout", p)
    x = x if residual is None else x.to(residual.dtype)
    return reference.dropout.dropout(x, 0.0, None, bias=bias, residual=residual, relu=relu)


def embed(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    scale: float,
    offset: int,
    offsets: Tensor | None,
    padding_idx: int | None,
    dropout_p: float,
    seed: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Compute ``weight[ids] * scale + table[offset : offset + L]`` (..., L, d)."""
    refuse_dropout("embed", dropout_p)
    start = offset if offsets is None else offsets + offset
    return reference.embedding.embed(ids, weight, table, scale=scale, offset=start, padding_idx=padding_idx)


def add_positional(
    x: Tensor, table: Tensor, offset: int, offsets: Tensor | None, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """Compute ``x + table[offset : offset + L]`` (..., L, d)."""
    refuse_dropout("add_positional", dropout_p)
    return reference.embedding.add_positional(x, table, offset if offsets is None else offsets + offset)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    mean: bool,
    gradients: list[bool],
    chunk_elements: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, a scalar; the gradients and their scale, which the op returns too, are empty here."""
    if any(gradients):
        raise RuntimeError(
            "linear_cross_entropy: a graph of plain operators computes the loss, not its gradients; expected inputs "
            "that require no gradients"
        )
    reduction = "mean" if mean else "sum"
    loss = reference.cross_entropy.linear_cross_entropy(
        x, weight, bias, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
    )
    return loss, x.new_empty(0), weight.new_empty(0), weight.new_empty(0), torch.zeros_like(loss)


def linear_cross_entropy_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    chunk_elements: int,
) -> Tensor:
    """Loss per row (rows,)."""
    return reference.cross_entropy.linear_cross_entropy(
        x,
        weight,
        bias,
        target,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="none",
    )
