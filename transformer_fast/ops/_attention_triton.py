"""A whole call of attention that the extension checks and differentiates, and launchers in Python compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._attention_checks import kept_lengths, normal_lengths


def attention_by_triton(extension: Any, q: Any, k: Any, v: Any, parts: tuple, *options: Any) -> Tensor | None:
    """What the call gives, or None where the extension declines it.

    Args:
        extension: ``transformer_fast._C``.
        q, k, v: as the public function was given them.
        parts: the mask's keep, key_keep, lengths, bias and causal offset, and the scale, likewise.
        options: dropout_p, the seed (int64 (1,), or a number) and empty_rows.
    """
    keep, key_keep, lengths, *rest = parts
    if lengths is not None:
        lengths = _normal(lengths, q, k)
        if lengths is None:
            return None
    return extension.attention(True, q, k, v, keep, key_keep, lengths, *rest, *options)


def _normal(lengths: Tensor, q: Any, k: Any) -> Tensor | None:
    """The lengths as kernels take them; None where they do not fit."""
    if not isinstance(k, Tensor) or k.dim() != 4:
        return None
    kept = kept_lengths(lengths, k.shape[2])
    if kept is not None or not isinstance(q, Tensor) or q.dim() != 4:
        return kept
    B, _, Lq, _ = q.shape
    return normal_lengths(lengths, B, Lq, k.shape[2]) if lengths.shape in ((B,), (B, Lq)) else None
