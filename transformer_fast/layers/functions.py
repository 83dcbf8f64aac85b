"""Functions of ``torch.nn.functional`` on the fused ops, for :func:`transformer_fast.functional`.

Each has torch's arguments, and returns None for a call that stays torch's: one that the ops do not serve, that torch
computes faster, or that torch refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, ops
from ..function_mode import OURS
from ..ops import eager
from ..ops.norm import eager_layer_norm
from ..ops.scaled_dot_product_attention import fused_attention
from ..tensors import takes_fused_ops
from .devices import attends_by_torch, left_to_torch
from .dropout import fused_dropout

FEW_CLASSES = 256
"""Number of classes from which our cross entropy is faster than torch's."""
_NARROW = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_NARROW, torch.float64)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention; on a GPU a call with neither mask nor dropout is torch's."""
    if not isinstance(query, Tensor) or left_to_torch("attention", query.device):
        return None
    if attends_by_torch(query, attn_mask, None, dropout_p):
        return None
    return fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    """Dropout; on a GPU torch's."""
    return fused_dropout(input, p, training) if inplace is False else None


def builtin_dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """``torch.dropout``; on a GPU torch's."""
    return fused_dropout(input, p, train)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | None:
    """LayerNorm of the last dimension."""
    return _norm(input, normalized_shape, weight, bias, eps, "layer")


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    """RMSNorm of the last dimension."""
    return _norm(input, normalized_shape, weight, None, eps, "rms")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Mean or sum of the losses of logits (N, C), C of at least :data:`FEW_CLASSES`, with targets (N,) int64, on a CPU,
    in eager mode without autocast."""
    given = weight, size_average, reduce
    if any(option is not None for option in given) or not isinstance(input, Tensor) or input.dim() != 2:
        return None
    if input.shape[1] < FEW_CLASSES or reduction not in ("mean", "sum") or not (door := eager.native()):
        return None
    try:
        loss = door.cross_entropy(False, input, target, label_smoothing, ignore_index, reduction == "mean")
    except (TypeError, ValueError):  # PyTorch raises its own error
        return None
    return None if loss is None else loss.to(input.dtype)


def _norm(
    x: Any, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float | None, kind: str
) -> Tensor | None:
    if not isinstance(x, Tensor) or not isinstance(shape, tuple | list):
        return None
    if len(shape) != 1 or shape[0] == 0 or not (isinstance(eps, float | int) or (eps is None and kind == "rms")):
        return None
    if x.shape[-1:] != tuple(shape) or not _are_parameters(x, weight, bias):
        return None
    out = eager_layer_norm(x, weight, bias, eps, kind, None)
    if out is not None or not takes_fused_ops(x, weight, bias) or x.dtype not in _FLOATS:
        return out
    if left_to_torch("norm", x.device):
        return None
    if backends.current() == "auto" and backends.choose("norm", x.device, x.dtype)[0] == "reference":
        return None  # torch's is better than our reference
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    return ops.layer_norm(x, weight, bias, eps, kind=kind)


def _are_parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return True if torch takes these parameters for a norm of x: of its device and dtype, or float32 with 16-bit rows
    on a CPU."""
    parameters = [t for t in (weight, bias) if t is not None]
    if any(not isinstance(t, Tensor) or t.shape != x.shape[-1:] or t.device != x.device for t in parameters):
        return False
    dtypes = {t.dtype for t in parameters}
    return dtypes <= {x.dtype} or (dtypes == {torch.float32} and x.dtype in _NARROW and x.device.type == "cpu")


OURS.update({
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.dropout: dropout,
    torch.dropout: builtin_dropout,
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.cross_entropy: cross_entropy,
})  # fmt: skip
