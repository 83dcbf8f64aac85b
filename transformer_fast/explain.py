"""``explain``: the path a call of attention takes on this machine, and why, as text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import backends
from .masks import AttentionMask, as_attention_mask
from .ops.attention import check_backend

_PATHS = {
    "native": "the C++ kernel of the extension (scores of one tile at a time; nothing of size Lq x Lk is stored)",
    "triton": "the fused Triton kernel (forward, and backward from the stored logsumexp)",
    "reference": "the eager reference (scores and weights are materialised)",
}


def explain(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, **options: Any) -> str:
    """Say which path ``attention(q, k, v, mask, **options)`` takes here, and why. Nothing is computed.

    Args:
        q, k, v, mask, options: as for :func:`transformer_fast.attention`.

    Returns:
        A few lines of text.

    Raises:
        BackendError, ValueError: where the backend that was asked for cannot run the call, as the call itself would.
    """
    mask = as_attention_mask(mask)
    if options.get("bias") is not None:
        mask = mask & AttentionMask.bias(options["bias"])
    backend, reason = backends.choose("attention", q.device, q.dtype)
    check_backend(backend, q, v)
    lines = [
        f"attention {tuple(q.shape)} x {tuple(k.shape)} {q.dtype} on {q.device}",
        f"backend: {backend}, {_PATHS[backend]}",
        f"why: {reason}",
        f"mask: {_describe_mask(mask, options.get('causal', False))}",
    ]
    p = options.get("dropout_p", 0.0)
    if p > 0.0:
        lines.append(f"dropout: {p} on the weights, drawn from one seed (Philox 4x32-10), never stored")
    return "\n".join(lines)


def _describe_mask(mask: AttentionMask, causal: bool | int) -> str:
    parts = [
        f"{name} {tuple(t.shape)}"
        for name, t in (
            ("dense keep mask", mask.keep_mask),
            ("key keep mask", mask.key_keep_mask),
            ("lengths", mask.key_lengths),
            ("additive bias", mask.additive_bias),
        )
        if t is not None
    ]
    offsets = [] if causal is False else [int(causal) if causal is not True else 0]
    if mask.causal_offset is not None:
        offsets.append(mask.causal_offset)
    if offsets:
        parts.append(f"causal with offset {min(offsets)}")
    return " and ".join(parts) if parts else "none"
