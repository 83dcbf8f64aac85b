"""The dropout op: the door (argument checks), the op and its backward, and which kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, reference
from . import _direct, _library


def dropout(x: Tensor, p: float, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
    """``[residual +] dropout([relu] x)`` in one pass, with no mask stored for the backward.

    The mask is a pure function of a seed, drawn from torch's generator, and of each element's place (Philox
    4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): backward draws it again.

    Args:
        x: (..., d); float32, float16, bfloat16 (float64 on CPU).
        p: probability of dropping an element, in [0, 1]; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs it. Every backend draws the same mask.
        residual: the shape of ``x``, added last; the result then has its dtype.
        relu: apply ReLU to ``x`` first.

    Returns:
        (..., d), contiguous; ``x`` itself where there is nothing to do.

    Raises:
        TypeError: for non-tensors and non-float dtypes.
        ValueError: for shapes, devices or a ``p`` that do not fit; the message names them.
    """
    seed = _library.draw_seed(x.device) if p > 0.0 and isinstance(x, Tensor) else None
    if direct := _direct.native():
        result = direct.dropout(x, p, residual, relu, seed)
        if result is not None:
            return result
    _check(x, p, residual)
    if p == 0.0 and residual is None and not relu:
        return x
    if residual is not None and x.dtype != residual.dtype:
        x = x.to(residual.dtype)
    backend = backends.resolve("dropout", x.device, x.dtype)
    if backend == "reference" or p == 0.0:  # without a mask to draw, plain PyTorch is one or two passes already
        return reference.dropout.dropout(x, p, seed, residual=residual, relu=relu)
    call = _autograd if _direct.is_plain(x, residual) else _op
    if relu and residual is not None:
        # The backward reads the sign of the ReLU off the op's own output, which a residual would hide.
        return residual + call(x, None, True, p, seed, backend)
    return call(x, residual, relu, p, seed, backend)


def _check(x: Tensor, p: float, residual: Tensor | None) -> None:
    for name, t in (("x", x), ("residual", residual)):
        if t is None and name == "residual":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"dropout: {name} must be a tensor, got {type(t).__name__}")
        if not t.is_floating_point():
            raise TypeError(f"dropout: {name} must be a float tensor, got {t.dtype}")
    if x.dim() == 0:
        raise ValueError("dropout: x must be (..., d), got a tensor without dimensions")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"dropout: residual must have the shape of x, got residual {tuple(residual.shape)} and x {tuple(x.shape)}"
        )
    if residual is not None and residual.device != x.device:
        raise ValueError(f"dropout: x is on {x.device} but residual on {residual.device}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must lie in [0, 1], got {p}")


def _dropout(x, residual, relu, p, seed, backend):
    if backend == "native":
        return torch.ops.transformer_fast_native.dropout(x, residual, relu, p, seed)
    from ..kernels.dropout import dropout_forward

    return dropout_forward(x, residual, relu, p, seed)


def _dropout_backward(grad_out, y, relu, p, seed, backend):
    if backend == "native":
        return torch.ops.transformer_fast_native.dropout_backward(grad_out, y, relu, p, seed)
    from ..kernels.dropout import dropout_backward

    return dropout_backward(grad_out, y, relu, p, seed)


def _fake(x, residual, relu, p, seed, backend):
    return x.new_empty(x.shape)


def _fake_backward(grad_out, y, relu, p, seed, backend):
    return grad_out.new_empty(grad_out.shape)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, relu, p, seed, backend):
        out = _direct.run(_op, _dropout, 2, x, residual, relu, p, seed, backend)
        # With ReLU the output alone tells which elements pass a gradient: those that are positive.
        ctx.save_for_backward(out if relu else None, seed)
        ctx.options = relu, p
        ctx.backend = backend
        return out

    @staticmethod
    def backward(ctx, grad_out):
        y, seed = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            args = grad_out, y, *ctx.options, seed, ctx.backend
            # With create_graph the op itself must run: it is what says that there is no second derivative.
            grad_x = (
                _op_backward(*args)
                if torch.is_grad_enabled()
                else _direct.run(_op_backward, _dropout_backward, 2, *args)
            )
        return grad_x, grad_out if ctx.needs_input_grad[1] else None, None, None, None, None


def _autograd(x, residual, relu, p, seed, backend):
    if torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad)):
        return _Dropout.apply(x, residual, relu, p, seed, backend)
    return _direct.run(_op, _dropout, 2, x, residual, relu, p, seed, backend)


_op = _library.register(
    "dropout(Tensor x, Tensor? residual, bool relu, float p, Tensor? seed, str backend) -> Tensor",
    implementation=_dropout,
    fake=_fake,
    autograd=_autograd,
)
_op_backward = _library.register(
    "dropout_backward(Tensor grad_out, Tensor? y, bool relu, float p, Tensor? seed, str backend) -> Tensor",
    implementation=_dropout_backward,
    fake=_fake_backward,
)
