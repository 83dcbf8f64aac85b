"""Patterns of hand-written modules that ``accelerate`` knows, in the order of the search."""

from . import (
    attention,
    blocks,
    d2l,
    embedding,
    feed_forward,
    functional_norm,
    layer,
    linear,
    norm,
    rms_norm,
    sublayer,
    t5,
    tensorflow,
)
from .base import Pattern

PATTERNS: tuple[Pattern, ...] = (
    *norm.PATTERNS,
    *rms_norm.PATTERNS,
    *functional_norm.PATTERNS,
    *linear.PATTERNS,
    *feed_forward.PATTERNS,
    *embedding.PATTERNS,
    *attention.PATTERNS,
    *layer.PATTERNS,
    *sublayer.PATTERNS,
    *tensorflow.PATTERNS,
    *d2l.PATTERNS,
    *blocks.PATTERNS,
    *t5.PATTERNS,
)

__all__ = ["PATTERNS", "Pattern"]
