"""Errors for keyword arguments that the functions of flash-attention 2 lack, as those of FlashAttention-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..ops.unknown_names import unknown_names

_SPLITS = "nothing: it says how the kernels share the work, and changes no result"
_FLOAT8 = "nothing, and pass q, k and v in float32, float16 or bfloat16: float8 is not served"
_RAGGED = "nothing, and pass queries (B, Lq, H, D): sequences of several lengths are not served with a cache"
VERSION_3 = {
    "qv": "torch.cat((q, qv), -1) for q and torch.cat((k, v), -1) for k, whose scores are the same",
    "attention_chunk": (
        "tfast.attention(q, k, v, AttentionMask.documents(ids) & AttentionMask.causal()), on (B, H, L, D), with the "
        "number of each token's chunk in ids (1, L)"
    ),
    "q_descale": _FLOAT8,
    "k_descale": _FLOAT8,
    "v_descale": _FLOAT8,
    "num_splits": _SPLITS,
    "pack_gqa": _SPLITS,
    "sm_margin": _SPLITS,
    "scheduler_metadata": _SPLITS,
    "num_heads_q": "flash_attn_func(q, k, v), with grouped heads in tensors of their own",
    "seqused_q": "cu_seqlens_q without the queries that are not used",
    "seqused_k": "compat.varlen_attn(..., seqused_k=), which has it",
    "page_table": "block_table=, its name in flash-attention 2",
    "cu_seqlens_q": _RAGGED,
    "cu_seqlens_k_new": _RAGGED,
    "max_seqlen_q": _RAGGED,
    "rotary_seqlens": "cache_seqlens, which gives the positions too",
    "s_aux": "tfast.attention(q, k, v, sinks=t)",
    "learnable_sink": "tfast.attention(q, k, v, sinks=t)",
}
"""Names of FlashAttention-3, and of its forks and successor."""
_PADDED = {
    "scale": "softmax_scale=",
    "sm_scale": "softmax_scale=",
    "dropout": "dropout_p=",
    "mask": "tfast.attention(q, k, v, mask), which takes masks",
    "attn_mask": "tfast.scaled_dot_product_attention(q, k, v, attn_mask), which takes masks",
    "block_mask": "compat.flex_attention(q, k, v, block_mask=block_mask), on (B, H, L, D)",
    "bias": "tfast.attention(q, k, v, bias=t), on (B, H, L, D)",
    "attn_bias": "tfast.attention(q, k, v, bias=t), on (B, H, L, D)",
    "key_padding_mask": "flash_attn_varlen_func, on what compat.unpad_input returns",
    "return_softmax_lse": "return_attn_probs=True, which returns the logsumexp too",
    "return_lse": "return_attn_probs=True, which returns the logsumexp too",
}
_CACHED = {
    **_PADDED,
    **dict.fromkeys(("dropout", "dropout_p"), "nothing: decoding has no dropout"),
    **dict.fromkeys(("return_attn_probs", "return_lse"), "return_softmax_lse=True"),
    "key_padding_mask": "cache_seqlens: keys past them are not read",
}


def unknown_flash_names(function: Callable[..., Any], names: Iterable[str]) -> TypeError:
    """Error for unknown keyword arguments of a function of flash-attention 2: each with what to write instead."""
    others = _CACHED if function.__name__ == "flash_attn_with_kvcache" else _PADDED
    error = unknown_names(function, names, hints=VERSION_3 | others)
    if VERSION_3.keys().isdisjoint(names):
        return error
    return TypeError(f"{error}. The arguments here are those of flash-attention 2, not of FlashAttention-3")


def no_dropout_p(op: str) -> TypeError:
    """Error for a ``dropout_p`` of None, as FlashAttention-3's order of arguments gives."""
    return TypeError(
        f"{op}: dropout_p must be a number, got None; FlashAttention-3 has another argument at its place: pass options "
        "by name"
    )
