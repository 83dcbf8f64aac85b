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
    autocast = _library.autocast_enabled(x)
    _check(x, weight, bias, target, label_smoothing, reduction, autocast)
    backend = backends.resolve("cross_entropy", x.device, x.dtype)
    if backend == "reference":
        return reference.cross_entropy.linear_cross_entropy(
            x, weight, bias, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
        )
    target = target.flatten()
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    args = x.flatten(0, -2), weight, bias, target, float(label_smoothing), ignore_index, gradients, backend
    call = _autograd if _direct.is_plain(x, weight, bias, target) and not autocast else _op
    total = call(*args)[0]
    return total / (target != ignore_index).sum() if reduction == "mean" else total


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


def _rows(logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, gradients: bool, backend: str) -> Tensor:
    if backend == "native":
        native = torch.ops.transformer_fast_native.cross_entropy_rows
        return native(logits, target, smoothing, ignore_index, gradients)
    from ..kernels.cross_entropy import cross_entropy_rows

    return cross_entropy_rows(logits, target, smoothing, ignore_index, gradients)


def _linear_cross_entropy(x, weight, bias, target, smoothing, ignore_index, gradients, backend):
    if x.device.type != "cpu":
        return _counted_rows(x, weight, bias, target, smoothing, ignore_index, gradients, backend)
    # Rows that count nowhere are left out; on a GPU, finding them would wait for it.
    counted = (target != ignore_index).nonzero().squeeze(1)
    _check_targets(target, counted, weight.shape[0])
    if counted.numel() == target.numel():
        return _counted_rows(x, weight, bias, target, smoothing, ignore_index, gradients, backend)
    rows = x.index_select(0, counted), weight, bias, target.index_select(0, counted)
    total, grad_rows, *grads = _counted_rows(*rows, smoothing, ignore_index, gradients, backend)
    grad_x = x.new_zeros(x.shape).index_copy_(0, counted, grad_rows) if gradients else grad_rows
    return total, grad_x, *grads


def _check_targets(target: Tensor, counted: Tensor, vocabulary: int) -> None:
    """Raise for a target outside the vocabulary, one of those that count."""
    if counted.numel() == 0:
        return
    low, high = torch.aminmax(target.index_select(0, counted))
    if low < 0 or high >= vocabulary:
        wrong = ((target < 0) | (target >= vocabulary)).index_select(0, counted)
        place = int(counted[wrong.nonzero()[0, 0]])
        raise IndexError(
            f"linear_cross_entropy: target {place} of {target.numel()} is {int(target[place])}, but the vocabulary has "
            f"{vocabulary} rows: expected 0 <= target < {vocabulary}, or ignore_index"
        )


def _counted_rows(x, weight, bias, target, smoothing, ignore_index, gradients, backend):
    rows, vocabulary = x.shape[0], weight.shape[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # The gradients of the sum, not yet divided by the count: 16-bit numbers of a sensible size. Sums over chunks are
    # made in float32, from the first chunk on.
    total = torch.zeros((), dtype=wide, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if gradients else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape, dtype=wide) if gradients else x.new_empty(0)
    grad_bias = weight.new_empty(vocabulary, dtype=wide) if gradients and bias is not None else x.new_empty(0)
    if rows == 0:
        return total, grad_x, grad_weight.zero_(), grad_bias.zero_()
    step = max(64, CHUNK_ELEMENTS[x.device.type] // max(1, vocabulary))
    buffer = x.new_empty(min(rows, step), vocabulary)
    for start in range(0, rows, step):
        chunk = x[start : start + step]
        logits = buffer[: chunk.shape[0]]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        total += _rows(logits, target[start : start + step], smoothing, ignore_index, gradients, backend).sum()
        if gradients:
            torch.mm(logits, weight, out=grad_x[start : start + step])
            _accumulate(grad_weight, logits.t(), chunk, first=start == 0)
            if bias is not None:
                sums = logits.sum(0, dtype=wide)
                grad_bias = sums if start == 0 else grad_bias.add_(sums)
    return total, grad_x, grad_weight, grad_bias


def _accumulate(result: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``result = a @ b`` for the first product, ``result += a @ b`` for those after it; result may be wider."""
    if result.dtype == a.dtype:
        torch.mm(a, b, out=result) if first else result.addmm_(a, b)
    elif first:
        result.copy_(torch.mm(a, b))
    else:
        result += torch.mm(a, b)


def _fake(x, weight, bias, target, smoothing, ignore_index, gradients, backend):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    nothing = x.new_empty(0)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape) if gradients else nothing,
        weight.new_empty(weight.shape, dtype=wide) if gradients else torch.empty_like(nothing),
        weight.new_empty(weight.shape[:1], dtype=wide) if gradients and bias is not None else torch.empty_like(nothing),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *rest):
        total, *grads = _direct.run(_op, _linear_cross_entropy, 4, x, weight, bias, *rest)
        ctx.save_for_backward(x, weight, bias, *grads)
        ctx.mark_non_differentiable(*grads)
        ctx.set_materialize_grads(False)
        return total, *grads

    @staticmethod
    def backward(ctx, grad_total, *_):
        if grad_total is None:
            return (None,) * 8
        inputs, sums = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        # What was kept for a graph that ends here is scaled where it lies.
        kept = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()
        ends = not kept and _direct.is_plain(grad_total, *sums)
        grads = tuple(
            (total.mul_(grad_total) if ends else total * grad_total).to(t.dtype) if needed else None
            for t, total, needed in zip(inputs, sums, ctx.needs_input_grad, strict=False)
        )
        if torch.is_grad_enabled():
            grads = _library.refuse_second_derivative("linear_cross_entropy", grads, inputs)
        return *grads, *(None,) * 5


def _autograd(x, weight, bias, *rest):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _LinearCrossEntropy.apply(x, weight, bias, *rest)
    return _direct.run(_op, _linear_cross_entropy, 4, x, weight, bias, *rest)


_op = _library.register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, float smoothing, SymInt ignore_index, "
    "bool gradients, str backend) -> (Tensor total, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    implementation=_linear_cross_entropy,
    fake=_fake,
    autograd=_autograd,
)
_library.register_autocast(_op, ("x", "weight", "bias"))
