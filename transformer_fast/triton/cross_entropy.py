"""Label-smoothed cross entropy of rows of logits; the gradient of its sum overwrites the logits.

One program per row. The program reads the row twice from memory (online softmax statistics, as in M. Milakov and N.
Gimelshein, "Online normalizer calculation for softmax", 2018) and writes once. As on the CPU
(csrc/cpu/cross_entropy.cpp), all numbers are differences from the largest logit, and the target stands apart from the
others: where a row is sure of its target, the loss and the gradient are small differences of large numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..target_checks import check_targets
from .configs import CROSS_ENTROPY
from .launch_cache import LaunchCall, run_kept
from .launcher import Launch


@triton.jit
def _log1p(x):
    """Logarithm of 1 + x for x >= 0; a rounding of 1 + x cancels in the quotient (D. Goldberg, "What every computer
    scientist should know about floating-point arithmetic", 1991, theorem 4)."""
    rounded = 1.0 + x
    added = rounded - 1.0
    return tl.where(added == 0.0, x, tl.log(rounded) * (x / tl.where(added == 0.0, 1.0, added)))


@triton.jit(do_not_specialize=["vocabulary", "ignore_index"])
def _rows_kernel(
    logits, target, losses, vocabulary, ignore_index, smoothing, GRADIENT: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    wanted = tl.load(target + row)
    counts = wanted != ignore_index
    # The logit of a target outside the vocabulary must not be read; the loss is NaN.
    valid = (wanted >= 0) & (wanted < vocabulary)
    place = tl.where(valid, wanted, -1).to(tl.int32)
    at_target = tl.load(logits + tl.maximum(place, 0)).to(tl.float32)
    column = tl.arange(0, BLOCK_COLUMNS)

    lane_max = tl.full((BLOCK_COLUMNS,), float("-inf"), tl.float32)
    lane_sum = tl.zeros((BLOCK_COLUMNS,), tl.float32)  # of all columns but the target's
    for start in range(0, vocabulary, BLOCK_COLUMNS):
        inside = start + column < vocabulary
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(lane_max, x)
        # Before its first value a lane has the maximum -inf; -inf - -inf would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        lane_sum = lane_sum * tl.exp(lane_max - shift) + tl.where(start + column == place, 0.0, tl.exp(x - shift))
        lane_max = higher
    row_max = tl.max(lane_max, 0)
    others = tl.sum(lane_sum * tl.exp(lane_max - row_max), 0)
    depth = row_max - at_target
    wanted_power = tl.exp(-depth)
    row_sum = others + wanted_power
    log_sum = tl.where(depth == 0.0, _log1p(others), tl.log(row_sum))

    depths = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    if GRADIENT:
        even = smoothing / vocabulary
        scale = 1.0 / row_sum
        # From the smaller probability, of the target or of the others: the larger cancels with what stands beside it.
        of_target = (wanted_power * scale - even) - (1.0 - smoothing)
        of_others = (smoothing - even) - others * scale
        at_place = tl.where(others > wanted_power, of_target, of_others)
        for start in range(0, vocabulary, BLOCK_COLUMNS):
            inside = start + column < vocabulary
            below = tl.load(logits + start + column, mask=inside, other=row_max).to(tl.float32) - row_max
            depths -= below
            gradient = tl.where(start + column == place, at_place, tl.exp(below) * scale - even)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=inside)
    elif smoothing > 0.0:
        for start in range(0, vocabulary, BLOCK_COLUMNS):
            inside = start + column < vocabulary
            depths += row_max - tl.load(logits + start + column, mask=inside, other=row_max).to(tl.float32)

    loss = (1.0 - smoothing) * (depth + log_sum)
    if smoothing > 0.0:
        loss += smoothing * (log_sum + tl.sum(depths, 0) / vocabulary)
    loss = tl.where(valid, loss, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))


def rows_launch(
    logits: Tensor, target: Tensor, losses: Tensor, smoothing: float, ignore_index: int, gradient: bool
) -> Launch:
    """Launch that fills `losses` and, with `gradient`, overwrites `logits` by the gradient; all contiguous."""
    rows, vocabulary = logits.shape
    config = next((c for widest, c in CROSS_ENTROPY.items() if vocabulary <= widest), CROSS_ENTROPY[max(CROSS_ENTROPY)])
    return Launch(
        name=f"cross_entropy rows {config.block_columns} {logits.dtype}{' gradient' if gradient else ''}",
        kernel=_rows_kernel,
        grid=rows,
        arguments={
            "logits": logits, "target": target, "losses": losses, "vocabulary": vocabulary,
            "ignore_index": ignore_index, "smoothing": smoothing, "GRADIENT": gradient,
            "BLOCK_COLUMNS": config.block_columns,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def cross_entropy_rows(logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, gradient: bool) -> Tensor:
    """Losses of rows of logits, by Triton.

    Args:
        logits: (rows, vocabulary), fp32, fp16 or bf16, contiguous. With ``gradient``, overwritten by the gradient of
            the sum of the losses.
        target: int64 (rows,), contiguous. Outside the vocabulary and not ``ignore_index``: the loss is NaN.
        smoothing: mass spread evenly over the vocabulary.
        ignore_index: a row with this target has loss and gradient 0.
        gradient: True writes the gradient.

    Returns:
        (rows,) fp32.
    """
    losses = torch.empty((logits.shape[0],), dtype=torch.float32, device=logits.device)
    if losses.numel() > 0:
        options = smoothing, ignore_index, gradient
        call = LaunchCall(f"cross entropy rows {options}", (logits, target))
        run_kept(call, (losses,), lambda: [rows_launch(logits, target, losses, *options)])
    return losses


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float, ignore_index: int, mean: bool,
    gradients: tuple[bool, bool, bool], chunk_elements: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the op of csrc/ops/cross_entropy.cpp, with the rows by Triton.

    Args:
        x: (rows, d), fp32, fp16 or bf16.
        weight, bias: (vocabulary, d) and (vocabulary,) or None, of x's dtype.
        target: int64 (rows,).
        smoothing, ignore_index, mean: as in :func:`transformer_fast.linear_cross_entropy`.
        gradients: which gradients to compute, of x, weight and bias.
        chunk_elements: number of logits in memory at a time; at least those of 64 rows.

    Returns:
        loss () fp32; the gradients of x (in its dtype), weight and bias (fp32), (0,) if not requested; and a scale ()
        fp32 that the caller must multiply the gradients by.
    """
    rows, vocabulary = x.shape[0], weight.shape[0]
    target = target.contiguous()
    if x.device.type == "cpu":
        check_targets(target, ignore_index, vocabulary)
    # The gradients are those of the sum, not yet divided by the count, so that 16-bit numbers do not underflow. Sums
    # over chunks are in float32, from the first chunk on.
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if gradients[0] else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape if gradients[1] else (0,), dtype=torch.float32)
    grad_bias = weight.new_empty(vocabulary if gradients[2] else 0, dtype=torch.float32)
    count = (target != ignore_index).sum() if mean else torch.ones_like(total)
    scale = count.to(torch.float32).clamp(min=1).reciprocal()
    if rows == 0:
        return total / count, grad_x, grad_weight.zero_(), grad_bias.zero_(), scale
    step = max(64, chunk_elements // max(1, vocabulary))
    buffer = x.new_empty(min(rows, step), vocabulary)
    for start in range(0, rows, step):
        chunk = x[start : start + step]
        logits = buffer[: chunk.shape[0]]
        if bias is None:
            torch.mm(chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, chunk, weight.t(), out=logits)
        total += cross_entropy_rows(logits, target[start : start + step], smoothing, ignore_index, any(gradients)).sum()
        if gradients[0]:
            torch.mm(logits, weight, out=grad_x[start : start + step])
        if gradients[1]:
            _accumulate(grad_weight, logits.t(), chunk, first=start == 0)
        if gradients[2]:
            sums = logits.sum(0, dtype=torch.float32)
            grad_bias = sums if start == 0 else grad_bias.add_(sums)
    return total / count, grad_x, grad_weight, grad_bias, scale


def _accumulate(result: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Compute ``result = a @ b`` for the first product, then ``result += a @ b``; result may have a wider dtype."""
    if result.dtype == a.dtype:
        torch.mm(a, b, out=result) if first else result.addmm_(a, b)
    elif first:
        result.copy_(torch.mm(a, b))
    else:
        result += torch.mm(a, b)
