"""Attention with masks and dropout, forward and backward, by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_params import AttentionParams
from .triton.attention.backward import attention_backward
from .triton.attention.forward import attention_forward

__all__ = ["attention"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        out, logsumexp, kept_bits = attention_forward(q, k, v, params, training=any(ctx.needs_input_grad))
        ctx.params = params
        ctx.save_for_backward(q, k, v, out, logsumexp, kept_bits)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kept_bits = ctx.saved_tensors
        return *attention_backward(grad_out, *tensors, ctx.params, None, kept_bits), None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Attention ``dropout(softmax(scale q k^T + mask)) v`` of every head.

    Args:
        q: (B, H, Lq, D), fp32, fp16 or bf16; D up to 256.
        k, v: (B, Hkv, Lk, D) of q's dtype and device; Hkv divides H.
        keep: bool, broadcastable to (B, H, Lq, Lk); True: the query sees the key.
        lengths: integers (B,), how many keys each batch has.
        causal: query i sees keys 0 to i.
        scale: ``D ** -0.5`` by default.
        dropout_p: part of the weights that is dropped.
        seed: of the dropout; by default one number of torch's generator for the CPU.

    Returns:
        (B, H, Lq, D) of q's dtype; 0 for a query without keys.

    Raises:
        ValueError: shapes, types or numbers that the kernels do not take.
    """
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        shapes = ", ".join(str([*t.shape]) for t in (q, k, v))
        raise ValueError(f"attention: expected q (B, H, Lq, D), k and v (B, Hkv, Lk, D), got {shapes}")
    if q.shape[1] % k.shape[1] or not 1 <= q.shape[3] <= 256:
        raise ValueError(f"attention: expected Hkv to divide H and 1 <= D <= 256, got {[*q.shape]} and {[*k.shape]}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: expected one of fp32, fp16 and bf16, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"attention: expected 0 <= dropout_p < 1, got {dropout_p}")
    if keep is not None and keep.dtype != torch.bool:
        raise ValueError(f"attention: expected a bool keep, got {keep.dtype}")
    if dropout_p > 0 and seed is None:
        seed = int(torch.randint(2**62, ()))
    params = AttentionParams(
        keep=keep,
        lengths=None if lengths is None else lengths.to(torch.int32),
        causal=0 if causal else None,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        seed=seed if dropout_p > 0 else None,
        zero_empty_rows=True,
    )
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _Attention.apply(q, k, v, params)
