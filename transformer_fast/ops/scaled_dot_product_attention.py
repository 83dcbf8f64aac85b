"""``torch.nn.functional.scaled_dot_product_attention`` on our kernels: converts its arguments to those of
``attention``."""

from __future__ import annotations

import functools
import math
from types import NoneType

import torch
from torch import Tensor

from .. import backends
from ..tensors import takes_fused_ops
from . import eager
from .attention import NO_FURTHER_PARTS, attention
from .attention_call import MAX_TRITON_HEAD_DIM
from .token_mask import CALL, call_on_tokens

# Bound at import, so that torch's function stays reachable if a program patches torch.nn.functional.
TORCH = torch.nn.functional.scaled_dot_product_attention

_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_CAST_BY_AUTOCAST, torch.float64)
_Call = tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]
"""Arguments of :func:`fused_attention`."""


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
) -> Tensor:
    """Drop-in replacement of ``torch.nn.functional.scaled_dot_product_attention`` on the fused kernels.

    A call that the kernels do not serve goes to torch: complex or mixed dtypes, nested or sparse tensors, subclasses,
    transforms of ``torch.func``, forward-mode differentiation, a head_dim over 256 on a GPU, a machine without kernels,
    and every invalid call, so that torch raises its own error. ``torch.nn.attention.sdpa_kernel`` chooses among torch's
    kernels and does not affect these kernels. With dropout the mask differs from torch's; ``torch.manual_seed`` governs
    both.

    Args:
        query: (N, ..., H, L, E); float32, float16, bfloat16 (float64 on CPU). At least two dimensions.
        key, value: (N, ..., H, S, E) and (N, ..., H, S, Ev). Dimensions before the last two broadcast.
        attn_mask: broadcastable to (N, ..., H, L, S), of two dimensions or more. Bool: True = takes part (the opposite
            of ``nn.MultiheadAttention``'s masks). Float, of query's dtype or float32: added to the scaled scores,
            ``-inf`` blocks; the mask may require a gradient. A query with every key blocked gets zeros and no gradient.
        dropout_p: probability of dropping an attention weight, in evaluation too: pass 0.0 there.
        is_causal: query i sees keys up to i, also where L != S (top left). Excludes ``attn_mask``.
        scale: multiplies the scores; ``1 / sqrt(E)`` by default.
        enable_gqa: key and value may have fewer heads; the number of query heads must be a multiple. If False, heads
            broadcast like batch dimensions.

    Returns:
        (N, ..., H, L, Ev) in query's dtype (autocast's under autocast).

    Raises:
        TypeError, RuntimeError, IndexError: torch's own errors, for invalid calls.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 64)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> out = tfast.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    out = fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out is not None:
        return out
    return TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """:func:`scaled_dot_product_attention`; None for a call that goes to torch."""
    call = q, k, v, mask, dropout_p, is_causal, scale, enable_gqa
    out = _eager_result(call)
    if out is not None:
        return out
    if (tokens := call_on_tokens()) is not None:
        return tokens.attend(q, k, v, (mask,), others=bool(is_causal), scale=scale, dropout_p=float(dropout_p))
    if not _is_supported(call):
        return None
    leading = _batch_shape(q, k, v, mask, enable_gqa)
    if leading is None:
        return None
    q, k, v = _heads(q, k, v, leading, enable_gqa)
    keep = bias = None
    if mask is not None:
        mask = _flattened(mask, leading)
        keep, bias = (mask, None) if mask.dtype == torch.bool else (None, _cast(mask, q))
    out = attention(q, k, v, keep, bias=bias, causal=is_causal, scale=scale, dropout_p=dropout_p, empty_rows="zero")
    return out if len(leading) == 2 else out.reshape(*leading, *out.shape[2:])


def _eager_result(call: _Call) -> Tensor | None:
    """Result of a common call on four-dimensional tensors; the extension checks the arguments faster than Python.

    None for any other call, and for calls with dropout, because a retry by another path would draw a second seed.
    """
    q, k, v, mask, dropout_p, is_causal, scale, enable_gqa = call
    door, by_triton, _ = eager.fast_path("attention", q)
    if door is None or dropout_p != 0.0 or CALL.get() is not None:
        return None
    if not isinstance(q, Tensor) or q.dim() != 4 or not isinstance(k, Tensor) or k.dim() != 4:
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool or (q.shape[1] != k.shape[1] and not enable_gqa):
        return None
    keep = key_keep = bias = None
    if mask is not None:
        if is_causal or not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            return None
        given = mask if mask.dim() == 4 else mask[None, None]
        if mask.dtype != torch.bool:
            bias = given
            if mask.dtype not in (torch.float32, q.dtype):
                return None
        elif given.shape[2:] == (1, k.shape[2]):
            key_keep = given
        else:
            keep = given
    parts = keep, key_keep, None, bias, *NO_FURTHER_PARTS, 0 if is_causal else None, None, None
    try:
        return door.attention(by_triton, q, k, v, 0, *parts, scale, 0.0, None, True)
    except (TypeError, ValueError):  # by another path, or by torch's function, which raises its own error
        return None


def _is_supported(call: _Call) -> bool:
    """Return True if the kernels support these tensor classes, dtypes and options."""
    q, k, v, mask, dropout_p, is_causal, scale, enable_gqa = call
    if type(is_causal) is not bool or type(enable_gqa) is not bool or (is_causal and mask is not None):
        return False
    if type(dropout_p) not in (float, int) or not 0.0 <= dropout_p <= 1.0 or type(scale) not in (NoneType, float, int):
        return False
    if not takes_fused_ops(q, k, v, mask):
        return False
    for t in (q, k, v) if mask is None else (q, k, v, mask):
        if not isinstance(t, Tensor) or t.dim() < 2 or t.device != q.device:
            return False
    floats: tuple[torch.dtype, ...] = _DTYPES
    if eager.autocast_enabled(q):
        floats = _CAST_BY_AUTOCAST
    elif not q.dtype == k.dtype == v.dtype or (
        mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype)
    ):
        return False
    if not (q.dtype in floats and k.dtype in floats and v.dtype in floats):
        return False
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in floats:
        return False
    backend = _backend(backends.current(), q.device, q.dtype)
    return backend is not None and (backend != "triton" or max(q.shape[-1], v.shape[-1]) <= MAX_TRITON_HEAD_DIM)


def _backend(requested: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Backend of attention; None without kernels, because torch's function is then better than our reference."""
    if torch.compiler.is_compiling():
        name, _ = backends.choose("attention", device, dtype)
    else:
        name = _chosen_backend(requested, device, dtype)
    return None if name == "reference" and requested == "auto" else name


@functools.cache
def _chosen_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    return backends.choose("attention", device, dtype)[0]


def _batch_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> tuple[int, ...] | None:
    """Batch dimensions of the result, heads last; None if the shapes do not fit."""
    E, S = k.shape[-1], k.shape[-2]
    if q.shape[-1] != E or E == 0 or v.shape[-2] != S:
        return None
    if enable_gqa:
        if q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
            return None
        H, Hk = q.shape[-3], k.shape[-3]
        if v.shape[-3] != Hk or Hk == 0 or H % Hk != 0:
            return None
        scores = _broadcast(q.shape[:-2], (*k.shape[:-3], H))
        leading = _broadcast(scores, (*v.shape[:-3], H))
    else:
        scores = _broadcast(q.shape[:-2], k.shape[:-2])
        leading = _broadcast(scores, v.shape[:-2])
    if leading and leading[-1] == 0:
        return None
    if scores is None or mask is None:
        return leading
    full = (*scores, q.shape[-2], S)
    return leading if mask.dim() <= len(full) and _broadcast(mask.shape, full) == full else None


def _broadcast(a: tuple[int, ...] | None, b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape that two shapes broadcast to, or None."""
    if a is None or a == b:
        return a
    rank = max(len(a), len(b))
    pairs = list(zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)))
    if any(x != y and x != 1 and y != 1 for x, y in pairs):
        return None
    return tuple(y if x == 1 else x for x, y in pairs)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, leading: tuple[int, ...], enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (B, H, L, D); keys and values get the same number of heads."""
    H = leading[-1] if leading else 1
    key_heads = H
    if enable_gqa or _heads_of(k) == _heads_of(v) == 1:
        key_heads = _heads_of(k)
    return _with_heads(q, leading, H), _with_heads(k, leading, key_heads), _with_heads(v, leading, key_heads)


def _heads_of(t: Tensor) -> int:
    return t.shape[-3] if t.dim() > 2 else 1


def _with_heads(t: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    batch = leading[:-1]
    if t.dim() != 4 or t.shape[:-3] != batch:
        t = t.expand(*batch, _heads_of(t), *t.shape[-2:]).reshape(math.prod(batch), _heads_of(t), *t.shape[-2:])
    return t if t.shape[1] == heads else t.expand(-1, heads, -1, -1)


def _flattened(mask: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Reshape a mask with the result's dimensions to four dimensions."""
    batch, rest = mask.shape[:-3], (_heads_of(mask), *mask.shape[-2:])
    if mask.dim() == len(leading) + 2 == 4:
        return mask
    if all(size == 1 for size in batch):
        return mask.reshape(1, *rest)
    return mask.expand(*leading[:-1], *rest).reshape(math.prod(leading[:-1]), *rest)


def _cast(bias: Tensor, q: Tensor) -> Tensor:
    """Cast a float mask as autocast does."""
    return bias.to(torch.get_autocast_dtype(q.device.type)) if eager.autocast_enabled(q) else bias
