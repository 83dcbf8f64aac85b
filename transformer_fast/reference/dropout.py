"""The dropout mask: a pure function of one seed and the element's own coordinates.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
128-bit counter and a 64-bit key into 128 random bits, with no state. The key is the seed; the counter is the position
of the element. So every device and every tiling draws the same bits, and the backward pass draws the bits again instead
of storing them. One call serves eight elements, 16 bits each: an element is dropped when its draw is below ``round(p *
65536)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10.

    Args:
        counter: four int64 tensors of one broadcast shape holding unsigned 32-bit words, least significant first.
        seed: 64-bit key (any Python int; taken modulo 2**64).

    Returns:
        Four int64 tensors of that shape holding unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32-bit product, computed in int64 in two halves to avoid overflow."""
    upper, lower = constant * (x >> 16), constant * (x & 0xFFFF)
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)


def threshold(p: float) -> int:
    """Number of draws, of 65536, that drop an element: draws below it."""
    return round(p * 65536)


def rescale(p: float) -> float:
    """Factor of kept values: 1 / (1 - p), and 0 if everything is dropped."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def attention_keep(seed: Tensor, p: float, B: int, H: int, Lq: int, Lk: int) -> Tensor:
    """Attention weights that dropout keeps: bool (B, H, Lq, Lk).

    Weight (b, h, i, j) has counter (call, i, h, b). One call serves four pairs of keys 8 apart (the keys that one
    thread of a tensor-core accumulator holds): bits 3 and 4 of j choose the word, bit 0 the half of it, and the
    other bits of j are the call.
    """
    device = seed.device
    j = torch.arange(Lk, device=device)
    call, word = (j >> 5) * 4 + ((j >> 1) & 3), (j >> 3) & 3
    calls = torch.arange(-(-Lk // 32) * 4, device=device)
    b = torch.arange(B, device=device).view(B, 1, 1, 1)
    h = torch.arange(H, device=device).view(H, 1, 1)
    i = torch.arange(Lq, device=device).view(Lq, 1)
    return _keep((calls, i, h, b), call * 4 + word, j & 1, seed, p)


def elementwise_keep(seed: Tensor, p: float, rows: int, d: int) -> Tensor:
    """Elements of a (rows, d) matrix that dropout keeps: bool (rows, d).

    Element (r, c) has counter (c // 8, low word of r, high word of r, 0): one call serves eight neighbours.
    """
    device = seed.device
    r = torch.arange(rows, device=device).view(rows, 1)
    c, calls = torch.arange(d, device=device), torch.arange(-(-d // 8), device=device)
    return _keep((calls, r & MASK32, r >> 32, torch.zeros_like(calls)), c >> 1, c & 1, seed, p)


def _keep(counter: tuple[Tensor, ...], place: Tensor, half: Tensor, seed: Tensor, p: float) -> Tensor:
    """Compare draws with the threshold: of an element, one half of the word at a place among those of all calls."""
    words = torch.stack(torch.broadcast_tensors(*philox(counter, int(seed.item()))), dim=-1).flatten(-2)
    return (words[..., place] >> (16 * half)) & 0xFFFF >= threshold(p)


def dropout(
    x: Tensor,
    p: float,
    seed: Tensor | None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """``[residual +] dropout([relu] (x [+ bias]))`` in x's dtype.

    :func:`elementwise_keep` draws the mask; all dimensions but the last are rows.

    Args:
        x: (..., d), any float dtype.
        p: drop probability in [0, 1].
        seed: int64, one element; needed when ``p > 0``.
        bias: (d,), added first.
        residual: same shape as ``x``.
        relu: apply ReLU to ``x`` (with its bias) first.
    """
    y = x if bias is None else (x + bias).to(x.dtype)
    y = torch.relu(y) if relu else y
    if p > 0.0 and x.numel() > 0:
        keep = elementwise_keep(seed, p, x.numel() // x.shape[-1], x.shape[-1]).view(x.shape)
        y = torch.where(keep, y * rescale(p), torch.zeros((), dtype=x.dtype, device=x.device))
    return y if residual is None else residual + y
