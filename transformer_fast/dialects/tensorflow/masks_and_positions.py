"""The tutorial's helper functions: masks and the positional encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.embedding import positional_table


def get_angles(pos: Tensor | float, i: Tensor | float, d_model: int) -> Tensor:
    """``pos / 10000 ** (2 * (i // 2) / d_model)``, fp64: i counts dimensions, so 2i and 2i + 1 share one angle.

    pos and i: numbers or tensors that broadcast, such as (position, 1) and (1, d_model).
    """
    pos, i = (torch.as_tensor(t, dtype=torch.float64) for t in (pos, i))
    return pos / 10000.0 ** (2 * torch.floor(i / 2) / d_model)


def positional_encoding(position: int, d_model: int) -> Tensor:
    """The sinusoidal encoding of positions 0 to position - 1, fp32 (1, position, d_model); sines in even dimensions."""
    return positional_table(position, d_model).unsqueeze(0)


def create_padding_mask(ids: Tensor) -> Tensor:
    """ids (B, L), 0 = padding -> float (B, 1, 1, L), 1.0 at padding."""
    return (ids == 0).float()[:, None, None]


def create_look_ahead_mask(size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Float (size, size), 1.0 above the diagonal. ``AttentionMask.causal()`` is the same mask without a tensor."""
    return torch.ones(size, size, device=device).triu(1)


def create_masks(inp: Tensor, tar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three masks of :class:`Transformer` for source ids (B, L_inp) and target ids (B, L_tar), 0 = padding.

    Returns:
        The encoder's padding (B, 1, 1, L_inp); the decoder's padding and look-ahead (B, 1, L_tar, L_tar); the padding
        of the encoder's outputs (B, 1, 1, L_inp).
    """
    look_ahead = create_look_ahead_mask(tar.shape[1], device=tar.device)
    return create_padding_mask(inp), torch.maximum(create_padding_mask(tar), look_ahead), create_padding_mask(inp)
