"""Packed tokens stored on a padded tensor, passed from one layer to the next.

A layer that skips padding still returns a padded tensor (B, L, d). The next layer that skips padding reads the packed
tokens (T, d) from an attribute of that tensor. So the tokens are packed once. The gradient of the tokens is that of the
padded tensor: hooks and ``torch.autograd.grad`` work on it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..masks.packing import Packing, take, unpack

_TOKENS = "_transformer_fast_tokens"


@dataclasses.dataclass(frozen=True)
class _Carried:
    tokens: Tensor
    packing: Packing
    version: int


class _Take(Function):
    """``take(x, packing)``, whose values are there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Carried) -> Tensor:
        ctx.packing = held.packing
        return held.tokens.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return pad_gradient(grad, ctx.packing), None


def pad_gradient(grad: Tensor, packing: Packing) -> Tensor:
    """Pad a gradient (T, ...) with zeros to (B, L, ...), also one with a hidden batch dimension."""
    if not torch._C._functorch.is_legacy_batchedtensor(grad):
        return unpack(grad, packing)
    places = packing.indices.new_full((packing.batch * packing.length,), packing.total)
    places[packing.indices] = torch.arange(packing.total, device=places.device)
    rows = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])]).index_select(0, places)
    return rows.view(packing.batch, packing.length, *grad.shape[1:])


def with_tokens(tokens: Tensor, packing: Packing) -> Tensor:
    """Pad tokens (T, d) with zeros to (B, L, d), and store the tokens on the result."""
    padded = unpack(tokens, packing)
    if not (packing.is_full or padded.is_inference()):  # an inference tensor has no version counter
        setattr(padded, _TOKENS, _Carried(tokens.detach(), packing, padded._version))
    return padded


def tokens_of(x: Tensor, packing: Packing) -> Tensor:
    """Tokens (T, d) of x (B, L, d): the stored tokens if they have this packing, else packed anew."""
    held: _Carried | None = getattr(x, _TOKENS, None)
    if held is None or held.version != x._version or not _same(held.packing, packing):
        return take(x, packing)
    return _Take.apply(x, held)


def _same(a: Packing, b: Packing) -> bool:
    if a is b:
        return True
    sizes = (a.batch, a.length, a.total) == (b.batch, b.length, b.total)
    return sizes and torch.equal(a.indices, b.indices)
