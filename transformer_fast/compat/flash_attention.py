"""Functions of flash-attention 2 for padded batches: ``flash_attn_func`` and its packed forms."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from ..ops.attention import attention
from .bounds import bounds_of, check_dimensions, mask_of, softcap_of, with_logsumexp
from .flash_names import no_dropout_p, unknown_flash_names

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> Result:
    """``flash_attn_func`` of flash-attention 2 (Dao, "FlashAttention-2", 2023) by :func:`transformer_fast.attention`.

    The own key of query i is ``i + Lk - Lq``: causal, window and ALiBi are aligned bottom-right.

    Args:
        q: (B, Lq, H, D); float32, float16, bfloat16 (float64 on CPU). D up to 256 on a GPU.
        k, v: (B, Lk, Hkv, D), with ``H % Hkv == 0``.
        dropout_p: probability of dropping a weight, in evaluation too: pass 0.0 there. ``torch.manual_seed`` governs
            the mask, which differs from flash-attention's.
        softmax_scale: multiplies ``q k^T``; ``1 / sqrt(D)`` by default.
        causal: no query sees a key after its own. True replaces the right bound of ``window_size``.
        window_size: (left, right), number of visible keys on either side of a query's own key; -1 is no bound.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``; 0.0 is off.
        alibi_slopes: float (H,) or (B, H); ``-slope * |i + Lk - Lq - j|`` is added to the score. Slopes may require a
            gradient.
        deterministic: accepted and ignored; forward and backward give the same bits in every run.
        return_attn_probs: also return the logsumexp, and with dropout the weights.

    Returns:
        (B, Lq, H, D) in q's dtype, 0 for a query that sees no key. With ``return_attn_probs`` a tuple of the output,
        the natural logsumexp (B, H, Lq) in float32 (float64 for float64), -inf for a query that sees no key, and
        S_dmask. S_dmask: with dropout the weights (B, H, Lq, Lk) before dropout, negative where a weight is dropped;
        without dropout an empty tensor (0,).

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes.
        ValueError: for shapes, devices or options that do not fit; the message names them.
    """
    if unknown:
        raise unknown_flash_names(flash_attn_func, unknown)
    if dropout_p is None:
        raise no_dropout_p("flash_attn_func")
    layouts = {"q": "(B, Lq, H, D)", "k": "(B, Lk, Hkv, D)", "v": "(B, Lk, Hkv, D)"}
    check_dimensions("flash_attn_func", layouts, q, k, v)
    bounds = bounds_of("flash_attn_func", causal, window_size)
    tensors = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = mask_of(bounds, alibi_slopes, k.shape[1] - q.shape[1])
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap_of(softcap), "empty_rows": "zero"}
    out, logsumexp, weights = with_weights(*tensors, mask, dropout_p, options, bool(return_attn_probs))
    out = out.transpose(1, 2).contiguous()  # contiguous already: the kernels write that layout
    return out if logsumexp is None else (out, logsumexp, q.new_empty(0) if weights is None else weights)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> Result:
    """:func:`flash_attn_func` of keys and values in one tensor, (B, Lk, 2, Hkv, D)."""
    if unknown:
        raise unknown_flash_names(flash_attn_kvpacked_func, unknown)
    check_packed("flash_attn_kvpacked_func", "kv", kv, "(B, Lk, 2, Hkv, D)", 2)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> Result:
    """:func:`flash_attn_func` of queries, keys and values in one tensor, (B, L, 3, H, D)."""
    if unknown:
        raise unknown_flash_names(flash_attn_qkvpacked_func, unknown)
    check_packed("flash_attn_qkvpacked_func", "qkv", qkv, "(B, L, 3, H, D)", 3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *options)


def check_packed(op: str, name: str, t: Tensor, layout: str, parts: int) -> None:
    """Raise unless t has this layout, with ``parts`` tensors along the third dimension from the end."""
    check_dimensions(op, {name: layout}, t)
    if t.shape[-3] != parts:
        raise ValueError(f"{op}: {name} must be {layout}, got shape {tuple(t.shape)}")


def with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout_p: float, options: dict[str, Any], more: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call ``attention``: output; if ``more`` is requested, the logsumexp, and with dropout the weights.

    Returns:
        out (B, H, Lq, D), logsumexp (B, H, Lq), and the weights (B, H, Lq, Lk) before dropout, negative where a weight
        is dropped, without a gradient. None for values that are not requested, and for weights without dropout.
    """
    options = options | {"dropout_p": dropout_p, "return_logsumexp": more}
    if not more or dropout_p == 0.0:
        return *with_logsumexp(attention(q, k, v, mask, **options), more), None
    out, dropped, logsumexp = attention(q, k, v, mask, return_weights="dropped", **options)
    with torch.no_grad():
        options |= {"dropout_p": 0.0, "return_logsumexp": False}
        _, weights = attention(q, k, v, mask, return_weights=True, **options)
        return out, logsumexp, torch.where(dropped == 0.0, -weights, weights)
