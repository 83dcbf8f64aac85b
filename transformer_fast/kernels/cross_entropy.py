"""Label-smoothed cross entropy of rows of logits, and the gradient of its sum written over them.

One program a row, which it reads twice from memory (softmax statistics kept online, as in M. Milakov and N. Gimelshein,
"Online normalizer calculation for softmax", 2018) and writes once.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import CROSS_ENTROPY
from .launching import Launch, run


@triton.jit(do_not_specialize=["vocabulary", "ignore_index"])
def _rows_kernel(
    logits, target, losses, vocabulary, ignore_index, smoothing, GRADIENT: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    wanted = tl.load(target + row)
    counts = wanted != ignore_index
    # A target outside the vocabulary must not be read: its loss is NaN.
    valid = (wanted >= 0) & (wanted < vocabulary)
    at_target = tl.load(logits + tl.where(valid, wanted, 0)).to(tl.float32)
    column = tl.arange(0, BLOCK_COLUMNS)

    peaks = tl.full((BLOCK_COLUMNS,), float("-inf"), tl.float32)
    totals = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    sums = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for start in range(0, vocabulary, BLOCK_COLUMNS):
        inside = start + column < vocabulary
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, x)
        # A lane that has seen nothing has peak -inf, which must not be subtracted from itself.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        totals = totals * tl.exp(peaks - shift) + tl.exp(x - shift)
        sums += tl.where(inside, x, 0.0)
        peaks = higher
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - peak), 0)
    logsum = peak + tl.log(total)

    loss = (1.0 - smoothing) * (logsum - at_target)
    if smoothing > 0.0:
        loss += smoothing * (logsum - tl.sum(sums, 0) / vocabulary)
    loss = tl.where(valid, loss, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        even = smoothing / vocabulary
        for start in range(0, vocabulary, BLOCK_COLUMNS):
            inside = start + column < vocabulary
            x = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(x - logsum) - even - tl.where(start + column == wanted, 1.0 - smoothing, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=inside)


def rows_launch(
    logits: Tensor, target: Tensor, losses: Tensor, smoothing: float, ignore_index: int, gradient: bool
) -> Launch:
    """The launch that fills `losses`, and writes the gradient over `logits` if asked to; all contiguous."""
    rows, vocabulary = logits.shape
    config = next((c for widest, c in CROSS_ENTROPY.items() if vocabulary <= widest), CROSS_ENTROPY[max(CROSS_ENTROPY)])
    return Launch(
        name=f"cross_entropy rows {config.block_columns} {logits.dtype}{' gradient' if gradient else ''}",
        kernel=_rows_kernel,
        grid=rows,
        arguments={
            "logits": logits,
            "target": target,
            "losses": losses,
            "vocabulary": vocabulary,
            "ignore_index": ignore_index,
            "smoothing": smoothing,
            "GRADIENT": gradient,
            "BLOCK_COLUMNS": config.block_columns,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def cross_entropy_rows(logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, gradient: bool) -> Tensor:
    """Losses of rows of logits, by Triton.

    Args:
        logits: (rows, vocabulary), fp32, fp16 or bf16, contiguous. With ``gradient``, overwritten by the gradient of
            the sum of the losses.
        target: int64 (rows,), contiguous. Outside the vocabulary and not ``ignore_index``: the loss is NaN.
        smoothing: mass spread evenly over the vocabulary.
        ignore_index: a row with this target has loss and gradient 0.
        gradient: whether to write it.

    Returns:
        (rows,) fp32.
    """
    losses = torch.empty((logits.shape[0],), dtype=torch.float32, device=logits.device)
    if losses.numel() > 0:
        run([rows_launch(logits, target, losses, smoothing, ignore_index, gradient)], on=logits)
    return losses


def compile_cases(arch: str) -> Iterator[Launch]:
    """A launch for every config, with and without the gradient, in bf16."""
    for vocabulary in CROSS_ENTROPY:
        logits = torch.empty((1024, vocabulary), dtype=torch.bfloat16, device="meta")
        target = torch.empty((1024,), dtype=torch.int64, device="meta")
        losses = torch.empty((1024,), dtype=torch.float32, device="meta")
        for gradient in (False, True):
            yield rows_launch(logits, target, losses, 0.1, -100, gradient)
