"""Norms as drop-in modules; each can fuse the dropout and the residual addition before the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from ..ops.norm import layer_norm
from .dropout import dropout_of_any, fused_p
from .hooks import TAKES_RESIDUAL, has_role, in_role

RMS_EPS = 1e-6
"""The eps of RMSNorm in our models, as in T5 and Llama."""


@in_role(TAKES_RESIDUAL)
class Norm(nn.Module):
    """``alpha * (x - mean) / (std + eps) + bias`` with the unbiased std over the last dimension.

    Args:
        d_model: width, at least 2.
        eps: added to the std.

    Raises:
        ValueError: for ``d_model`` below 2, where the unbiased std is 0/0.
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        if d_model < 2:
            raise ValueError(f"Norm: the unbiased std needs d_model of at least 2, got {d_model}")
        self.alpha = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    @overload
    def forward(self, x: Tensor, *, residual: None = None, dropout_p: float = 0.0) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, residual: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x (..., d_model); with ``residual`` return (norm of s, s), ``s = residual + dropout(x)``, in one
        pass."""
        return layer_norm(x, self.alpha, self.bias, self.eps, kind="std", residual=residual, dropout_p=dropout_p)


@in_role(TAKES_RESIDUAL)
class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dimension, with the same two forms of forward as :class:`Norm`."""

    @overload
    def forward(self, x: Tensor, *, residual: None = None, dropout_p: float = 0.0) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, residual: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x (..., d_model); with ``residual`` return (norm of s, s), ``s = residual + dropout(x)``, in one
        pass."""
        _check_width(self, x)
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual, dropout_p=dropout_p)


@in_role(TAKES_RESIDUAL)
class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, with the same two forms of forward as :class:`Norm`.

    Args:
        normalized_shape: width, or a sequence of it alone.
        eps: added to the mean of the squares; None is the machine epsilon of the statistics' dtype (float32's for
            16-bit rows).
        elementwise_affine: True adds a ``weight``.

    Raises:
        ValueError: for a ``normalized_shape`` of several dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if len(self.normalized_shape) != 1:
            raise ValueError(
                f"RMSNorm: normalized_shape must be the last dimension only, (d,), got {tuple(self.normalized_shape)}"
            )

    @overload
    def forward(self, x: Tensor, *, residual: None = None, dropout_p: float = 0.0) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, residual: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x (..., d_model); with ``residual`` return (norm of s, s), ``s = residual + dropout(x)``, in one
        pass."""
        _check_width(self, x)
        return layer_norm(x, self.weight, None, self.eps, kind="rms", residual=residual, dropout_p=dropout_p)


def _check_width(norm: LayerNorm | RMSNorm, x: Tensor) -> None:
    """Raise if x does not have the width of a norm without weight; with a weight the op checks the width."""
    if norm.weight is None and x.shape[-1:] != norm.normalized_shape:
        shape = tuple(norm.normalized_shape)
        raise ValueError(
            f"{type(norm).__name__}: normalises the last dimension only; expected x (..., d) with (d,) = {shape}, the "
            f"normalized_shape, got x {tuple(x.shape)}"
        )


def make_norm(kind: str, d_model: int) -> Norm | LayerNorm | RMSNorm:
    """Norm of a layer by name: "std" (:class:`Norm`), "layer" (:class:`LayerNorm`) or "rms" (:class:`RMSNorm`, eps
    1e-6).

    Raises:
        ValueError: for any other kind.
    """
    if kind == "std":
        return Norm(d_model)
    if kind == "layer":
        return LayerNorm(d_model)
    if kind == "rms":
        return RMSNorm(d_model, eps=RMS_EPS)
    raise ValueError(f'norm: expected "std", "layer" or "rms", got {kind!r}')


class Unsummed(NamedTuple):
    """The sum ``x + dropout(y)``, deferred: the next norm computes the sum in its own pass."""

    x: Tensor
    y: Tensor
    dropout_p: float

    def summed(self) -> Tensor:
        """Compute the sum alone."""
        return dropout_of_any(self.y, self.dropout_p, residual=self.x)


def unsummed(x: Tensor, y: Tensor, drop: nn.Module | float) -> Unsummed:
    """Return ``x + drop(y)`` as a deferred sum, for a dropout module or a probability.

    Only a plain dropout is deferred to the norm; any other module is called.
    """
    p = 0.0
    if not isinstance(drop, nn.Module):
        p = drop
    elif (now := fused_p(drop)) is not None:
        p = now
    else:
        y = drop(y)
    return Unsummed(x, y if y.shape == x.shape else y.expand(x.shape), p)


def norm_and_sum(norm: nn.Module, x: Tensor | Unsummed) -> tuple[Tensor, Tensor]:
    """Return (norm of x, x), where x may be a deferred sum. A norm that is not plain is called with the sum."""
    if isinstance(x, Unsummed):
        if has_role(norm, TAKES_RESIDUAL):
            return norm(x.y, residual=x.x, dropout_p=x.dropout_p)
        x = x.summed()
    return norm(x), x


Sublayer = tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]
"""A norm, the dropout of the function's output, and the function itself: attention or feed-forward."""


def pre_norm(x: Tensor | Unsummed, sublayers: Iterable[Sublayer]) -> Unsummed:
    """Compute ``x + dropout(function(norm(x)))`` per sublayer, in order; the last sum stays deferred to the next
    norm."""
    for norm, drop, function in sublayers:
        normed, x = norm_and_sum(norm, x)
        x = unsummed(x, function(normed), drop)
    assert isinstance(x, Unsummed)
    return x


def post_norm(x: Tensor, sublayers: Iterable[Sublayer]) -> Tensor:
    """Compute ``norm(x + dropout(function(x)))`` per sublayer, in order."""
    for norm, drop, function in sublayers:
        x, _ = norm_and_sum(norm, unsummed(x, function(x), drop))
    return x
