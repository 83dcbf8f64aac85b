"""Inputs of the probes, right answers in float64, and words for what a library returned. NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

B, H, LQ, LK, D = 3, 2, 4, 5, 8
"""All sizes differ, so that no axis of a mask is taken for another; the empty query is query 2."""
EMPTY = 2
BART = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 24,
    "init_std": 0.5,
}
"""Config of a small BART or Marian of transformers."""


def inputs(lq: int = LQ, lk: int = LK) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k and v (B, H, L, D)."""
    draws = np.random.default_rng(0)
    shapes = (B, H, lq, D), (B, H, lk, D), (B, H, lk, D)
    return tuple(draws.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def keeps() -> dict[str, np.ndarray]:
    """Return a mask of each shape, True where a query sees a key, without an empty row."""
    draws = np.random.default_rng(1)
    shapes = {
        "(Lq, Lk)": (LQ, LK),
        "(B, Lk)": (B, LK),
        "(B, Lq, Lk)": (B, LQ, LK),
        "(B, 1, 1, Lk)": (B, 1, 1, LK),
        "(B, 1, Lq, Lk)": (B, 1, LQ, LK),
        "(B, H, Lq, Lk)": (B, H, LQ, LK),
    }
    made = {}
    for name, shape in shapes.items():
        keep = draws.random(shape) < 0.5
        keep[..., 0], keep[..., -1] = True, False  # no row is empty, seen as it is or turned round
        made[name] = keep
    return made


def four_axes(name: str, mask: np.ndarray) -> np.ndarray:
    """Return a mask of one of the shapes of `keeps` with axes (B, H, Lq, Lk)."""
    if name == "(B, Lk)":
        return mask[:, None, None]
    return mask[:, None] if name == "(B, Lq, Lk)" else mask


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray | None = None, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return the attention; a row without keys gets zeros."""
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else np.where(keep, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ v


def tried(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the word for its error."""
    try:
        return np.asarray(call(), dtype=np.float64)
    except Exception as error:
        return f"refused ({type(error).__name__})"


def same(found: Any, answers: dict[str, Any]) -> str:
    """Return the name of the answer that was found."""
    if isinstance(found, str):
        return found
    for name, answer in answers.items():
        if np.shape(found) == np.shape(answer) and np.allclose(found, answer, atol=2e-5):
            return name
    return "NaN" if np.isnan(found).all() else "NaN in part" if np.isnan(found).any() else "something else"


def row_without_keys(attend: Callable[..., Any], turned: bool = False, axes: tuple[int, ...] = ()) -> str:
    """Give a query a bool mask (*axes, Lq, Lk) that blocks its keys; `turned` if the library's True blocks."""
    q, k, v = inputs()
    keep = np.ones((*axes, LQ, LK), bool)
    keep[..., EMPTY, :] = False
    out = tried(lambda: attend(q, k, v, ~keep if turned else keep))
    if not isinstance(out, str):
        others = np.arange(LQ) != EMPTY
        if not np.allclose(out[:, :, others], attention(q, k, v)[:, :, others], atol=2e-5):
            return "other rows differ"
        out = out[:, :, EMPTY]
    return same(out, {"zeros": np.zeros((B, H, D)), "the mean of all values": v.mean(2)})


def minus_infinity(attend: Callable[..., Any]) -> str:
    """Give a query a float mask of -inf for all its keys."""

    def added(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray) -> Any:
        return attend(q, k, v, np.where(keep, 0.0, -np.inf).astype(np.float32))

    return row_without_keys(added)


def meanings(attend: Callable[..., Any], names: list[str] | None = None) -> str:
    """Say how a mask of each shape and kind is understood: one clause per kind, shapes that agree together."""
    q, k, v = inputs()
    kinds = {"bool": np.bool_, "0 and 1 in float": np.float32}
    clauses = []
    for kind, dtype in kinds.items():
        found: dict[str, list[str]] = {}
        for name, keep in keeps().items():
            if names is not None and name not in names:
                continue
            whole = four_axes(name, keep)
            answers = {
                "True keeps" if kind == "bool" else "1 keeps": attention(q, k, v, whole),
                "True drops" if kind == "bool" else "1 drops": attention(q, k, v, ~whole),
                "is added": attention(q, k, v, bias=whole.astype(np.float64)),
                "is ignored": attention(q, k, v),
            }
            word = same(tried(lambda keep=keep, dtype=dtype: attend(q, k, v, keep.astype(dtype))), answers)
            found.setdefault(word.split(" (")[0], []).append(name)
        words = [f"{word} {', '.join(shapes)}" if len(found) > 1 else word for word, shapes in sorted(found.items())]
        clauses.append(f"{kind}: {'; '.join(words)}")
    return ". ".join(clauses)


def causal(attend: Callable[..., Any]) -> str:
    """Say which corner `causal` starts from, with 2 queries and 4 keys."""
    q, k, v = inputs(2, 4)
    corners = {
        "top left": attention(q, k, v, np.tril(np.ones((2, 4), bool))),
        "bottom right": attention(q, k, v, np.tril(np.ones((2, 4), bool), 2)),
        "not causal": attention(q, k, v),
    }
    return same(tried(lambda: attend(q, k, v)), corners)


def dropout(attend: Callable[..., Any]) -> str:
    """Say what a call with half of the weights dropped does: one value of 1 per key, so that the sum shows."""
    q, k, _ = inputs(LQ, 64)
    ones = np.ones((B, H, 64, D), np.float32)
    out = tried(lambda: attend(q, k, ones))
    if isinstance(out, str):
        return out
    if np.allclose(out, 1.0, atol=1e-4):
        return "ignored"
    return "applied, the rest is scaled" if 0.7 < out.mean() < 1.3 else f"applied, sums are {out.mean():.2f}"


def smoothing(loss: Callable[[np.ndarray, np.ndarray], float], words: int = 7, pad: int = 1) -> str:
    """Say how a loss with smoothing 0.1 spreads it, from its change between pairs of logits (N, words).

    A constant that does not depend on the logits, such as the entropy of the targets, is no part of the answer.
    """
    draws, targets = np.random.default_rng(2), np.array([3, 5, 2])
    pairs = draws.standard_normal((6, 2, 3, words)).astype(np.float32)
    hot = np.eye(words)[targets]
    padding = np.eye(words)[pad]
    spread = {
        "eps / V to every word": 0.9 * hot + 0.1 / words,
        "eps / (V - 1) to the others": 0.9 * hot + 0.1 / (words - 1) * (1 - hot),
        "eps / (V - 2) to the others, none to padding": 0.9 * hot + 0.1 / (words - 2) * (1 - hot - padding),
        "none": hot,
    }

    def cross_entropy(logits: np.ndarray, wanted: np.ndarray) -> float:
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(-(wanted * logs).sum(-1).mean())

    found = [tried(lambda pair=pair: loss(pair[0], targets) - loss(pair[1], targets)) for pair in pairs]
    if isinstance(found[0], str):
        return found[0]
    ratios = {}
    for name, wanted in spread.items():
        right = [cross_entropy(a, wanted) - cross_entropy(b, wanted) for a, b in pairs]
        for scale, unit in ((1, ""), (len(targets), ", summed over tokens")):
            if np.allclose(found, np.array(right) * scale, atol=2e-4):
                ratios[name + unit] = True
    return next(iter(ratios), "something else")


def table_of_positions(table: np.ndarray) -> str:
    """Say what a sinusoidal table (length, width) has in its first row, and how sine and cosine lie."""
    width = table.shape[1]
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    others = 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    for first in range(5):
        angles = (np.arange(len(table)) + first)[:, None]
        for name, rate in (("", rates), (", rates of tensor2tensor", others)):
            halves = np.concatenate([np.sin(angles * rate), np.cos(angles * rate)], 1)
            turns = np.stack([np.sin(angles * rate), np.cos(angles * rate)], 2).reshape(len(table), width)
            for order, right in (("halves", halves), ("interleaved", turns)):
                if np.allclose(table, right, atol=1e-4):
                    return f"sinusoidal, {order}{name}, from {first}"
    return "something else"


def emit(rows: dict[str, dict[str, str]], version: str) -> None:
    """Print the rows of a probe as one line of JSON, the last line of its output."""
    print(json.dumps([{"library": name, "version": version, "cells": cells} for name, cells in rows.items()]))
