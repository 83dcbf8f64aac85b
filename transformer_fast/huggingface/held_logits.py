"""Padded logits that hold those of the tokens, for a pooling that reads tokens alone.

:class:`HeldLogits` stand for the logits (B, L, V) that a model returns. Padding is made when something other than the
pooling reads them. The logits of tokens are a function of the padded ones in the autograd graph, as in ``logits.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import in_transform
from ..integrations.tokens import version_of
from ..layers.padder import Held
from ..lazy_tensor import Lazy, Node, make_nothing
from ..masks.packing import Packing, unpack
from .logits import _Pad, _Take

_mask: ContextVar[Tensor | None] = ContextVar("mask", default=None)


@contextlib.contextmanager
def holding(mask: Any) -> Iterator[None]:
    """Let models that are called inside return :class:`HeldLogits` for a batch of this mask (B, L)."""
    token = _mask.set(mask if isinstance(mask, Tensor) else None)
    try:
        yield
    finally:
        _mask.reset(token)


def held_logits(logits: Tensor, packing: Packing, mask: Any) -> Tensor | None:
    """Held logits (B, L, V) of logits of tokens (1, T, V); None where padded logits must be made.

    Args:
        mask: mask of the call of the model; padded logits are made for another mask than that of :func:`holding`.
    """
    observed = torch._C._len_torch_dispatch_stack() > 0 or in_transform() or forward_ad._current_level >= 0
    if mask is None or _mask.get() is not mask or observed:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _Hold.apply(logits.as_subclass(Tensor).squeeze(0), packing, mask)


class _Padded(Node):
    """Recipe of padded logits.

    Attributes:
        packing: packing of the tokens, whose logits (T, V) are the rows.
        mask: mask (B, L) of the batch, and its version.
    """

    def __init__(self, tokens: Tensor, packing: Packing, mask: Tensor) -> None:
        super().__init__(tokens, None, make_nothing, True)
        self.packing, self.mask = packing, (mask, version_of(mask))

    def computed(self, base: Tensor | None) -> Tensor:
        assert self.rows is not None
        return unpack(self.rows, self.packing)


class HeldLogits(Lazy):
    """Padded logits that are made when something reads them."""

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        return None

    def is_of(self, mask: Any) -> bool:
        """Return True if the tokens are those of this mask, and neither mask nor logits were written to."""
        own, version = self.node.mask
        return mask is own and version_of(own) == version and not self.node.is_read()

    def tokens(self) -> Tensor:
        """Logits of the tokens (T, V), as a function of these logits."""
        node = self.node
        if not (self.requires_grad and torch.is_grad_enabled()):
            return node.rows
        return _Take.apply(self, Held(node.rows, node.packing))


class _Hold(_Pad):
    """``unpack(tokens, packing)``, made when it is read."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packing: Packing, mask: Tensor) -> Tensor:  # type: ignore[override]
        ctx.packing = packing
        shape = packing.batch, packing.length, *tokens.shape[1:]
        like = torch.empty(shape, dtype=tokens.dtype, device="meta")
        return HeldLogits(_Padded(tokens.detach(), packing, mask), like, tokens.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return *_Pad.backward(ctx, grad), None
