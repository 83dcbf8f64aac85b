"""Tokens that a padded tensor carries from one layer to the next.

A layer that leaves padding out returns (B, L, d) like any other, for whoever looks. The next such layer needs the
tokens alone. It finds them on the tensor, so they need not be taken out again, and gradients pass no padded rows.
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
    """Put the padding back, zeros: tokens (T, d) -> (B, L, d), which carries them."""
    padded = unpack(tokens, packing)
    if not padded.is_inference():  # which has no version
        setattr(padded, _TOKENS, _Carried(tokens, packing, padded._version))
    return padded


def tokens_of(x: Tensor, packing: Packing) -> Tensor:
    """The tokens (T, d) of x (B, L, d): those that it carries, if they are packed in this way."""
    held: _Carried | None = getattr(x, _TOKENS, None)
    if held is None or held.version != x._version or not _same(held.packing, packing):
        return take(x, packing)
    # A reentrant checkpoint gives x a history that its tokens lack.
    return held.tokens if held.tokens.requires_grad == x.requires_grad else take(x, packing)


def without_tokens(x: Tensor) -> Tensor:
    """Let x carry nothing: somebody may write to it."""
    x.__dict__.pop(_TOKENS, None)
    return x


def _same(a: Packing, b: Packing) -> bool:
    if a is b:
        return True
    sizes = (a.batch, a.length, a.total) == (b.batch, b.length, b.total)
    return sizes and torch.equal(a.indices, b.indices)
