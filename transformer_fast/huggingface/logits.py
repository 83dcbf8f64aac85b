"""Logits of tokens, from which the loss is computed, and the padded logits that the model returns.

The loss reads the logits of tokens (1, T, V). The model returns padded logits (B, L, V), and the loss is a function of
these in the autograd graph: logits -> padded -> tokens -> loss. So hooks, ``retain_grad`` and ``torch.autograd.grad``
work on what the model returns. The last step copies nothing, and its gradient holds that of the tokens and is padded
only if something reads it.

Some models scale the output of their output layer, or add a bias. So :class:`TokenLogits` lets such operations pass,
and takes the two steps in front of the first other operation. :class:`HeldLogits` stand for the padded logits until
something reads them, for a pooling that reads tokens alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._pytree import tree_map_only

from ..backends import in_transform
from ..layers.padder import Held, Take
from ..lazy_tensor import Lazy, Node, make_nothing
from ..masks.packing import Packing, unpack
from .tokens import version_of

_PASS: set[Any] = {
    *(torch.add, torch.sub, torch.mul, torch.div, torch.tanh, torch.neg),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.tanh, Tensor.neg),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__mul__, Tensor.__rmul__),
    *(Tensor.__truediv__, Tensor.__neg__, Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.tanh_),
    *(Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__, Tensor.contiguous),
}  # fmt: skip
"""Operations whose result is of tokens again."""
_ASK: set[Any] = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.register_hook),
}
"""Operations that read no values."""


class TokensHead:
    """First base of an output layer's class: inside of a call that keeps tokens, its logits are those of tokens."""

    skips_logits = False


class TokenLogits(Tensor):
    """Logits of tokens, (1, T, V), or what elementwise arithmetic makes of them.

    Attributes:
        packing: packing of the tokens.
    """

    packing: Packing
    _linked: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(logits: Tensor, packing: Packing) -> TokenLogits:
        """The same logits, as this class."""
        made = logits.as_subclass(TokenLogits)
        made.packing = packing
        return made

    def linked(self) -> tuple[Tensor, Tensor]:
        """Padded logits (B, L, V), and the logits of tokens (1, T, V) as a function of them."""
        if self._linked is None:
            with torch._C.DisableTorchFunctionSubclass():
                tokens = self.as_subclass(Tensor).squeeze(0)
                padded = _Pad.apply(tokens, self.packing)
                self._linked = padded, _Take.apply(padded, Held(tokens.detach(), self.packing)).unsqueeze(0)
        return self._linked

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks = function in _ASK or getattr(function, "__name__", "") == "__get__"
        if not asks and function not in _PASS:
            args, kwargs = tree_map_only(TokenLogits, lambda t: t.linked()[1], (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **kwargs)
        first = args[0] if args else None
        if asks or made is first or not isinstance(first, TokenLogits) or type(made) is not Tensor:
            return made
        return TokenLogits.of(made, first.packing) if made.shape == first.shape else made


class PaddedGradient(Lazy):
    """Gradient of padded logits that is 0 at padding; it holds that of the tokens."""

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        return None


class _Gradient(Node):
    """Recipe of a padded gradient.

    Attributes:
        packing: packing of the tokens, whose gradient (T, V) are the rows.
    """

    def __init__(self, tokens: Tensor, packing: Packing) -> None:
        super().__init__(tokens, None, make_nothing, True)
        self.packing = packing

    def computed(self, base: Tensor | None) -> Tensor:
        assert self.rows is not None
        return unpack(self.rows, self.packing)


class _Pad(Function):
    """``unpack(tokens, packing)``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        padded = tokens.new_zeros(
            packing.batch, packing.length, *tokens.shape[1:]
        )  # no view, which nobody could write to
        padded.flatten(0, 1).index_copy_(0, packing.indices, tokens)
        return padded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if isinstance(grad, PaddedGradient) and not grad.node.is_read() and grad.node.packing is ctx.packing:
            return grad.node.rows, None
        return grad.reshape(-1, grad.shape[-1]).index_select(0, ctx.packing.indices), None


class _Take(Take):
    """``take(padded, packing)``; the gradient is padded only if something reads it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packing = ctx.packing
        if torch.is_grad_enabled() or in_transform() or torch._C._functorch.is_legacy_batchedtensor(grad):
            return Take.backward(ctx, grad)
        shape = packing.batch, packing.length, *grad.shape[1:]
        like = torch.empty(shape, dtype=grad.dtype, device="meta")
        return PaddedGradient(_Gradient(grad, packing), like, grad.device), None


def padded_logits(logits: Any, packing: Packing) -> Any:
    """Padded logits (B, L, V) of logits of tokens."""
    return logits.linked()[0] if isinstance(logits, TokenLogits) else unpack(logits.squeeze(0), packing)


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
