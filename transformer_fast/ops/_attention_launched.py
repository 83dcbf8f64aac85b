"""A whole call of attention that the extension checks and differentiates, and launchers in Python compute."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ._attention_checks import kept_lengths, normal_lengths


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
        lengths = _normal(lengths, q, k)
        if lengths is None:
            return None
    return extension.attention_launched(q, k, v, keep, key_keep, lengths, *rest, *options)


def _normal(lengths: Tensor, q: Any, k: Any) -> Tensor | None:
    """The lengths as kernels take them; None where they do not fit."""
    if not isinstance(k, Tensor) or k.dim() != 4:
        return None
    kept = kept_lengths(lengths, k.shape[2])
    if kept is not None or not isinstance(q, Tensor) or q.dim() != 4:
        return kept
    B, _, Lq, _ = q.shape
    return normal_lengths(lengths, B, Lq, k.shape[2]) if lengths.shape in ((B,), (B, Lq)) else None


@functools.cache
def set_launchers(extension: Any) -> None:
    """Tell the extension what launches attention, and where to find calls that only repeat launches."""
    from ..configs import LONG
    from ..kernels import attention, attention_backward, attention_decode
    from ..kernels.attention_backward_kv import DELTA_ROWS
    from ..kernels.calls import find

    def split(options: tuple) -> dict[str, Any]:
        """The keywords of a launcher from all that follows its tensors: the mask's parts, and where sequences lie."""
        *mask, cu_seqlens_q, cu_seqlens_k, max_q, max_k = options
        keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows = mask
        shared = {"scale": scale, "dropout_p": dropout_p, "seed": seed, "zero_empty_rows": zero_empty_rows}
        if cu_seqlens_q is None:
            parts = {"keep": keep, "key_keep": key_keep, "lengths": lengths, "bias": bias, "causal": causal}
        else:
            parts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_q": max_q, "max_k": max_k}
            parts["causal"] = causal is not None
        return shared | parts

    def forward(q, k, v, *options):
        packed = options[-4] is not None
        launcher = attention.attention_packed_forward if packed else attention.attention_forward
        return launcher(q, k, v, **split(options))

    def backward(grad_out, q, k, v, out, logsumexp, *options):
        packed = options[-4] is not None
        launcher = attention_backward.attention_packed_backward if packed else attention_backward.attention_backward
        return launcher(grad_out, q, k, v, out, logsumexp, **split(options))

    def decode(q, k_cache, v_cache, lengths, page_table, causal, scale):
        options = {"lengths": lengths, "page_table": page_table, "causal": causal, "scale": scale}
        return attention_decode.attention_decode(q, k_cache, v_cache, **options)[0]

    extension.set_decode_launcher(decode, attention_decode.division)
    extension.set_attention_launchers(forward, backward, find, LONG, DELTA_ROWS)
