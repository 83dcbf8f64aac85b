"""Embedding, scale, positional encoding and dropout, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import dropout


def positional_table(length: int, d_model: int) -> Tensor:
    """The sinusoidal positional encoding (Vaswani et al., 2017, section 3.5): fp32 (length, d_model).

    ``PE[pos, 2i] = sin(pos / 10000**(2i/d))`` and ``PE[pos, 2i+1] = cos(pos / 10000**(2i/d))``. Computed in fp64:
    with frequencies in fp32 the error at position 5000 is 4e-4. An odd ``d_model`` lacks the last cosine.
    """
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    frequency = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = position * frequency
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return table[:, :d_model].float()


def embed(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None = None,
    *,
    scale: float = 1.0,
    offset: int | Tensor = 0,
    padding_idx: int | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``dropout(weight[ids] * scale + table[offset : offset + L])``.

    Args:
        ids: int (..., L), each in [0, vocab).
        weight: (vocab, d), any float dtype.
        table: (>= offset + L, d) positional encoding, or None.
        offset: position of the first id, or int (...), one per sequence.
        padding_idx: row of ``weight`` without a gradient.

    Returns:
        (..., L, d) in the dtype of ``weight``.
    """
    x = F.embedding(ids, weight, padding_idx) * scale
    return dropout(x, dropout_p, seed) if table is None else add_positional(x, table, offset, dropout_p, seed)


def add_positional(
    x: Tensor, table: Tensor, offset: int | Tensor = 0, dropout_p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """``dropout(x + table[offset : offset + L])`` for x (..., L, d), in x's dtype."""
    if isinstance(offset, Tensor):
        encoding = F.embedding(offset.unsqueeze(-1) + torch.arange(x.shape[-2], device=x.device), table)
    else:
        encoding = table[offset : offset + x.shape[-2]]
    encoded = x + encoding
    return dropout(encoded.to(x.dtype), dropout_p, seed)
