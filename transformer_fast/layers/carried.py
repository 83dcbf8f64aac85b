"""Packed tokens stored on a padded tensor, passed from one layer to the next.

A layer that skips padding still returns a padded tensor (B, L, d). The next layer that skips padding reads the packed
tokens (T, d) from an attribute of that tensor. So the tokens are packed once, and gradients skip the padding.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..masks.packing import Packing, take, unpack

_TOKENS = "_transformer_fast_tokens"


@dataclasses.dataclass(frozen=True)
class _Carried:
    tokens: Tensor
    packing: Packing
    version: int


def with_tokens(tokens: Tensor, packing: Packing) -> Tensor:
    """Pad tokens (T, d) with zeros to (B, L, d), and store the tokens on the result."""
    padded = unpack(tokens, packing)
    if not padded.is_inference():  # an inference tensor has no version counter
        setattr(padded, _TOKENS, _Carried(tokens, packing, padded._version))
    return padded


def tokens_of(x: Tensor, packing: Packing) -> Tensor:
    """Tokens (T, d) of x (B, L, d): the stored tokens if they have this packing, else packed anew."""
    held: _Carried | None = getattr(x, _TOKENS, None)
    if held is None or held.version != x._version or not _same(held.packing, packing):
        return take(x, packing)
    # A reentrant checkpoint gives x an autograd history that the stored tokens lack.
    return held.tokens if held.tokens.requires_grad == x.requires_grad else take(x, packing)


def without_tokens(x: Tensor) -> Tensor:
    """Remove the tokens stored on x, because x may be written to."""
    x.__dict__.pop(_TOKENS, None)
    return x


def _same(a: Packing, b: Packing) -> bool:
    if a is b:
        return True
    sizes = (a.batch, a.length, a.total) == (b.batch, b.length, b.total)
    return sizes and torch.equal(a.indices, b.indices)
