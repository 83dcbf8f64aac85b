"""Logits of tokens, from which the loss is computed, and the padded logits that the model returns.

The loss reads the logits of tokens (1, T, V). The model returns padded logits (B, L, V), and the loss is a function of
these in the autograd graph: logits -> padded -> tokens -> loss. So hooks, ``retain_grad`` and ``torch.autograd.grad``
work on what the model returns. The last step copies nothing, and its gradient holds that of the tokens and is padded
only if something reads it.

Some models scale the output of their output layer, or add a bias. So :class:`TokenLogits` lets such operations pass,
and takes the two steps in front of the first other operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from ..backends import in_transform
from ..layers.padder import Held, Take
from ..lazy_tensor import Lazy, Node, make_nothing
from ..masks.packing import Packing, unpack

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
