"""The attention op: the door, the ops behind it - forward, backward, gradient of the bias, weights - and which kernel
runs."""

from __future__ import annotations

import math
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..masks import AttentionMask, and_causal, as_attention_mask
from . import _direct, _library
from ._attention_checks import check_inputs, check_mask, check_options, normal_lengths
from ._attention_launched import by_launchers
from ._names import unknown_names

MASK_SCHEMA = (
    "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, int? causal, float scale, "
    "float dropout_p, Tensor? seed, bool zero_empty_rows, str backend"
)
MAX_TRITON_HEAD_DIM = 256


class _Options(TypedDict, total=False):
    """The keyword arguments of :func:`attention` that do not change what it returns."""

    bias: Tensor | None
    causal: bool | int
    scale: float | None
    dropout_p: float
    empty_rows: str


# What a type checker reads: how many tensors come back.
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
        bias: float, added to the scaled scores, broadcastable to (B, H, Lq, Lk); ``-inf`` blocks a key. It may require
            a gradient, which comes in its own shape (the T5 and ALiBi kinds).
        causal: True (query i sees keys up to i) or an offset n (up to i + n); combines with ``mask``.
        scale: multiplies ``q k^T``; ``1 / sqrt(D)`` by default.
        dropout_p: probability of dropping an attention weight; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs it. Every backend draws the same mask.
        empty_rows: what a query with no allowed key gets: "uniform" weights over all Lk keys (what filling with
            -1e9 computes) or "zero". Never NaN.
        return_weights: True also returns the weights before dropout, "dropped" after it. They are computed again from
            the logsumexp, one matrix product more. A gradient that reaches them is computed eagerly.
        return_logsumexp: also return the logsumexp of each query's masked scores.

    Returns:
        (B, H, Lq, Dv) in q's dtype; or a tuple of it, the weights (B, H, Lq, Lk) in q's dtype if asked for, and the
        logsumexp (B, H, Lq) in float32 (float64 for float64) if asked for: -inf for a query with no allowed key.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or a mask that can be read two ways.
        ValueError: for shapes, lengths, devices or options that do not fit; the message names them.
    """
    if unknown:
        raise unknown_names("attention", unknown)
    mask = as_attention_mask(mask)
    if bias is not None:
        mask = mask & AttentionMask.bias(bias)
    bias = mask.additive_bias
    only_out = not (return_weights or return_logsumexp)
    launched = _direct.launched("attention", q) if only_out else None
    seed, out = None, None
    if dropout_p > 0.0 and isinstance(q, Tensor):
        seed = _library.draw_launch_seed(q.device, launched is not None)
    offset = and_causal(mask.causal_offset, causal)
    given = (mask.keep_mask, mask.key_keep_mask, mask.key_lengths, bias, offset, scale)
    if launched:
        out = by_launchers(launched, q, k, v, given, dropout_p, seed, empty_rows)
    elif not return_logsumexp and return_weights in (False, True, "dropped") and (direct := _direct.native()):
        out = direct.attention(q, k, v, *given, dropout_p, seed, empty_rows)
    if out is not None:
        if not return_weights:
            return out
        drawn = (float(dropout_p), seed) if return_weights == "dropped" else (0.0, None)
        return out, _native_weights(q, k, given, *drawn, empty_rows == "zero")
    if isinstance(seed, int):
        seed = torch.full((1,), seed, dtype=torch.int64, device=q.device)

    autocast = _library.autocast_enabled(q)
    check_inputs(q, k, v, autocast)
    check_options("attention", dropout_p, empty_rows)
    if return_weights not in (False, True, "dropped"):
        raise ValueError(f'attention: return_weights must be False, True or "dropped", got {return_weights!r}')
    backend = backends.resolve("attention", q.device, q.dtype)
    B, H, Lq, D = q.shape
    Lk, Dv = v.shape[2:]
    check_mask(mask, q, (B, H, Lq, Lk))
    scale = 1.0 / math.sqrt(D) if scale is None else float(scale)
    key_keep = mask.key_keep_mask
    if key_keep is not None and key_keep.shape[-1] != Lk:
        key_keep = key_keep.expand(-1, -1, -1, Lk)
    lengths = mask.key_lengths
    if lengths is not None:
        lengths = normal_lengths(lengths, B, Lq, Lk)
    parts = (mask.keep_mask, key_keep, lengths, bias, offset, scale, float(dropout_p), seed)

    check_backend(backend, q, v)
    if backend == "reference":
        out, weights, logsumexp = reference.attention.attention(q, k, v, **_named(parts), empty_rows=empty_rows)
        if return_weights == "dropped":
            weights = _dropped(weights, *parts[-2:])
    else:
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        if Dv != D:  # zero columns change neither the scores nor the other columns of the output
            q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))
        tail = (empty_rows == "zero", backend)
        call = _autograd if _direct.is_plain(q, k, v, *parts[:4]) and not autocast else _op
        out, logsumexp = call(q, k, v, *parts, *tail)
        out = out if Dv == out.shape[-1] else out[..., :Dv]
        if return_weights:
            dropout = parts[-2:] if return_weights == "dropped" else (0.0, None)
            call = _op_weights if call is _op else _weights_autograd
            weights = call(q, k, logsumexp.detach(), *parts[:-2], *dropout, *tail)
    if only_out:
        return out
    return (out, *([weights] if return_weights else []), *([logsumexp] if return_logsumexp else []))


def _native_weights(q, k, parts, dropout_p, seed, zero_empty_rows):
    """The weights beside an output that the extension computed, and so checked; it makes them from q and k alone."""
    keep, key_keep, lengths, bias, causal, scale = parts
    Lk = k.shape[2]
    if key_keep is not None and key_keep.shape[-1] != Lk:
        key_keep = key_keep.expand(-1, -1, -1, Lk)
    if lengths is not None:
        lengths = normal_lengths(lengths, q.shape[0], q.shape[2], Lk)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    parts = (keep, key_keep, lengths, bias, causal, scale, dropout_p, seed)
    unread = q.detach()  # where other kernels have the logsumexp
    return _weights_autograd(q, k, unread, *parts, zero_empty_rows, "native")


def check_backend(backend: str, q: Tensor, v: Tensor) -> None:
    """Raise where the kernels of a backend cannot compute what this call asks."""
    if backend == "triton" and max(q.shape[-1], v.shape[-1]) > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"attention: the Triton kernels take a head_dim up to {MAX_TRITON_HEAD_DIM}, got q {tuple(q.shape)} and "
            f'v {tuple(v.shape)}; backend("reference") takes any'
        )


def _dropped(weights: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor:
    if dropout_p == 0.0 or seed is None:
        return weights
    kept = reference.dropout.attention_keep(seed, dropout_p, *weights.shape)
    return (weights * reference.dropout.rescale(dropout_p)).masked_fill(~kept, 0.0)


def _attention(q, k, v, *tail):
    *parts, zero_empty_rows, backend = tail
    if backend == "native":
        return torch.ops.transformer_fast_native.attention_forward(q, k, v, *parts, zero_empty_rows)
    from ..kernels.attention import attention_forward

    return attention_forward(q, k, v, **_named(parts), zero_empty_rows=zero_empty_rows)


def _attention_training(q, k, v, *tail):
    """``_attention``, and after its two what else the backward is to be given: weights kept by the native kernel."""
    *parts, zero_empty_rows, backend = tail
    if backend == "native" and _direct.is_plain(q, k, v, *parts[:4]):
        return torch.ops.transformer_fast_native.attention_forward_training(q, k, v, *parts, zero_empty_rows)
    return *_direct.run(_op, _attention, 7, q, k, v, *tail), None, None


def _attention_backward(grad_out, q, k, v, out, logsumexp, grad_logsumexp, *tail, kept=(None, None)):
    *parts, zero_empty_rows, backend = tail
    inputs = grad_out, q, k, v, out, logsumexp
    if backend == "native":
        native = torch.ops.transformer_fast_native.attention_backward
        return native(*inputs, *parts, zero_empty_rows, grad_logsumexp, *kept)
    from ..kernels.attention_backward import attention_backward

    mask = _named(parts) | {"zero_empty_rows": zero_empty_rows}
    return attention_backward(*inputs, **mask, grad_logsumexp=grad_logsumexp)


def _attention_grad_bias(grad_out, q, k, v, out, logsumexp, grad_logsumexp, *tail):
    *parts, zero_empty_rows, backend = tail
    inputs = grad_out, q, k, v, out, logsumexp
    if backend == "native":
        native = torch.ops.transformer_fast_native.attention_grad_bias
        return native(*inputs, *parts, zero_empty_rows, grad_logsumexp)
    from ..kernels.attention_grad_bias import attention_grad_bias

    mask = _named(parts) | {"zero_empty_rows": zero_empty_rows}
    return attention_grad_bias(*inputs, **mask, grad_logsumexp=grad_logsumexp)


def _attention_backward_bias(*args, kept):
    """The gradients of q, k, v and of the bias."""
    *inputs, grad_logsumexp, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, backend = (
        args
    )
    if backend != "native":
        return *_attention_backward(*args, kept=kept), _attention_grad_bias(*args)
    mask = keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows
    return torch.ops.transformer_fast_native.attention_backward_bias(*inputs, *mask, grad_logsumexp, *kept)


def _attention_weights(q, k, logsumexp, *tail):
    *parts, zero_empty_rows, backend = tail
    if backend == "native":
        return torch.ops.transformer_fast_native.attention_weights(q, k, logsumexp, *parts, zero_empty_rows)
    from ..kernels.attention_weights import attention_weights

    return attention_weights(q, k, logsumexp, **_named(parts), zero_empty_rows=zero_empty_rows)


def _named(parts: Any) -> dict[str, Any]:
    names = ("keep", "key_keep", "lengths", "bias", "causal", "scale", "dropout_p", "seed")
    return dict(zip(names, parts, strict=True))


def _fake(q, k, v, *tail):
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=statistics)


def _fake_backward(grad_out, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _fake_grad_bias(grad_out, q, k, v, out, logsumexp, grad_logsumexp, keep, key_keep, lengths, bias, *rest):
    return bias.new_empty(bias.shape)


def _fake_weights(q, k, *rest):
    return q.new_empty((*q.shape[:3], k.shape[2]))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, backend):
        out, logsumexp, *kept = _attention_training(
            q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, backend
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, keep, key_keep, lengths, bias, seed, *kept)
        ctx.options = causal, scale, dropout_p, zero_empty_rows, backend
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad_out, grad_logsumexp):
        grads = [None] * 13
        if grad_out is None and grad_logsumexp is None:
            return tuple(grads)
        q, k, v, out, logsumexp, keep, key_keep, lengths, bias, seed, *kept = ctx.saved_tensors
        causal, scale, dropout_p, zero_empty_rows, backend = ctx.options
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        args = (
            grad_out, q, k, v, out, logsumexp, grad_logsumexp, keep, key_keep, lengths, bias, causal, scale, dropout_p,
            seed, zero_empty_rows, backend,
        )  # fmt: skip
        # With create_graph the op itself must run: it is what says that there is no second derivative.
        if torch.is_grad_enabled() or not _direct.is_plain(*args[:11]):
            if any(ctx.needs_input_grad[:3]):
                grads[:3] = _op_backward(*args)
            if ctx.needs_input_grad[6]:
                grads[6] = _op_grad_bias(*args)
        elif ctx.needs_input_grad[6]:
            *grads[:3], grads[6] = _attention_backward_bias(*args, kept=kept)
        else:
            grads[:3] = _attention_backward(*args, kept=kept)
        return tuple(grads)


def _autograd(*args):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*args[:3], args[6])):
        return _Attention.apply(*args)
    return _direct.run(_op, _attention, 7, *args)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, logsumexp, *tail):
        keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, _ = tail
        ctx.save_for_backward(q, k, keep, key_keep, lengths, bias, seed)
        ctx.options = causal, scale, dropout_p, zero_empty_rows
        return _direct.run(_op_weights, _attention_weights, 7, q, k, logsumexp, *tail)

    @staticmethod
    def backward(ctx, grad_weights):
        # Rare: a loss on the weights. They are a function of q, k and the bias, and the reference knows it.
        q, k, keep, key_keep, lengths, bias, seed = ctx.saved_tensors
        causal, scale, dropout_p, zero_empty_rows = ctx.options
        wanted = [t for t, needed in ((q, 0), (k, 1), (bias, 6)) if ctx.needs_input_grad[needed]]
        with torch.enable_grad():
            leaves = {id(t): t.detach().requires_grad_() for t in wanted}
            q, k, bias = (leaves.get(id(t), t) for t in (q, k, bias))
            parts = (keep, key_keep, lengths, bias, causal, scale, 0.0, None)
            empty_rows = "zero" if zero_empty_rows else "uniform"
            weights = reference.attention.attention(q, k, k, **_named(parts), empty_rows=empty_rows)[1]
            weights = _dropped(weights, dropout_p, seed)
        grads = iter(torch.autograd.grad(weights, list(leaves.values()), grad_weights))
        return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad)


def _weights_autograd(*args):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*args[:2], args[6])):
        return _Weights.apply(*args)
    return _direct.run(_op_weights, _attention_weights, 7, *args)


_BACKWARD_SCHEMA = (
    "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? grad_logsumexp, "
    f"{MASK_SCHEMA}"
)
_op = _library.register(
    f"attention(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}) -> (Tensor out, Tensor logsumexp)",
    implementation=_attention,
    fake=_fake,
    autograd=_autograd,
)
_op_backward = _library.register(
    f"attention_backward({_BACKWARD_SCHEMA}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    implementation=_attention_backward,
    fake=_fake_backward,
)
_op_grad_bias = _library.register(
    f"attention_grad_bias({_BACKWARD_SCHEMA}) -> Tensor",
    implementation=_attention_grad_bias,
    fake=_fake_grad_bias,
)
_op_weights = _library.register(
    f"attention_weights(Tensor q, Tensor k, Tensor logsumexp, {MASK_SCHEMA}) -> Tensor",
    implementation=_attention_weights,
    fake=_fake_weights,
    autograd=_weights_autograd,
)
_library.register_autocast(_op, ("q", "k", "v"))
_library.register_autocast(_op_weights, ("q", "k"))
