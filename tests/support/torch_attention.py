"""Masks of every form that torch.nn takes, with one set of sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

N, L, S, E, H = 3, 7, 5, 16, 4
INF = float("-inf")
Masks = dict[str, Tensor]


def look_ahead(length: int) -> Tensor:
    """Return the look-ahead mask as floats."""
    return nn.Transformer.generate_square_subsequent_mask(length)


def padding(length: int) -> Tensor:
    """Return a mask, True = blocked; one row has no padding, one keeps a single key."""
    return torch.arange(length) >= torch.tensor([length, length - 2, 1]).unsqueeze(1)


def some_blocked(*shape: int) -> Tensor:
    """Return a random mask that leaves each query its first key."""
    blocked = torch.rand(shape) > 0.6
    blocked[..., 0] = False
    return blocked


def as_float(blocked: Tensor) -> Tensor:
    """Return the mask as floats that are added to the scores."""
    return torch.zeros(blocked.shape).masked_fill(blocked, INF)


def typed(masks: Masks, dtype: torch.dtype) -> Masks:
    """Convert float masks to a dtype."""
    return {name: m.to(dtype) if m.is_floating_point() else m for name, m in masks.items()}


MASKS: dict[str, Callable[[], Masks]] = {
    "none": dict,
    "padding": lambda: {"key_padding_mask": padding(S)},
    "float padding": lambda: {"key_padding_mask": torch.randn(N, S)},
    "padding of -inf": lambda: {"key_padding_mask": as_float(padding(S))},
    "bool": lambda: {"attn_mask": some_blocked(L, S)},
    "bool by head": lambda: {"attn_mask": some_blocked(N * H, L, S)},
    "float": lambda: {"attn_mask": torch.randn(L, S)},
    "float by head": lambda: {"attn_mask": torch.randn(N * H, L, S)},
    "bool and padding": lambda: {"attn_mask": some_blocked(L, S), "key_padding_mask": padding(S)},
    "float and padding": lambda: {"attn_mask": torch.randn(L, S), "key_padding_mask": padding(S)},
    "both float": lambda: {"attn_mask": as_float(some_blocked(L, S)), "key_padding_mask": torch.randn(N, S)},
}
