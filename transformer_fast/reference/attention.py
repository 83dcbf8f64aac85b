"""Masked scaled dot-product attention, in plain PyTorch: what every attention kernel must compute.

``softmax(q k^T * scale + bias, over the allowed keys) v`` with dropout on the weights (Vaswani et al.,
"Attention Is All You Need", 2017, section 3.2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import dense_keep
from .dropout import attention_keep, rescale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    causal: int | None = None,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    empty_rows: str = "uniform",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the keys that every part of the mask allows.

    Args:
        q: (B, H, Lq, D), any float dtype.
        k, v: (B, Hkv, Lk, D) with ``H % Hkv == 0``: query head h reads key head ``h // (H / Hkv)``.
        keep, key_keep, lengths, causal: the mask in normal form (see :mod:`transformer_fast.masks`).
        bias: added to the scaled scores, broadcastable to (B, H, Lq, Lk); ``-inf`` blocks.
        scale: multiplies ``q k^T``.
        dropout_p, seed: dropout on the weights by :func:`~transformer_fast.reference.dropout.attention_keep`.
        empty_rows: a query with no allowed key gets weight ``1 / Lk`` on every key ("uniform", what filling with
            -1e9 computes) or no weight at all ("zero"). No gradient reaches q and k from it either way.

    Returns:
        out (B, H, Lq, D) in q's dtype; weights before dropout (B, H, Lq, Lk) in q's dtype; logsumexp (B, H, Lq) of
        the scores, fp32 (fp64 for fp64 input), ``-inf`` for an empty row.

    A NaN or Inf stored in a key or value reaches just the queries that are allowed to see it.
    """
    B, H, Lq, _ = q.shape
    Hkv, Lk = k.shape[1:3]
    k, v = (t.repeat_interleave(H // Hkv, dim=1) for t in (k, v))

    allowed = dense_keep(keep, key_keep, lengths, causal, Lq, Lk, q.device)
    if bias is not None:
        allowed = allowed & (bias != float("-inf"))
    allowed = allowed.expand(B, H, Lq, Lk)
    empty = ~allowed.any(-1, keepdim=True)

    scores = _scores(q, k) * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    logsumexp = torch.logsumexp(scores, -1)

    # A row of equal scores has uniform weights, and the fill cuts it off from q and k.
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1)
    if empty_rows == "zero":
        weights = weights.masked_fill(empty, 0.0)
    weights = weights.to(q.dtype)

    dropped = weights
    if dropout_p > 0.0:
        kept = attention_keep(seed, dropout_p, B, H, Lq, Lk)
        dropped = (weights * rescale(dropout_p)).masked_fill(~kept, 0.0)
    return _weighted_sum(dropped, v, allowed), weights, logsumexp


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T, fp32 or wider. A non-finite key makes its own column NaN without entering the product: otherwise
    its zero gradient times its NaN would reach every query, allowed or not."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    bad = ~k.isfinite()
    scores = (q @ k.masked_fill(bad, 0.0).transpose(-2, -1)).to(wide)
    return scores.masked_fill(bad.any(-1).unsqueeze(-2), float("nan"))


def _weighted_sum(weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """weights @ v, where a weight of zero on a blocked key also silences a NaN or Inf value."""
    bad = ~v.isfinite()
    out = weights @ v.masked_fill(bad, 0.0)
    reached = allowed.to(torch.float32) @ bad.to(torch.float32) > 0
    return out.masked_fill(reached, float("nan"))
