"""The attention op: the door (argument checks), the op and its backward, and which kernel runs."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..masks import AttentionMask, as_attention_mask
from . import _direct, _library

MASK_SCHEMA = (
    "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, int? causal, float scale, "
    "float dropout_p, Tensor? seed, bool zero_empty_rows, str backend"
)
MAX_TRITON_HEAD_DIM = 256


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Masked scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1).

    Args:
        q: (B, H, Lq, D) queries; float32, float16, bfloat16 (float64 on CPU). D up to 256 on a GPU.
        k, v: (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv) keys and values, with ``H % Hkv == 0`` (grouped heads).
        mask: an :class:`~transformer_fast.AttentionMask`, or a bool or integer keep mask broadcastable to
            (B, H, Lq, Lk).
        bias: float, added to the scaled scores, broadcastable to (B, H, Lq, Lk); ``-inf`` blocks a key.
        causal: True (query i sees keys up to i) or an offset n (up to i + n); combines with ``mask``.
        scale: multiplies ``q k^T``; ``1 / sqrt(D)`` by default.
        dropout_p: probability of dropping an attention weight; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs it. Every backend draws the same mask.
        empty_rows: what a query with no allowed key gets: "uniform" weights over all Lk keys (what filling with
            -1e9 computes) or "zero". Never NaN.
        return_weights: True also returns the weights before dropout, "dropped" after it. They are computed
            eagerly, since no kernel stores them.

    Returns:
        (B, H, Lq, Dv) in q's dtype, or a pair with the weights (B, H, Lq, Lk).

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or a mask that can be read two ways.
        ValueError: for shapes, lengths, devices or options that do not fit; the message names them.
    """
    mask = as_attention_mask(mask)
    if causal is not False:
        mask = mask & AttentionMask.causal(0 if causal is True else causal)
    seed = _library.draw_seed(q.device) if dropout_p > 0.0 and isinstance(q, Tensor) else None
    if not return_weights and (direct := _direct.native()):
        out = direct.attention(
            q, k, v, mask.keep_mask, mask.key_keep_mask, mask.key_lengths, bias, mask.causal_offset, scale, dropout_p,
            seed, empty_rows,
        )  # fmt: skip
        if out is not None:
            return out

    autocast = isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type)
    _check_inputs(q, k, v, autocast)
    _check_options(dropout_p, empty_rows, return_weights)
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    _check_mask(mask, bias, q, (B, H, Lq, Lk))
    scale = 1.0 / math.sqrt(D) if scale is None else float(scale)

    key_keep = mask.key_keep_mask
    if key_keep is not None and key_keep.shape[-1] != Lk:
        key_keep = key_keep.expand(-1, -1, -1, Lk)
    lengths = mask.key_lengths
    if lengths is not None:
        lengths = _normal_lengths(lengths, B, Lq, Lk)
    parts = (mask.keep_mask, key_keep, lengths, bias, mask.causal_offset, scale, float(dropout_p), seed)
    zero_empty_rows = empty_rows == "zero"

    if return_weights:
        return _with_weights(q, k, v, parts, empty_rows, dropped=return_weights == "dropped")
    backend = _resolve(q, v, bias)
    if backend == "reference":
        return reference.attention.attention(q, k, v, **_named(parts), empty_rows=empty_rows)[0]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    Dv = v.shape[-1]
    if Dv != D:  # zero columns change neither the scores nor the other columns of the output
        q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))
    call = _autograd if _direct.is_plain(q, k, v, *parts[:4]) and not autocast else _op
    out = call(q, k, v, *parts, zero_empty_rows, backend)[0]
    return out if Dv == out.shape[-1] else out[..., :Dv]


def needs_reference(bias: Tensor | None) -> bool:
    """Whether "auto" must take the reference: no kernel gives a gradient for the bias."""
    return _wants_gradient(bias) and backends.current() == "auto"


def check_backend(backend: str, q: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """Raise where the kernels of a backend cannot compute what this call asks."""
    if backend == "triton" and max(q.shape[-1], v.shape[-1]) > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"attention: the Triton kernels take a head_dim up to {MAX_TRITON_HEAD_DIM}, got q {tuple(q.shape)} and "
            f'v {tuple(v.shape)}; backend("reference") takes any'
        )
    if backend != "reference" and _wants_gradient(bias):
        raise backends.BackendError(
            f'attention: backend "{backend}" gives no gradient for bias; use "auto" or "reference", or bias.detach()'
        )


def _wants_gradient(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad and torch.is_grad_enabled()


def _resolve(q: Tensor, v: Tensor, bias: Tensor | None) -> str:
    if needs_reference(bias):
        if not torch.compiler.is_compiling():
            _warn_once_of_the_bias()
        return "reference"
    backend = backends.resolve("attention", q.device, q.dtype)
    check_backend(backend, q, v, bias)
    return backend


@functools.cache
def _warn_once_of_the_bias() -> None:
    warnings.warn("transformer_fast: attention runs on the eager reference: the bias requires a gradient", stacklevel=4)


def _with_weights(q: Tensor, k: Tensor, v: Tensor, parts: tuple, empty_rows: str, dropped: bool) -> tuple:
    out, weights, _ = reference.attention.attention(q, k, v, **_named(parts), empty_rows=empty_rows)
    *_, dropout_p, seed = parts
    if dropped and dropout_p > 0.0:
        kept = reference.dropout.attention_keep(seed, dropout_p, *weights.shape)
        weights = (weights * reference.dropout.rescale(dropout_p)).masked_fill(~kept, 0.0)
    return out, weights


def _normal_lengths(lengths: Tensor, B: int, Lq: int, Lk: int) -> Tensor:
    """int32 lengths (B,) or (B, Lq) in [0, Lk]. On CPU others are an error; on a GPU, where looking would wait for it,
    they are cut."""
    if lengths.dim() == 2 and lengths.shape[1] != Lq:
        lengths = lengths.squeeze(1)
    if lengths.shape[0] != B:
        lengths = lengths.expand(B, *lengths.shape[1:])
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return lengths.clamp(0, Lk).to(torch.int32)
    if lengths.numel() > 0:
        # Reading a few numbers in Python is cheaper than two reductions.
        low, high = (f(lengths.tolist()) for f in (min, max)) if lengths.dim() == 1 else torch.aminmax(lengths)
        if low < 0 or high > Lk:
            raise ValueError(f"attention: lengths must lie in [0, Lk = {Lk}], got {int(low)} to {int(high)}")
    return lengths if lengths.dtype == torch.int32 else lengths.to(torch.int32)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, autocast: bool) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"attention: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() != 4:
            raise ValueError(f"attention: {name} must be (batch, heads, length, head_dim), got shape {tuple(t.shape)}")
        if not t.is_floating_point():
            raise TypeError(f"attention: {name} must be a float tensor, got {t.dtype}")
    if not (q.dtype == k.dtype == v.dtype or autocast):
        raise TypeError(f"attention: q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"attention: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    (B, H, _, D), (Bk, Hk, Lk, Dk), (Bv, Hv, Lv, _) = q.shape, k.shape, v.shape
    if not B == Bk == Bv:
        wrong = "q, k and v must share the batch size"
    elif Dk != D or D == 0:
        wrong = "q and k must share a head_dim of at least 1"
    elif Hk != Hv or Lk != Lv:
        wrong = "k and v must share heads and length"
    elif Hk == 0 or H % Hk != 0:
        wrong = "the heads of q must be a multiple of those of k and v"
    else:
        return
    raise ValueError(f"attention: {wrong}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")


def _check_options(dropout_p: float, empty_rows: str, return_weights: bool | str) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attention: dropout_p must lie in [0, 1], got {dropout_p}")
    if empty_rows not in ("uniform", "zero"):
        raise ValueError(f'attention: empty_rows must be "uniform" or "zero", got {empty_rows!r}')
    if return_weights not in (False, True, "dropped"):
        raise ValueError(f'attention: return_weights must be False, True or "dropped", got {return_weights!r}')


def _check_mask(mask: AttentionMask, bias: Tensor | None, q: Tensor, full: tuple[int, int, int, int]) -> None:
    B, _, Lq, _ = full
    for name, t in (("mask", mask.keep_mask), ("mask", mask.key_keep_mask), ("bias", bias)):
        if t is None:
            continue
        if name == "bias" and not (isinstance(t, Tensor) and t.is_floating_point()):
            what = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(
                f"attention: bias must be a float tensor added to the scores, got {what}; a mask goes in mask="
            )
        if t.dim() != 4 or any(size not in (1, limit) for size, limit in zip(t.shape, full)):
            raise ValueError(
                f"attention: {name} of shape {tuple(t.shape)} does not broadcast to (B, H, Lq, Lk) = {full}. "
                "A (B, Lk) padding mask must be given as (B, 1, 1, Lk)."
            )
    lengths = mask.key_lengths
    if lengths is not None and (
        lengths.shape[0] not in (1, B) or (lengths.dim() == 2 and lengths.shape[1] not in (1, Lq))
    ):
        raise ValueError(
            f"attention: lengths of shape {tuple(lengths.shape)} fit neither (B,) = ({B},) nor (B, Lq) = ({B}, {Lq})"
        )
    for t in (mask.keep_mask, mask.key_keep_mask, lengths, bias):
        if t is not None and t.device != q.device:
            raise ValueError(f"attention: q is on {q.device} but the mask or bias on {t.device}")


def _attention(q, k, v, *tail):
    *parts, zero_empty_rows, backend = tail
    if backend == "native":
        return torch.ops.transformer_fast_native.attention_forward(q, k, v, *parts, zero_empty_rows)
    from ..kernels.attention import attention_forward

    return attention_forward(q, k, v, **_named(parts), zero_empty_rows=zero_empty_rows)


def _attention_backward(grad_out, q, k, v, out, logsumexp, *tail):
    *parts, zero_empty_rows, backend = tail
    inputs = grad_out, q, k, v, out, logsumexp
    if backend == "native":
        return torch.ops.transformer_fast_native.attention_backward(*inputs, *parts, zero_empty_rows)
    from ..kernels.attention_backward import attention_backward

    return attention_backward(*inputs, **_named(parts), zero_empty_rows=zero_empty_rows)


def _named(parts: Any) -> dict[str, Any]:
    names = ("keep", "key_keep", "lengths", "bias", "causal", "scale", "dropout_p", "seed")
    return dict(zip(names, parts, strict=True))


def _fake(q, k, v, *tail):
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=statistics)


def _fake_backward(grad_out, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, backend):
        out, logsumexp = _direct.run(
            _op, _attention, 7, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed,
            zero_empty_rows, backend,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, logsumexp, keep, key_keep, lengths, bias, seed)
        ctx.options = causal, scale, dropout_p, zero_empty_rows, backend
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad_out, _):
        if grad_out is None:
            return (None,) * 13
        q, k, v, out, logsumexp, keep, key_keep, lengths, bias, seed = ctx.saved_tensors
        causal, scale, dropout_p, zero_empty_rows, backend = ctx.options
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        args = (
            grad_out, q, k, v, out, logsumexp, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed,
            zero_empty_rows, backend,
        )  # fmt: skip
        # With create_graph the op itself must run: it is what says that there is no second derivative.
        if torch.is_grad_enabled():
            grads = _op_backward(*args)
        else:
            grads = _direct.run(_op_backward, _attention_backward, 10, *args)
        return (*grads, *(None,) * 10)


def _autograd(*args):
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[:3]):
        return _Attention.apply(*args)
    return _direct.run(_op, _attention, 7, *args)


_op = _library.register(
    f"attention(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}) -> (Tensor out, Tensor logsumexp)",
    implementation=_attention,
    fake=_fake,
    autograd=_autograd,
)
_op_backward = _library.register(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    f"{MASK_SCHEMA}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    implementation=_attention_backward,
    fake=_fake_backward,
)
_library.register_autocast(_op, ("q", "k", "v"))
