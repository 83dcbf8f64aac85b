"""Plain computation of what flash-attention and FlexAttention document, per sequence and per pair."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transformer_fast.reference.attention import attention


def seen(Lq: int, Lk: int, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """Return the keys that each query sees, bool (Lq, Lk): the last query is at the last key."""
    left, right = window[0], 0 if causal else window[1]
    back = torch.arange(Lq)[:, None] + (Lk - Lq) - torch.arange(Lk)
    return ((back <= left) | torch.tensor(left < 0)) & ((-back <= right) | torch.tensor(right < 0))


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (Lq, H, D), logsumexp (H, Lq) and weights (H, Lq, Lk) of one sequence.

    Args:
        q: (Lq, H, D).
        k, v: (Lk, Hkv, D).
        allowed: bool (Lq, Lk).
        slopes: (H,) of ALiBi.
    """
    heads = (t.transpose(0, 1)[None] for t in (q, k, v))
    back = torch.arange(len(q))[:, None] + (len(k) - len(q)) - torch.arange(len(k))
    options = {"bias": None if slopes is None else -slopes[:, None, None] * back.abs(), "softcap": softcap or None}
    options |= {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "empty_rows": "zero"}
    out, weights, logsumexp = attention(*heads, keep=allowed[None, None], **options)
    return out[0].transpose(0, 1), logsumexp[0], weights[0]


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of numbers of x (heads, D), at one position, by the angles (R / 2,), as complex numbers."""
    R = 2 * angles.shape[0]
    first, second = (x[:, 0:R:2], x[:, 1:R:2]) if interleaved else (x[:, : R // 2], x[:, R // 2 : R])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    out = x.clone()
    if interleaved:
        out[:, 0:R:2], out[:, 1:R:2] = turned.real, turned.imag
    else:
        out[:, : R // 2], out[:, R // 2 : R] = turned.real, turned.imag
    return out


def tokens(lengths: Iterable[int], heads: int, D: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers (T, heads, D) that require a gradient."""
    return torch.randn(sum(lengths), heads, D, dtype=torch.float64).to(dtype).requires_grad_()


def assert_alike(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None], atol: float = 1e-10) -> None:
    """Assert that results and gradients agree, -inf included."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=atol, rtol=atol)


def plain_packed(q, k, v, lengths_q, lengths_k, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """Return out (Tq, H, D), logsumexp (H, Tq) and the weights per sequence, computed sequence by sequence."""
    results = []
    for b, (a, c, d) in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))):
        own, allowed = (
            slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            seen(len(a), len(c), causal, window),
        )
        results.append(plain_attention(a, c, d, allowed, softcap=softcap, slopes=own, scale=scale))
    if not results:
        return q, q.sum(-1).t(), ()
    outs, rows, weights = zip(*results)
    return torch.cat(outs), torch.cat(rows, 1), weights
