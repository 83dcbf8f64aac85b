"""Masked scaled dot-product attention. The C++ ops - forward, backward, gradient of the bias, weights - are in
csrc/ops/attention.cpp and attention_weights.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..attention_params import AttentionParams
from ..masks import AttentionMask, and_causal, as_attention_mask
from ..masks.arguments import parts_beside
from . import _plain_attention, eager
from .argument_types import as_number
from .attention_call import by_reference, choose_backend, differentiates_weights, dropped, params_of, results
from .attention_checks import (
    check_ranges,
    door_lengths,
    dropout_number,
    gives_zero,
    is_special,
    kernel_mask,
    refuse_keep_as_lengths,
    special_arguments,
    with_hint,
)
from .registry import Case, Draw, Op, Tensors, register
from .token_mask import CALL, call_on_tokens
from .unknown_names import unknown_names

NO_FURTHER_PARTS = (*(None,) * 10, False)
"""Arguments of the op's door from distance_bias to bottom_right, for a call without them."""


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
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, *,
    return_weights: Literal[False] = False, return_logsumexp: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, *,
    return_weights: Literal[True, "dropped"], return_logsumexp: Literal[False] = False, **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, *,
    return_weights: Literal[False] = False, return_logsumexp: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, *,
    return_weights: Literal[True, "dropped"], return_logsumexp: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, *,
    return_weights: bool | str = False, return_logsumexp: bool = False, **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
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
            computed anew, on a GPU by PyTorch's own operators, which keep a few tensors of their size in float32. The
            gradient of the weights is computed eagerly.
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
        raise unknown_names(attention, unknown)
    if not isinstance(q, Tensor):  # check q first: with a wrong order of arguments the mask may be q, k or v
        raise TypeError(f"attention: q must be a tensor, got {type(q).__name__}; the order is attention(q, k, v, mask)")
    mask = as_attention_mask(mask)
    if type(dropout_p) is not float:
        dropout_p = dropout_number("attention", dropout_p)
    if scale is not None and type(scale) is not float:
        scale = as_number("attention", "scale", scale)
    if bias is not None:
        mask = mask & AttentionMask.bias(bias)
    plain = not (return_weights or return_logsumexp or is_special(mask, softcap, sinks))
    door, by_triton, seed = eager.fast_path("attention", q, dropout_p, plain)
    offset, zero = and_causal(mask.causal_offset, causal), gives_zero("attention", empty_rows)
    if door is not None and CALL.get() is None:
        parts = mask.keep_mask, mask.key_keep_mask, door_lengths(mask, q, k, by_triton), mask.additive_bias
        options = mask.window_offset, None, scale, dropout_p, seed, zero
        try:
            out = door.attention(by_triton, q, k, v, 0, *parts, *NO_FURTHER_PARTS, offset, *options)
        except ValueError as error:
            raise with_hint(error, mask, q, k) from None
        if out is not None:
            return out
    if (tokens := call_on_tokens()) is not None:
        known = "keep_mask", "key_keep_mask", "additive_bias"
        given: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout_p": dropout_p}
        given["others"] = return_logsumexp or causal is not False or bool(parts_beside(mask, *known))
        masks = tuple(getattr(mask, name) for name in known)
        return tokens.attend(q, k, v, masks, return_weights=bool(return_weights), **given)
    needs = differentiates_weights(q, k, mask, sinks, return_weights)
    backend = choose_backend("attention", (q, k, v), return_logsumexp, return_weights, needs)
    given = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p, "seed": seed, "zero_empty_rows": zero}
    params = padded_params(q, k, mask, causal=offset, sinks=sinks, **given)
    try:
        return results(backend, (q, k, v), params, return_weights, return_logsumexp)
    except ValueError as error:
        raise with_hint(error, mask, q, k) from None


def padded_params(
    q: Tensor, k: Tensor, mask: AttentionMask, *, softcap: Any, sinks: Any, **fields: Any
) -> AttentionParams:
    """Arguments of the op for a call of :func:`attention`, whose other arguments are `fields`."""
    fields |= {"key_keep": mask.key_keep_mask, "bias": mask.additive_bias}
    if q.dim() == 4 and isinstance(k, Tensor) and k.dim() == 4:  # else the op says what is wrong
        (B, H, Lq, _), Lk = q.shape, k.shape[2]
        check_ranges(mask, q, (B, H, Lq, Lk))
        refuse_keep_as_lengths(mask, Lk)
        fields["keep"], fields["lengths"] = kernel_mask(mask, q, k)
        fields |= special_arguments("attention", q, mask, softcap, sinks, (Lq, Lk), zero=Lq - 1)
    return params_of(q, mask, **fields)


def weights_by_torch(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Compute the weights (B, H, Lq, Lk) on a GPU, in q's dtype, after dropout if there is a seed.

    PyTorch's own operators compute them, in float32, from queries and keys as the op takes them.
    """
    undropped = replace(params, dropout_p=0.0, seed=None)
    wide_q, wide_k = q.float(), k.float()
    weights = by_reference(wide_q, wide_k, wide_k[..., :0], undropped)[1]  # no column of the values: no second product
    return dropped(weights, params).to(q.dtype)


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
        weights = dropped(by_reference(q, k, k, undropped)[1], params)
    found = dict(zip(leaves, torch.autograd.grad(weights, list(leaves.values()), grad_weights), strict=True))
    return tuple(found.get(name) for name in given)


def _cases(draw: Draw) -> Iterator[Case]:
    B, H, Lq, Lk, D = 3, 4, 45, 77, 40
    lengths = AttentionMask.lengths(torch.tensor([77, 1, 50], device=draw.device))
    look_ahead = lengths & AttentionMask.causal(10)
    keep = torch.rand(B, 1, Lq, Lk, generator=draw.generator).to(draw.device) < 0.5
    keep[0, 0, 3] = keep[2, 0, 44] = False  # rows without a key
    dense = AttentionMask.keep(keep)
    for name, mask, options in (
        ("no mask", None, {}),
        ("padding", lengths, {}),
        ("padding, look-ahead", look_ahead, {}),
        ("padding, look-ahead, dropout 0.1", look_ahead, {"dropout_p": 0.1}),
        ("dense mask with empty rows, dropout 0.1", dense, {"dropout_p": 0.1}),
        ("dense mask, empty rows give zero", dense, {"empty_rows": "zero"}),
        ("weights after dropout 0.1, padding", lengths, {"dropout_p": 0.1, "return_weights": "dropped"}),
    ):
        inputs = {"q": draw.normal(B, H, Lq, D), "k": draw.normal(B, H, Lk, D), "v": draw.normal(B, H, Lk, D)}
        yield Case("attention", name, inputs, partial(attention, mask=mask, **options))
    inputs |= {"k": draw.normal(B, 2, Lk, D), "v": draw.normal(B, 2, Lk, D), "bias": draw.normal(1, H, Lq, Lk)}
    yield Case("attention", "grouped heads, padding, learned bias", inputs, partial(attention, mask=lengths))
    yield from _cases_by_position(draw, {name: draw.normal(B, H, Lk, D) for name in "qkv"})


def _cases_by_position(draw: Draw, inputs: Tensors) -> Iterator[Case]:
    """Cases with documents, a prefix, biases by distance, a softcap and sinks; q, k and v (B, H, L, D)."""
    B, H, L, _ = inputs["q"].shape
    ids = torch.arange(L, device=draw.device).div(30, rounding_mode="floor").expand(B, L)
    documents = AttentionMask.documents(ids) & AttentionMask.causal()
    dropping = partial(attention, mask=documents, dropout_p=0.1)
    yield Case("attention", "documents, look-ahead, dropout 0.1", inputs, dropping)

    prefix = AttentionMask.prefix(torch.arange(B, device=draw.device) * 20)
    yield Case("attention", "prefix, dropout 0.1", inputs, partial(attention, mask=prefix, dropout_p=0.1))
    place = torch.arange(L, device=draw.device)
    union = AttentionMask.intervals(place - 40, place + 9) | AttentionMask.lengths(torch.full_like(place[:B], 7))
    yield Case("attention", "intervals, union, dropout 0.1", inputs, partial(attention, mask=union, dropout_p=0.1))

    def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return attention(q, k, v, AttentionMask.alibi(slopes) & AttentionMask.causal())

    def relative(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return attention(q, k, v, AttentionMask.relative(weight), dropout_p=0.1)

    yield Case("attention", "ALiBi, look-ahead", inputs | {"slopes": draw.normal(H).abs()}, alibi)
    yield Case("attention", "relative positions, dropout 0.1", inputs | {"weight": draw.normal(32, H)}, relative)
    capped = partial(attention, softcap=5.0)
    yield Case("attention", "softcap 5, sinks", inputs | {"sinks": draw.normal(H)}, capped)


register(
    Op("attention", "attention", "triton", (_plain_attention.attention, _plain_attention.attention_weights), _cases)
)
