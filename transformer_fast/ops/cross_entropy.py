"""Linear layer and label-smoothed cross entropy as one op: the door, the op, and which kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, reference
from . import _direct, _library

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits that exist at a time: on a CPU not far from what its caches hold, on a GPU enough rows to fill it."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias), target, ...)`` without ever holding all logits, nor any in float32.

    The logits are made in chunks of rows; each chunk gives its losses and, where a gradient will be needed, is turned
    into its own gradient in place and multiplied into those of x, weight and bias at once.

    Args:
        x: (..., d); float32, float16, bfloat16 (float64 on CPU). Under autocast, x and weight are cast as
            ``F.linear`` would.
        weight: (vocabulary, d) in x's dtype.
        bias: (vocabulary,) or None.
        target: int64 (...), each in [0, vocabulary), or ``ignore_index``.
        label_smoothing: mass spread evenly over the vocabulary, in [0, 1].
        ignore_index: positions with this target count nowhere.
        reduction: "mean" over the positions that count (NaN if none does) or "sum".

    Returns:
        A scalar in float32 (float64 for float64).

    Raises:
        TypeError: for non-tensors and for dtypes that do not fit.
        ValueError: for shapes, devices or options that do not fit; the message names them.
        IndexError: on CPU, for a target outside the vocabulary; names it and its place. On a GPU, where looking would
            stall it, the loss is NaN.
    """
    if direct := _direct.native():
        args = x, weight, bias, target, label_smoothing, ignore_index, reduction, CHUNK_ELEMENTS["cpu"]
        if (loss := direct.linear_cross_entropy(*args)) is not None:
            return loss
    autocast = _library.autocast_enabled(x)
    _check(x, weight, bias, target, label_smoothing, reduction, autocast)
    backend = backends.resolve("cross_entropy", x.device, x.dtype)
    if backend == "reference":
        return reference.cross_entropy.linear_cross_entropy(
            x, weight, bias, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
        )
    target = target.flatten()
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    call = _autograd if _direct.is_plain(x, weight, bias, target) and not autocast else _op
    options = float(label_smoothing), ignore_index, reduction == "mean", gradients, backend
    return call(x.flatten(0, -2), weight, bias, target, *options)[0]


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    reduction: str,
    autocast: bool,
) -> None:
    for name, t in (("x", x), ("weight", weight), ("bias", bias), ("target", target)):
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"linear_cross_entropy: {name} must be a tensor, got {type(t).__name__}")
        if t.device != x.device:
            raise ValueError(f"linear_cross_entropy: x is on {x.device} but {name} on {t.device}")
        if name == "target":
            if t.dtype != torch.int64:
                raise TypeError(f"linear_cross_entropy: target must be int64, got {t.dtype}")
        elif not t.is_floating_point():
            raise TypeError(f"linear_cross_entropy: {name} must be a float tensor, got {t.dtype}")
        elif t.dtype != x.dtype and not autocast:
            raise TypeError(f"linear_cross_entropy: {name} must have the dtype of x, {x.dtype}, got {t.dtype}")
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: expected x (..., d) with at least one leading dimension and weight (vocabulary, d), "
            f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: target must be {tuple(x.shape[:-1])} for x {tuple(x.shape)}, got "
            f"{tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias must be (vocabulary,) = ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"linear_cross_entropy: label_smoothing must lie in [0, 1], got {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'linear_cross_entropy: reduction must be "mean" or "sum", got {reduction!r}')


def _linear_cross_entropy(x, weight, bias, target, smoothing, ignore_index, mean, gradients, backend):
    step = CHUNK_ELEMENTS[x.device.type]
    if backend == "native":
        native = torch.ops.transformer_fast_native.linear_cross_entropy
        return native(x, weight, bias, target, smoothing, ignore_index, mean, gradients, step)
    from ..kernels.cross_entropy import cross_entropy_rows

    rows, vocabulary = x.shape[0], weight.shape[0]
    if x.device.type == "cpu":
        _check_targets(target, ignore_index, vocabulary)
    # The gradients are those of the sum, not yet divided by the count: 16-bit numbers of a sensible size. Sums over
    # chunks are made in float32, from the first chunk on.
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if gradients else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape, dtype=torch.float32) if gradients else x.new_empty(0)
    grad_bias = weight.new_empty(vocabulary, dtype=torch.float32) if gradients and bias is not None else x.new_empty(0)
    count = (target != ignore_index).sum() if mean else torch.ones_like(total)
    scale = count.to(torch.float32).clamp(min=1).reciprocal()
    if rows == 0:
        return total / count, grad_x, grad_weight.zero_(), grad_bias.zero_(), scale
    step = max(64, step // max(1, vocabulary))
    buffer = x.new_empty(min(rows, step), vocabulary)
    for start in range(0, rows, step):
        chunk = x[start : start + step]
        logits = buffer[: chunk.shape[0]]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        total += cross_entropy_rows(logits, target[start : start + step], smoothing, ignore_index, gradients).sum()
        if gradients:
            torch.mm(logits, weight, out=grad_x[start : start + step])
            _accumulate(grad_weight, logits.t(), chunk, first=start == 0)
            if bias is not None:
                sums = logits.sum(0, dtype=torch.float32)
                grad_bias = sums if start == 0 else grad_bias.add_(sums)
    return total / count, grad_x, grad_weight, grad_bias, scale


def _check_targets(target: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise for a target outside the vocabulary, one of those that count, as the native kernel does."""
    wrong = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if wrong.any():
        place = int(wrong.nonzero()[0, 0])
        raise IndexError(
            f"linear_cross_entropy: target {place} of {target.numel()} is {int(target[place])}, but the vocabulary has "
            f"{vocabulary} rows: expected 0 <= target < {vocabulary}, or ignore_index"
        )


def _accumulate(result: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``result = a @ b`` for the first product, ``result += a @ b`` for those after it; result may be wider."""
    if result.dtype == a.dtype:
        torch.mm(a, b, out=result) if first else result.addmm_(a, b)
    elif first:
        result.copy_(torch.mm(a, b))
    else:
        result += torch.mm(a, b)


def _fake(x, weight, bias, target, smoothing, ignore_index, mean, gradients, backend):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    nothing = x.new_empty(0)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape) if gradients else nothing,
        weight.new_empty(weight.shape, dtype=wide) if gradients else torch.empty_like(nothing),
        weight.new_empty(weight.shape[:1], dtype=wide) if gradients and bias is not None else torch.empty_like(nothing),
        x.new_empty((), dtype=wide),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *rest):
        loss, *kept = _direct.run(_op, _linear_cross_entropy, 4, x, weight, bias, *rest)
        ctx.save_for_backward(x, weight, bias, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        return loss, *kept

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return (None,) * 9
        inputs, kept, scale = ctx.saved_tensors[:3], ctx.saved_tensors[3:6], grad_loss * ctx.saved_tensors[6]
        # What was kept for a graph that ends here is scaled where it lies.
        goes_on = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()
        ends = not goes_on and _direct.is_plain(grad_loss, *kept)
        grads = tuple(
            (grad.mul_(scale) if ends else grad * scale).to(t.dtype) if needed else None
            for t, grad, needed in zip(inputs, kept, ctx.needs_input_grad, strict=False)
        )
        if torch.is_grad_enabled():
            grads = _library.refuse_second_derivative("linear_cross_entropy", grads, inputs)
        return *grads, *(None,) * 6


def _autograd(x, weight, bias, *rest):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _LinearCrossEntropy.apply(x, weight, bias, *rest)
    return _direct.run(_op, _linear_cross_entropy, 4, x, weight, bias, *rest)


_op = _library.register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, float smoothing, SymInt ignore_index, "
    "bool mean, bool gradients, str backend) -> "
    "(Tensor loss, Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor scale)",
    implementation=_linear_cross_entropy,
    fake=_fake,
    autograd=_autograd,
)
_library.register_autocast(_op, ("x", "weight", "bias"))
