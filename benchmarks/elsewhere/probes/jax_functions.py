"""JAX's attention function, flax's layer, and optax's labels."""

from __future__ import annotations

import inspect
import warnings
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared
from flax import nnx

warnings.simplefilter("ignore")
Array = np.ndarray


def function(name: str, **options: Any) -> Any:
    """Return `jax.nn.dot_product_attention`; float masks go in as the bias if `name` says so."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v = (jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, **({name: mask} if mask is not None else {}), **options)
        return np.asarray(out).swapaxes(1, 2)

    return attend


def layer(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Attend by flax's function, which its MultiHeadAttention calls."""
    q, k, v = (jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v))
    return np.asarray(nnx.dot_product_attention(q, k, v, mask=mask)).swapaxes(1, 2)


def flax_dropout(q: Array, k: Array, v: Array) -> Array:
    """Drop half of the weights."""
    q, k, v = (jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v))
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "deterministic": False}
    return np.asarray(nnx.dot_product_attention(q, k, v, **options)).swapaxes(1, 2)


def loss(logits: Array, targets: Array) -> float:
    """Return the loss with smoothed labels."""
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), 0.1)
    return float(optax.softmax_cross_entropy(logits, labels).mean())


names = inspect.signature(jax.nn.dot_product_attention).parameters
causal_mask = nnx.make_causal_mask(jnp.ones((shared.B, 4)))
rows = {
    "`jax.nn.dot_product_attention`": {
        "empty": f"{shared.row_without_keys(function('mask'))}; "
        f"bias of -inf: {shared.minus_infinity(function('bias'))}",
        "mask": f"`mask`: {shared.meanings(function('mask'))}. "
        f"`bias`: {shared.meanings(function('bias')).split('. ')[1]}",
        "causal": shared.causal(function("mask", is_causal=True)),
        "dropout": "an argument" if any("dropout" in name for name in names) else "no argument",
    },
    "`flax.nnx.dot_product_attention`": {
        "empty": shared.row_without_keys(layer),
        "mask": shared.meanings(layer),
        "causal": f"`make_causal_mask` is square: {causal_mask.shape[-2:]}",
        "dropout": shared.dropout(flax_dropout),
    },
    "`optax.smooth_labels`": {"smoothing": shared.smoothing(loss)},
}
shared.emit(rows, ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax")))
