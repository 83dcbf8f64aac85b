"""Label-smoothed cross entropy of a linear layer's outputs, in plain PyTorch: the reference of the fused op."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The loss of ``logits = x weight^T + bias`` against ``target``, with label smoothing (Szegedy et al., "Rethinking
    the Inception Architecture for Computer Vision", 2016, section 7; Vaswani et al., 2017, section 5.4).

    The smoothed distribution is the target times ``1 - label_smoothing``, plus ``label_smoothing`` spread evenly over
    the vocabulary. The loss of a position is the sum of ``-class_weight * smoothed * log(softmax(logits))``. Positions
    whose target is ``ignore_index`` are left out.

    Args:
        x: (..., d); weight: (vocabulary, d); bias: (vocabulary,) or None.
        target: (...) int64, a class per position; or (..., vocabulary) float, the probabilities of all classes.
        class_weight: (vocabulary,), or None for 1.
        reduction: "none"; "sum" over the positions that count; or "mean": their sum divided by their number, or by
            the sum of the weights of their targets (NaN if that sum is 0). With probabilities the divisor is always the
            number of positions.

    Returns:
        A scalar, or (...) for "none"; float32 for 16-bit inputs.
    """
    logits = torch.nn.functional.linear(x, weight, bias)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    log_probabilities = logits.log_softmax(-1)
    weights = logits.new_ones(weight.shape[0]) if class_weight is None else class_weight.to(logits.dtype)
    if target.is_floating_point():
        smoothed = target.to(logits.dtype) * (1.0 - label_smoothing) + label_smoothing / weight.shape[0]
        losses = -(smoothed * (log_probabilities * weights)).sum(-1)
        count = torch.ones_like(losses)
    else:
        counts = target != ignore_index
        index = target.masked_fill(~counts, 0)
        # The weight of a class that is no target may be inf or NaN: it is in no product, and in no gradient.
        own = weights[index].masked_fill(~counts, 0.0)
        losses = -(1.0 - label_smoothing) * log_probabilities.gather(-1, index.unsqueeze(-1)).squeeze(-1) * own
        if label_smoothing > 0.0:
            losses = losses - label_smoothing * (log_probabilities * weights).mean(-1)
        losses = losses.masked_fill(~counts, 0.0)
        count = own
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total = count.sum()
    return losses.sum() / total.masked_fill(total == 0.0, torch.nan)
