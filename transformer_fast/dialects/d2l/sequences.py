"""Valid lengths, and heads folded into the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import AttentionMask
from ...masks.checks import may_be_keep
from ...tracing import is_traced
from ..common import merge_heads, split_heads

ValidLens = Tensor | AttentionMask | None
"""Integers (B,) or (B, Lq); an AttentionMask; or None: every key."""


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """(B, L, num_heads * d) -> (B * num_heads, L, d)."""
    return split_heads(X, num_heads).flatten(0, 1)


def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """(B * num_heads, L, d) -> (B, L, num_heads * d): undoes :func:`transpose_qkv`."""
    return merge_heads(X.unflatten(0, (-1, num_heads)))


def sequence_mask(X: Tensor, valid_len: Tensor, value: float = 0) -> Tensor:
    """Copy of X (B, L, ...) with ``value`` at and past the valid length (B,) per sequence."""
    if valid_len.shape != X.shape[:1]:
        raise ValueError(f"sequence_mask: expected one length for each of {X.shape[0]}, got {tuple(valid_len.shape)}")
    beyond = torch.arange(X.shape[1], device=X.device) >= valid_len.unsqueeze(1)
    return X.masked_fill(beyond.view(*X.shape[:2], *(1,) * (X.dim() - 2)), value)


def masked_softmax(X: Tensor, valid_lens: ValidLens) -> Tensor:
    """Softmax over the last axis of scores (B, Lq, Lk), weight 0 at and past each valid length.

    valid_lens: integers (B,) or (B, Lq), or None. A length of 0 gives uniform weights. 16-bit scores are summed in
    fp32. Raises ValueError for scores of another rank or lengths that do not fit.
    """
    if X.dim() != 3:
        raise ValueError(f"masked_softmax: expected scores (B, Lq, Lk), got shape {tuple(X.shape)}")
    scores = X if X.dtype == torch.float64 else X.float()
    mask = lengths_mask("masked_softmax", valid_lens, *X.shape)
    if mask is not None:
        added = mask.added(*X.shape[1:], scores.dtype)
        if added is not None:
            scores = scores + added.squeeze(1)
        keep = mask.dense(*X.shape[1:], X.device).squeeze(1)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1).to(X.dtype)


def lengths_mask(where: str, valid_lens: ValidLens, B: int, Lq: int, Lk: int) -> AttentionMask | None:
    """AttentionMask of valid lengths; raises for other dtypes and shapes."""
    if valid_lens is None or isinstance(valid_lens, AttentionMask):
        return valid_lens
    if not isinstance(valid_lens, Tensor) or valid_lens.is_floating_point() or valid_lens.dtype == torch.bool:
        what = valid_lens.dtype if isinstance(valid_lens, Tensor) else type(valid_lens).__name__
        raise TypeError(
            f"{where}: valid_lens must be an integer tensor of lengths, got {what}; a bool keep mask goes in as "
            "AttentionMask.keep(mask), a float mask of 1.0 = blocked as AttentionMask.blocked(mask)"
        )
    shape = tuple(valid_lens.shape)
    if not (is_traced() or shape == (B,) or shape == (B, Lq)):
        raise ValueError(
            f"{where}: valid_lens must be (B,) = ({B},) or (B, Lq) = ({B}, {Lq}), got shape {tuple(valid_lens.shape)}"
        )
    return certain_lengths(valid_lens, Lk)


def certain_lengths(lengths: Tensor, Lk: int) -> AttentionMask:
    """AttentionMask of lengths (B,) or (B, Lq) that skips the check for keep masks."""
    if may_be_keep(lengths, Lk):
        return AttentionMask.keep(torch.arange(Lk) < lengths[:, None, :, None])
    return AttentionMask.lengths(lengths)
