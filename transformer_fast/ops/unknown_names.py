"""Hints for keyword arguments that have another name in other libraries.

The public ops collect unknown keyword arguments in ``**unknown``, which costs one empty dictionary per call. A wrapper
that catches the TypeError would cost several times as much per call. ``**unknown`` is annotated as ``Never``, so type
checkers refuse unknown names.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_SHARED = {
    "is_causal": "causal=True",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "deterministic": "nothing: two runs agree bit for bit",
    "return_lse": "return_logsumexp=True",
    "return_attn_probs": "return_logsumexp=True",
}
_ATTENTION = {
    **_SHARED,
    "return_attn_probs": "return_weights=True for the weights, return_logsumexp=True for the logsumexp",
    "attn_mask": (
        "mask=AttentionMask.keep(t) if True means kept (scaled_dot_product_attention), mask=AttentionMask.blocked(t) "
        "if True means blocked (nn.MultiheadAttention), bias=t for a float added to the scores"
    ),
    "attn_bias": "bias=t for a float added to the scores, causal=True for a look-ahead",
    "attention_mask": "mask=AttentionMask.keep(t[:, None, None, :]) for a (B, Lk) mask, 1 = kept",
    "key_padding_mask": "mask=AttentionMask.blocked(t[:, None, None, :]) for a (B, Lk) mask, True = blocked",
    "valid_lens": "mask=AttentionMask.lengths(t)",
    "lengths": "mask=AttentionMask.lengths(t)",
    "alibi_slopes": "mask=AttentionMask.alibi(slopes, offset), offset Lk - Lq if the last query is at the last key",
    "window_size": "mask=AttentionMask.window(left, right)",
    "need_weights": "return_weights=True",
    "cu_seqlens_q": "attention_packed, which takes packed sequences",
}
_PACKED = {
    **_SHARED,
    "max_q": "max_seqlen_q=, its name now",
    "max_k": "max_seqlen_k=, its name now",
    "attn_mask": "causal=True, mask=AttentionMask.keep(t) of keys (Tk,), or bias=, one tensor per sequence",
    "window_size": "mask=AttentionMask.window(left, right)",
    "alibi_slopes": "mask=AttentionMask.alibi(slopes)",
    "attn_bias": "bias=, one tensor (H, Lq, Lk) per sequence; causal=True for a look-ahead",
    "key_padding_mask": "mask=AttentionMask.blocked(t), t (Tk,); packed sequences have no padding",
    "need_weights": "return_weights=True",
}
_DECODE = {
    **{name: hint for name, hint in _SHARED.items() if not hint.startswith("dropout_p")},
    "return_softmax_lse": "return_logsumexp=True",
    "cache_seqlens": "lengths, which count the newest keys too",
    "block_table": "page_table=",
    "window_size": "mask=AttentionMask.window(left)",
    "alibi_slopes": "mask=AttentionMask.alibi(slopes)",
    "attn_mask": "lengths: keys past them are not read",
    "key_padding_mask": "lengths: keys past them are not read",
    "dropout": "nothing: decoding has no dropout",
    "dropout_p": "nothing: decoding has no dropout",
}
_NORM = {
    "normalized_shape": "nothing: layer_norm always normalises the last dimension",
    "gamma": "weight",
    "beta": "bias",
    "epsilon": "eps=",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
}
_EMBED = {
    "input": "ids",
    "embedding": "weight",
    "pe": "table=",
    "positions": "table=, and offset= for the position of the first id",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    **dict.fromkeys(
        ("max_norm", "norm_type", "scale_grad_by_freq", "sparse"), "torch.nn.functional.embedding, which supports it"
    ),
}
HINTS: Mapping[str, Mapping[str, str]] = {
    "attention": _ATTENTION,
    "attention_packed": _PACKED,
    "attention_decode": _DECODE,
    "layer_norm": _NORM,
    "embed": _EMBED,
}
"""Hints by public op and by the given name."""


def unknown_names(
    op: Callable[..., Any], names: Iterable[str], called: str = "", hints: Mapping[str, str] | None = None
) -> TypeError:
    """Error for unknown keyword arguments of an op.

    For the name of another library the message says what to write, for a misspelt one the name that is close to it.

    Args:
        op: public function of the op.
        names: the unknown keywords.
        called: public name of the function that was called, if it is not the op.
        hints: what to write, by the unknown name; those of :data:`HINTS` by default.
    """
    known = HINTS[op.__name__] if hints is None else hints
    parts = [f"{name}; {f'write {known[name]}' if name in known else near(name, known_names(op))}" for name in names]
    return TypeError(f"{called or op.__name__}() got an unexpected keyword argument: " + ". Also: ".join(parts))


def known_names(op: Callable[..., Any]) -> list[str]:
    """Names of the arguments of an op."""
    return [name for name in inspect.signature(op).parameters if name != "unknown"]


def near(name: str, known: Sequence[str]) -> str:
    """Hint for a name that is unknown: the known one that is close to it, or all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
