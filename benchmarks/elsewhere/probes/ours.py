"""This package, by the same questions: the one probe that runs where the package is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import shared
import torch

import transformer_fast as tfast

Array = np.ndarray


def tensors(*arrays: Array | None) -> list[Any]:
    """Return tensors of the arrays; None stays."""
    return [None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def attention(**options: Any) -> Any:
    """Return `attention`: a bool mask is a keep mask, a float mask is the bias."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v, given = tensors(q, k, v, mask)
        keep = tfast.AttentionMask.keep(given) if given is not None and given.dtype == torch.bool else None
        bias = None if keep is not None else given
        return tfast.attention(q, k, v, keep, bias=bias, **options).numpy()

    return attend


def sdpa(**options: Any) -> Any:
    """Return `scaled_dot_product_attention`."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        return tfast.scaled_dot_product_attention(*tensors(q, k, v, mask), **options).numpy()

    return attend


def flash_causal(q: Array, k: Array, v: Array) -> Array:
    """Attend by the function with flash-attention's signature."""
    q, k, v = (t.transpose(1, 2) for t in tensors(q, k, v))
    return tfast.compat.flash_attn_func(q, k, v, causal=True).transpose(1, 2).numpy()


def loss(logits: Array, targets: Array) -> float:
    """Return the smoothed loss; the output layer is the identity."""
    words = torch.eye(logits.shape[-1])
    return float(
        tfast.linear_cross_entropy(
            torch.from_numpy(logits), words, None, torch.from_numpy(targets), label_smoothing=0.1
        )
    )


rows = {
    "`tfast.attention`": {
        "empty": f'{shared.row_without_keys(attention())}; `empty_rows="zero"`: '
        f"{shared.row_without_keys(attention(empty_rows='zero'))}; bias of -inf: {shared.minus_infinity(attention())}",
        "mask": f"keep mask: {shared.meanings(attention()).split('. ')[0]}. "
        f"bias: {shared.meanings(attention()).split('. ')[1]}",
        "causal": f"{shared.causal(attention(causal=True))}; "
        f"`causal=2`: {shared.causal(attention(causal=2))}; `compat.flash_attn_func`: {shared.causal(flash_causal)}",
        "dropout": f"{shared.dropout(attention(dropout_p=0.5))}, in the kernel, with every mask",
    },
    "`tfast.scaled_dot_product_attention`": {
        "empty": f"{shared.row_without_keys(sdpa())}; float -inf: {shared.minus_infinity(sdpa())}",
        "mask": shared.meanings(sdpa()),
        "causal": shared.causal(sdpa(is_causal=True)),
        "dropout": f"{shared.dropout(sdpa(dropout_p=0.5))}, in the kernel",
    },
    "`tfast.linear_cross_entropy`": {"smoothing": shared.smoothing(loss)},
}
shared.emit(rows, "transformer_fast")
