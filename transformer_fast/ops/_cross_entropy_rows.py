"""Cross-entropy loss per row of a linear layer's outputs, with class weights or with probabilities as targets.

Two ops (forward and backward) in PyTorch's own operators, for the cases that csrc/ops/cross_entropy.cpp does not
compute. The op in C++ makes the gradients in the forward pass, because every row has the same weight. Here the gradient
of each loss is known only in the backward pass. So the backward pass makes the logits again: four matrix products
instead of three. Both passes hold the logits of one chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..target_checks import check_targets
from .argument_types import as_number

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, float label_smoothing, "
    "SymInt ignore_index, SymInt chunk_elements"
)
_NAME, _BACKWARD_NAME = "linear_cross_entropy_rows", "linear_cross_entropy_rows_backward"
_LIBRARY = torch.library.Library("transformer_fast", "FRAGMENT")
_LIBRARY.define(f"{_NAME}({_ARGUMENTS}) -> Tensor losses", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"{_BACKWARD_NAME}(Tensor grad, {_ARGUMENTS}, bool[4] gradients) -> "
    "(Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_target)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _losses(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    chunk_elements: int,
) -> Tensor:
    """Losses (rows,), in the dtype of the arithmetic: float32, or float64 for float64.

    Args:
        x: (rows, d).
        weight, bias: (vocabulary, d) and (vocabulary,) or None, of x's dtype.
        target: (rows,) int64, or (rows, vocabulary) float.
        class_weight: (vocabulary,) float, or None for 1.
        smoothing: mass spread evenly over the vocabulary.
        ignore_index: a row with this target has loss 0.
        chunk_elements: number of logits in memory at a time; at least those of 64 rows.
    """
    _check(_NAME, x, weight, bias, target, class_weight, smoothing)
    if x.device.type == "cpu" and not target.is_floating_point():
        check_targets(target, ignore_index, weight.shape[0])
    losses = x.new_empty(x.shape[0], dtype=_compute_dtype(x))
    for rows in _chunks(x, weight, chunk_elements):
        log_probabilities = _log_probabilities(x[rows], weight, bias)
        smoothed = _smoothed_targets(target[rows], class_weight, smoothing, ignore_index, log_probabilities)
        # A class with target 0 adds nothing, even if its logit is -inf.
        losses[rows] = -(smoothed * log_probabilities.masked_fill_(smoothed == 0, 0.0)).sum(1)
    return losses


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    chunk_elements: int,
    gradients: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and target, each in the dtype of its tensor; shape (0,) if not requested.

    Args:
        grad: (rows,), gradient of the losses, in the dtype of the losses.
        gradients: which gradients to compute.
    """
    _check(_BACKWARD_NAME, x, weight, bias, target, class_weight, smoothing)
    _check_grad(grad, x)
    if gradients[3] and not target.is_floating_point():
        raise ValueError(f"{_BACKWARD_NAME}: gradients must leave out an integer target, got {gradients}")
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if gradients[0] else x.new_empty(0)
    grad_weight = grad.new_zeros(weight.shape if gradients[1] else 0)
    grad_bias = grad.new_zeros(weight.shape[0] if gradients[2] else 0)
    grad_target = torch.empty(target.shape if gradients[3] else 0, dtype=target.dtype, device=target.device)
    scale = _scale(grad)
    for rows in _chunks(x, weight, chunk_elements):
        log_probabilities, row_grad = _log_probabilities(x[rows], weight, bias), (grad[rows] / scale).unsqueeze(1)
        if gradients[3]:
            by_class = log_probabilities if class_weight is None else log_probabilities * class_weight.to(grad.dtype)
            grad_target[rows] = by_class * (row_grad * (scale * (smoothing - 1.0)))
        smoothed = _smoothed_targets(target[rows], class_weight, smoothing, ignore_index, log_probabilities)
        of_logits = log_probabilities.exp_().mul_(smoothed.sum(1, keepdim=True)).sub_(smoothed).mul_(row_grad)
        if not target.is_floating_point():  # logits of ignored rows may be inf or NaN
            of_logits.masked_fill_((target[rows] == ignore_index).unsqueeze(1), 0.0)
        if gradients[2]:
            grad_bias += of_logits.sum(0)
        of_logits = of_logits.to(x.dtype)
        if gradients[0]:
            grad_x[rows] = of_logits.mm(weight).to(grad.dtype).mul_(scale)
        if gradients[1]:
            grad_weight += of_logits.t().mm(x[rows])
    return (grad_x, grad_weight.mul_(scale).to(weight.dtype), grad_bias.mul_(scale).to(weight.dtype), grad_target)


def check(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
    any_dtype: bool = False,
) -> None:
    """Raise unless dtypes, devices and sizes are those that :func:`_losses` documents, for x (..., d).

    Args:
        op: the name in the messages.
        any_dtype: True if autocast will give the tensors one dtype.
    """
    for name, given in (("x", x), ("weight", weight), ("target", target)):
        if not isinstance(given, Tensor):  # None passes the dispatcher
            raise TypeError(f"{op}: {name} must be a tensor, got {type(given).__name__}")
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"{op}: x must be a float tensor (..., d), got {x.dtype} {tuple(x.shape)}")
    *rows, d = x.shape
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be (vocabulary, d), got shape {tuple(weight.shape)}")
    vocabulary = weight.shape[0]
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "weight": (weight, (vocabulary, d)),
        "bias": (bias, (vocabulary,)),
        "target": (target, (*rows, vocabulary) if target.is_floating_point() else tuple(rows)),
        "class_weight": (class_weight, (vocabulary,)),
    }
    for name, (t, shape) in shapes.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.shape != shape:
            what = ", as probabilities," if name == "target" and t.is_floating_point() else ""
            raise ValueError(f"{op}: {name}{what} must be of shape {shape}, got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device}, got {t.device}")
        if name in ("weight", "bias") and t.dtype != x.dtype and not any_dtype:
            raise TypeError(f"{op}: {name} must be of {x.dtype}, got {t.dtype}")
        if not t.is_floating_point() and (name != "target" or t.dtype != torch.int64):
            expected = "int64, or float for probabilities" if name == "target" else "float"
            raise TypeError(f"{op}: {name} must be a tensor of {expected}, got {t.dtype}")
    if not 0.0 <= as_number(op, "label_smoothing", smoothing) <= 1.0:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1], got {smoothing}")


def _check(op: str, x: Tensor, *others: Any) -> None:
    """Raise unless a call is of the op's layout, x (rows, d)."""
    check(op, x, *others)
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be (rows, d), got shape {tuple(x.shape)}")


def _check_grad(grad: Tensor, x: Tensor) -> None:
    if grad.shape != x.shape[:1] or grad.dtype != _compute_dtype(x) or grad.device != x.device:
        raise ValueError(
            f"{_BACKWARD_NAME}: grad must be {_compute_dtype(x)} {tuple(x.shape[:1])} on {x.device}, got {grad.dtype} "
            f"{tuple(grad.shape)} on {grad.device}"
        )


def autocast(t: Tensor) -> Tensor:
    """Cast a tensor as ``F.linear`` does under autocast."""
    return t if t.dtype == torch.float64 else t.to(torch.get_autocast_dtype(t.device.type))


def _scale(grad: Tensor) -> Tensor:
    """Power of two near the largest entry of ``grad``. Products of 16-bit numbers divided by it neither overflow nor
    vanish."""
    if grad.numel() == 0:
        return grad.new_ones(())
    return grad.abs().amax().clamp_(1e-30).log2_().ceil_().exp2_().nan_to_num_(1.0, 1.0)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the arithmetic."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, weight: Tensor, chunk_elements: int) -> Iterator[slice]:
    """Slices that cover the rows of x, chunk by chunk."""
    step = max(64, chunk_elements // max(1, weight.shape[0]))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def _log_probabilities(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Log probabilities (rows, vocabulary) of rows of x, in the dtype of the arithmetic."""
    return F.linear(x, weight, bias).log_softmax(1, dtype=_compute_dtype(x))


def _smoothed_targets(
    target: Tensor, class_weight: Tensor | None, smoothing: float, ignore_index: int, like: Tensor
) -> Tensor:
    """Smoothed targets times class weights, (rows, vocabulary), with the shape and dtype of ``like``.

    An ignored row is 0. A row whose target is outside the vocabulary is NaN (only a GPU gets here; a CPU raises).
    """
    vocabulary = like.shape[1]
    if vocabulary == 0:
        return torch.zeros_like(like)
    if target.is_floating_point():
        smoothed = target.to(like.dtype) * (1.0 - smoothing) + smoothing / vocabulary
        return smoothed if class_weight is None else smoothed * class_weight.to(like.dtype)
    weights = like.new_ones(vocabulary) if class_weight is None else class_weight.to(like.dtype)
    # A class that is no target may have weight inf or NaN: without smoothing that weight is in no product.
    smoothed = (
        torch.zeros_like(like) if smoothing == 0.0 else (weights * (smoothing / vocabulary)).expand_as(like).clone()
    )
    place = target.clamp(0, vocabulary - 1)
    smoothed.scatter_add_(1, place.unsqueeze(1), (weights[place] * (1.0 - smoothing)).unsqueeze(1))
    smoothed.masked_fill_(((target < 0) | (target >= vocabulary)).unsqueeze(1), torch.nan)
    return smoothed.masked_fill_((target == ignore_index).unsqueeze(1), 0.0)


@torch.library.register_fake(f"transformer_fast::{_NAME}", lib=_LIBRARY)
def _fake_losses(x: Tensor, *rest: Any) -> Tensor:
    _check(_NAME, x, *rest[:5])
    return x.new_empty(x.shape[0], dtype=_compute_dtype(x))


@torch.library.register_fake(f"transformer_fast::{_BACKWARD_NAME}", lib=_LIBRARY)
def _fake_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *_, requested = rest
    _check(_BACKWARD_NAME, x, weight, bias, target, *rest[:2])
    _check_grad(grad, x)
    shapes = x.shape, weight.shape, weight.shape[:1], target.shape
    likes = x, weight, weight, target
    return tuple(
        t.new_empty(shape if needed else (0,)) for t, shape, needed in zip(likes, shapes, requested, strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # A tensor made in inference mode, such as targets that a validation pass cached, cannot be saved.
    ctx.save_for_backward(*(t.clone() if t is not None and t.is_inference() else t for t in inputs[:5]))
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    requested = list(ctx.needs_input_grad[:4])
    op = torch.ops.transformer_fast.linear_cross_entropy_rows_backward.default
    made = op(grad, *ctx.saved_tensors, *ctx.options, requested)
    return *(one if needed else None for one, needed in zip(made, requested, strict=True)), None, None, None, None


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise RuntimeError(
        "linear_cross_entropy cannot be differentiated again: it has no second derivative. Run the forward under "
        'transformer_fast.backend("reference") to differentiate twice.'
    )


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl(_NAME, _losses, _device)
    _LIBRARY.impl(_BACKWARD_NAME, _gradients, _device)
torch.library.register_autograd(f"transformer_fast::{_NAME}", _differentiate, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd(f"transformer_fast::{_BACKWARD_NAME}", _refuse_second_derivative, lib=_LIBRARY)
