"""Masked scaled dot-product attention. The C++ ops - forward, backward, gradient of the bias, weights - are in
csrc/ops/attention.cpp and attention_weights.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..attention_params import AttentionParams
from ..masks import AttentionMask, and_causal, as_attention_mask
from ..tracing import sizes
from . import eager, seeds
from ._names import unknown_names
from ._plain import implementation
from .attention_checks import (
    check_inputs,
    check_mask,
    check_options,
    dropout_number,
    fitting_lengths,
    is_special,
    kernel_mask,
    refuse_keep_as_lengths,
    scale_of,
    special_arguments,
)

MAX_TRITON_HEAD_DIM = 256


class _Options(TypedDict, total=False):
    """Keyword arguments of :func:`attention` that do not change the number of results."""

    bias: Tensor | None
    causal: bool | int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    empty_rows: str


# Overloads for type checkers: the number of returned tensors depends on the options.
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: Literal[False] = False,
    return_logsumexp: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: Literal[True, "dropped"],
    return_logsumexp: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: Literal[False] = False,
    return_logsumexp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: Literal[True, "dropped"],
    return_logsumexp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    return_weights: bool | str = False,
    return_logsumexp: bool = False,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, ...]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    causal: bool | int = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    empty_rows: str = "uniform",
    return_weights: bool | str = False,
    return_logsumexp: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Masked scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1).

    Args:
        q: (B, H, Lq, D) queries; float32, float16, bfloat16 (float64 on CPU). D up to 256 on a GPU.
        k, v: (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv) keys and values, with ``H % Hkv == 0`` (grouped heads).
        mask: an :class:`~transformer_fast.AttentionMask`, or a bool or integer keep mask broadcastable to
            (B, H, Lq, Lk).
        bias: float, added to the scaled scores, broadcastable to (B, H, Lq, Lk); ``-inf`` blocks a key. The bias may
            require a gradient; the gradient has the shape of the bias. ALiBi and T5's relative positions need no bias
            tensor: see ``AttentionMask.alibi`` and ``AttentionMask.relative``.
        causal: True (query i sees keys up to i) or an offset n (up to i + n); combines with ``mask``.
        scale: multiplies ``q k^T``; ``1 / sqrt(D)`` by default.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``, before a bias is added (Gemma 2).
        sinks: float (H,): per head, the score of one additional key, whose value is 0 and whose weight is not returned
            (attention sinks, GPT-OSS). Sinks may require a gradient. With sinks, a query with no allowed key gets 0.
        dropout_p: probability of dropping an attention weight; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs the draws. Every backend draws the same mask.
        empty_rows: result of a query with no allowed key: "uniform" weights over all Lk keys (as filling with -1e9
            gives) or "zero". Never NaN.
        return_weights: True also returns the weights before dropout, "dropped" those after dropout. The weights are
            recomputed from the logsumexp, which costs one more matrix product. The gradient of the weights is computed
            eagerly.
        return_logsumexp: also return the logsumexp of each query's masked scores.

    Returns:
        (B, H, Lq, Dv) in q's dtype; or a tuple of it, the weights (B, H, Lq, Lk) in q's dtype if asked for, and the
        logsumexp (B, H, Lq) in float32 (float64 for float64) if asked for: -inf for a query with no allowed key. The
        logsumexp includes the sinks.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or an ambiguous mask.
        ValueError: for shapes, lengths, devices or options that do not fit; the message names them.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 64)  # (B, H, L, D) each
        >>> mask = tfast.AttentionMask.lengths(torch.tensor([10, 7]))
        >>> tfast.attention(q, k, v, mask, causal=True, dropout_p=0.1).shape
        torch.Size([2, 4, 10, 64])
    """
    if unknown:
        raise unknown_names("attention", unknown)
    if not isinstance(q, Tensor):  # check q first: with a wrong order of arguments the mask may be q, k or v
        raise TypeError(f"attention: q must be a tensor, got {type(q).__name__}; the order is attention(q, k, v, mask)")
    mask = as_attention_mask(mask)
    if type(dropout_p) is not float:
        dropout_p = dropout_number("attention", dropout_p)
    if bias is not None:
        mask = mask & AttentionMask.bias(bias)
    bias = mask.additive_bias
    only_out = not (return_weights or return_logsumexp)
    special = is_special(mask, softcap, sinks)
    extension, by_triton = eager.fast_path("attention", q) if only_out and not special else (None, False)
    seed = seeds.draw_launch_seed(q.device, by_triton) if dropout_p > 0.0 else None
    offset = and_causal(mask.causal_offset, causal)
    if extension is not None:
        lengths = fitting_lengths(mask.key_lengths, q, k) if by_triton else mask.key_lengths
        given = (mask.keep_mask, mask.key_keep_mask, lengths, bias, offset, mask.window_offset, scale)
        out = extension.attention(by_triton, q, k, v, *given, dropout_p, seed, empty_rows)
        if out is not None:
            return out
    seed = seeds.as_tensor(seed, q)

    autocast = eager.autocast_enabled(q)
    check_inputs(q, k, v, autocast)
    check_options("attention", dropout_p, empty_rows)
    if return_weights not in (False, True, "dropped"):
        raise ValueError(f'attention: return_weights must be False, True or "dropped", got {return_weights!r}')
    backend = backends.resolve("attention", q.device, q.dtype)
    (B, H, Lq, D), (Lk, Dv) = sizes(q), sizes(v)[2:]
    check_mask(mask, q, (B, H, Lq, Lk))
    refuse_keep_as_lengths(mask.key_lengths, Lk)
    check_backend(backend, q, v)
    params = _params(q, k, mask, offset, scale, dropout_p, seed, empty_rows)
    if special:
        open_lengths = q.shape[2], k.shape[2]  # torch.jit.trace may record sizes as tensors
        params = replace(
            params, **special_arguments("attention", q, mask, softcap, sinks, open_lengths, zero=q.shape[2] - 1)
        )
    if backend == "reference":
        out, weights, logsumexp = _reference(q, k, v, params)
        if return_weights == "dropped":
            weights = _dropped(weights, params)
    else:
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        if Dv != D:  # zero columns change neither the scores nor the other columns of the output
            q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))
        out, logsumexp = implementation("attention", backend)(q, k, v, **params.keywords())
        out = out if Dv == sizes(out)[-1] else out[..., :Dv]
        if return_weights:
            of_weights = params if return_weights == "dropped" else replace(params, dropout_p=0.0, seed=None)
            compute = implementation("attention_weights", backend)
            weights = compute(q, k, logsumexp.detach(), **of_weights.keywords())
    if only_out:
        return out
    return (out, *([weights] if return_weights else []), *([logsumexp] if return_logsumexp else []))


def _params(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    causal: int | None,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | int | None,
    empty_rows: str,
) -> AttentionParams:
    """Arguments of the op for a checked call."""
    key_keep = mask.key_keep_mask
    if key_keep is not None and sizes(key_keep)[-1] != sizes(k)[2]:
        key_keep = key_keep.expand(-1, -1, -1, k.shape[2])
    keep, lengths = kernel_mask(mask, q, k)
    return AttentionParams(
        keep=keep,
        key_keep=key_keep,
        lengths=lengths,
        bias=mask.additive_bias,
        causal=causal,
        window=mask.window_offset,
        scale=scale_of("attention", q, scale),
        dropout_p=dropout_p,
        seed=seed,
        zero_empty_rows=empty_rows == "zero",
    )


def _reference(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor]:
    given = params.keywords()
    empty_rows = "zero" if given.pop("zero_empty_rows") else "uniform"
    return reference.attention.attention(q, k, v, **given, empty_rows=empty_rows)


def check_backend(backend: str, q: Tensor, v: Tensor) -> None:
    """Raise if the kernels of a backend cannot compute this call."""
    if backend == "triton" and max(q.shape[-1], v.shape[-1]) > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"attention: the Triton kernels take a head_dim up to {MAX_TRITON_HEAD_DIM}, got q {tuple(q.shape)} and "
            f'v {tuple(v.shape)}; backend("reference") takes any'
        )


def _dropped(weights: Tensor, params: AttentionParams) -> Tensor:
    if params.dropout_p == 0.0 or not isinstance(params.seed, Tensor):
        return weights
    kept = reference.dropout.attention_keep(params.seed, params.dropout_p, *weights.shape)
    return (weights * reference.dropout.rescale(params.dropout_p)).masked_fill(~kept, 0.0)


def weights_gradients(
    grad_weights: Tensor, q: Tensor, k: Tensor, params: AttentionParams, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, bias, distance bias and sinks from the gradient of the weights, computed by the reference;
    only those that are ``needed``."""
    given: dict[str, Any] = {"q": q, "k": k, "bias": params.bias, "distance_bias": params.distance_bias}
    given["sinks"] = params.sinks
    with torch.enable_grad():
        leaves = {name: given[name].detach().requires_grad_() for name, need in zip(given, needed, strict=True) if need}
        q, k, *biases = (given | leaves).values()
        bias, distance_bias, sinks = biases
        undropped = replace(params, bias=bias, distance_bias=distance_bias, sinks=sinks, dropout_p=0.0, seed=None)
        weights = _reference(q, k, k, undropped)[1]
        weights = _dropped(weights, params)
    found = dict(zip(leaves, torch.autograd.grad(weights, list(leaves.values()), grad_weights), strict=True))
    return tuple(found.get(name) for name in given)
