"""Keras' attention layer and function on TensorFlow, its loss, and a decoder's causal mask."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
import keras
import numpy as np
import shared

Array = np.ndarray


def layer(fused: bool | None, p: float = 0.0, **options: Any) -> Any:
    """Return a function that calls MultiHeadAttention with projections that are the identity."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v = (a.swapaxes(1, 2).reshape(a.shape[0], a.shape[2], -1) for a in (q, k, v))
        m = keras.layers.MultiHeadAttention(shared.H, shared.D, dropout=p, flash_attention=fused)
        m.build(q.shape, v.shape, k.shape)
        width = shared.H * shared.D
        one = np.eye(width, dtype=np.float32).reshape(width, shared.H, shared.D)
        zeros = np.zeros((shared.H, shared.D), np.float32)
        m.set_weights(
            [one, zeros, one, zeros, one, zeros, np.eye(width).reshape(shared.H, shared.D, width), zeros.ravel()]
        )
        out = m(q, v, k, attention_mask=mask, training=p > 0, **options)
        return np.asarray(out).reshape(*q.shape[:2], shared.H, shared.D).swapaxes(1, 2)

    return attend


def function(name: str, **options: Any) -> Any:
    """Return `keras.ops.dot_product_attention`."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        out = keras.ops.dot_product_attention(q, k, v, **({} if mask is None else {name: mask}), **options)
        return np.asarray(out).swapaxes(1, 2)

    return attend


def loss(logits: Array, targets: Array) -> float:
    """Return the smoothed loss."""
    labels = np.eye(logits.shape[-1])[targets]
    return float(keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)(labels, logits))


def padding() -> str:
    """Say what the mask of an Embedding with mask_zero=True means for a sentence of padding alone."""
    ids = np.array([[3, 4, 0], [0, 0, 0]])
    x = keras.layers.Embedding(9, 8, mask_zero=True)(ids)
    out = np.asarray(keras.layers.MultiHeadAttention(2, 4)(x, x)[1])
    return "NaN" if np.isnan(out).all() else "zeros" if not out.any() else "finite"


masks = ["(Lq, Lk)", "(B, Lq, Lk)", "(B, 1, Lq, Lk)", "(B, H, Lq, Lk)"]
rows = {
    "`keras.layers.MultiHeadAttention`": {
        "empty": f"{shared.row_without_keys(layer(None), axes=(shared.B,))}; "
        f"a sentence of padding, `mask_zero`: {padding()}",
        "mask": shared.meanings(layer(None), masks),
        "causal": shared.causal(layer(None, use_causal_mask=True)),
        "dropout": f"{shared.dropout(layer(None, 0.5))}; `flash_attention=True`: {shared.dropout(layer(True, 0.5))}",
    },
    "`keras.ops.dot_product_attention`": {
        "empty": f"{shared.row_without_keys(function('mask'), axes=(1, 1))}; "
        f"bias of -inf: {shared.minus_infinity(lambda q, k, v, m=None: function('bias')(q, k, v, m[None, None]))}",
        "mask": f"`mask`: {shared.meanings(function('mask'))}. "
        f"`bias`: {shared.meanings(function('bias')).split('. ')[1]}",
        "causal": shared.causal(function("mask", is_causal=True)),
        "dropout": "no argument",
    },
    "`keras.losses.CategoricalCrossentropy`": {"smoothing": shared.smoothing(loss)},
}
shared.emit(rows, f"keras {version('keras')}, tensorflow {version('tensorflow-cpu')}")
