"""A whole call of attention that the extension checks and differentiates, and launchers in Python compute."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ._attention_checks import kept_lengths


def by_launchers(extension: Any, q: Any, k: Any, v: Any, parts: tuple, *options: Any) -> Tensor | None:
    """What the call gives, or None where the extension declines it.

    Args:
        extension: ``transformer_fast._C``.
        q, k, v: as the door was given them.
        parts: the mask's keep, key_keep, lengths, bias and causal offset, and the scale, likewise.
        options: dropout_p, the seed (int64 (1,), or a number) and empty_rows.
    """
    keep, key_keep, lengths, *rest = parts
    if lengths is not None:
        lengths = kept_lengths(lengths, k.shape[2]) if isinstance(k, Tensor) and k.dim() == 4 else None
        if lengths is None:
            return None
    _set_launchers(extension)
    return extension.attention_launched(q, k, v, keep, key_keep, lengths, *rest, *options)


@functools.cache
def _set_launchers(extension: Any) -> None:
    from ..kernels.attention import attention_forward
    from ..kernels.attention_backward import attention_backward

    def forward(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows):
        return attention_forward(
            q, k, v, keep=keep, key_keep=key_keep, lengths=lengths, bias=bias, causal=causal, scale=scale,
            dropout_p=dropout_p, seed=seed, zero_empty_rows=zero_empty_rows,
        )  # fmt: skip

    def backward(
        grad_out, q, k, v, out, logsumexp, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed,
        zero_empty_rows,
    ):  # fmt: skip
        return attention_backward(
            grad_out, q, k, v, out, logsumexp, keep=keep, key_keep=key_keep, lengths=lengths, bias=bias, causal=causal,
            scale=scale, dropout_p=dropout_p, seed=seed, zero_empty_rows=zero_empty_rows,
        )  # fmt: skip

    extension.set_attention_launchers(forward, backward)
