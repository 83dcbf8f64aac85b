"""``flex_attention`` with the signature of ``torch.nn.attention.flex_attention``, without a ``score_mod``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..masks import AttentionMask
from ..ops.attention import attention
from .block_masks import attention_mask_of
from .bounds import check_dimensions, check_heads, with_logsumexp

_OP = "flex_attention"


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``flex_attention`` (Dong et al., "Flex Attention", 2024) by :func:`transformer_fast.attention`.

    Args:
        query: (B, H, Lq, D); float32, float16, bfloat16 (float64 on CPU). D up to 256 on a GPU.
        key, value: (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv).
        score_mod: None. ALiBi and relative positions are ``AttentionMask.alibi`` and ``AttentionMask.relative``; a
            softcap is an option of ``attention``.
        block_mask: a BlockMask (1 or B, 1 or H, Lq, Lk), converted by :func:`attention_mask_of` in every call; or the
            converted ``AttentionMask``, which is faster.
        scale: multiplies the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: H may be a multiple of Hkv.
        return_lse: also return the logsumexp.
        kernel_options: accepted and ignored; it chooses among torch's kernels.
        return_aux: torch's ``AuxRequest(lse=True)``: also return its ``AuxOutput`` with the logsumexp.

    Returns:
        (B, H, Lq, Dv) in query's dtype, 0 for a query that sees no key; or a tuple of the output and the natural
        logsumexp (B, H, Lq) in float32 (float64 for float64), -inf for a query that sees no key, or an ``AuxOutput``
        with the logsumexp.

    Raises:
        NotImplementedError: for a ``score_mod``, and for ``return_aux`` with ``max_scores``.
        TypeError: for non-tensors, non-float or mixed dtypes, or a block mask of another type.
        ValueError: for shapes, devices or options that do not fit; the message names them.
    """
    if score_mod is not None:
        raise NotImplementedError(
            f"{_OP}: score_mod is not supported. For ALiBi and relative positions pass AttentionMask.alibi(slopes) or "
            "AttentionMask.relative(weight) as block_mask; for a softcap call attention(..., softcap=c)"
        )
    if return_aux is not None and return_lse:
        raise ValueError(f"{_OP}: return_lse and return_aux cannot be combined")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{_OP}: return_aux with max_scores is not supported")
    layouts = {"query": "(B, H, Lq, D)", "key": "(B, Hkv, Lk, D)", "value": "(B, Hkv, Lk, Dv)"}
    check_dimensions(_OP, layouts, query, key, value)
    check_heads(_OP, query, key, 1, enable_gqa)
    mask = block_mask
    if mask is not None and not isinstance(mask, AttentionMask):
        mask = attention_mask_of(block_mask)
        lengths = query.shape[2], key.shape[2]
        if block_mask.shape[-2:] != lengths:
            raise ValueError(f"{_OP}: block_mask {block_mask.shape} must end in (Lq, Lk) = {lengths}")
    more = bool(return_lse or (return_aux is not None and return_aux.lse))
    results = attention(query, key, value, mask, scale=scale, empty_rows="zero", return_logsumexp=more)
    if return_aux is None:
        return results
    from torch.nn.attention.flex_attention import AuxOutput

    out, logsumexp = with_logsumexp(results, more)
    return out, AuxOutput(lse=logsumexp)
