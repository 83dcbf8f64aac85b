"""``register_flash_attention_impl``: register our CPU kernels with torch as a flash-attention implementation.

torch's registry keeps functions by name (``torch.nn.attention.register_flash_attention_impl``). An activated
implementation registers its kernels for ATen operators, so that unchanged code that calls
``F.scaled_dot_product_attention`` runs them. On a CPU these are one operator and its gradient. The GPU operators are
not changed.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from .. import extension
from ..attention_params import AttentionParams
from ..backends import BackendError

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


def register_flash_attention_impl(name: str = "transformer_fast") -> None:
    """Register the C++ kernels with torch as a flash implementation for CPUs; activation is a separate step.

    ``torch.nn.attention.activate_flash_attention_impl(name)`` redirects every call of
    ``F.scaled_dot_product_attention`` in the process for which torch would run its own CPU flash kernel: four
    dimensions, one head_dim, no dropout. ``torch.nn.attention.restore_flash_attention_impl()`` undoes the redirection.
    Results differ from torch's by rounding. Kernels on a GPU are not replaced.

    Args:
        name: the name in torch's registry.

    Raises:
        BackendError: if the extension cannot be loaded; the message says what to run.
    """
    if not extension.load():
        raise BackendError(f"register_flash_attention_impl: {extension.obstacle()}")
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_Activated)


class _Activated:
    """Handle of the active registration, held by torch; removing it restores torch's kernels."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self.library.impl(_FORWARD, _forward, "CPU")
            self.library.impl(f"{_FORWARD}_backward", _backward, "CPU")

    def remove(self) -> None:
        self.library = None  # restores torch's kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Lq, D) and logsumexp (B, H, Lq), in the strides of torch's kernel: compiled code relies on them."""
    options = _options(query, dropout_p, is_causal, attn_mask, scale)
    out, logsumexp, _ = torch.ops.transformer_fast.attention(*map(_dense, (query, key, value)), **options)
    promised = torch.empty_like(query, device="meta")
    if out.stride() != promised.stride():
        out = torch.empty_like(query).copy_(out)
    return out, _length_first(logsumexp)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in the strides of torch's kernel."""
    options = _options(query, dropout_p, is_causal, attn_mask, scale)
    tensors = map(_dense, (grad_out, query, key, value, out, logsumexp))
    needs = [True, True, True, False, False, False]
    grad_q, grad_k, grad_v, *_ = torch.ops.transformer_fast.attention_backward(*tensors, None, None, needs, **options)
    return _length_first(grad_q), _length_first(grad_k), _length_first(grad_v)


def _options(q: Tensor, dropout_p: float, is_causal: bool, mask: Tensor | None, scale: float | None) -> dict[str, Any]:
    """Arguments of our operator. torch's function has already checked the call and converted a bool mask to float."""
    if dropout_p != 0.0:
        raise NotImplementedError(f"{_FORWARD}: dropout is not supported, got dropout_p={dropout_p}")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        keep, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
    else:
        keep = bias = None
    params = AttentionParams(
        keep=keep,
        bias=bias,
        causal=0 if is_causal else None,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        zero_empty_rows=True,
    )
    return params.keywords()


def _length_first(t: Tensor) -> Tensor:
    """The tensor (B, H, L, ...), stored as (B, L, H, ...)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
