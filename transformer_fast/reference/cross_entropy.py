"""Label-smoothed cross entropy of a linear layer's outputs, in plain PyTorch: what the fused op must compute."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """The loss of ``logits = x weight^T + bias`` against ``target``, with label smoothing (Szegedy et al., "Rethinking
    the Inception Architecture for Computer Vision", 2016, section 7; Vaswani et al., 2017, section 5.4).

    The target distribution is ``1 - label_smoothing`` on the target and ``label_smoothing`` spread evenly over the
    vocabulary. Positions whose target is ``ignore_index`` count nowhere.

    Args:
        x: (..., d); weight: (vocabulary, d); bias: (vocabulary,) or None; target: (...) int64.
        reduction: "mean" over the positions that count (NaN if none does) or "sum".

    Returns:
        A scalar, float32 for 16-bit inputs.
    """
    logits = torch.nn.functional.linear(x, weight, bias).flatten(0, -2)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    counts = target.flatten() != ignore_index
    target = target.flatten().masked_fill(~counts, 0)
    log_probabilities = logits.log_softmax(-1)
    on_target = log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
    spread = log_probabilities.mean(1)
    losses = -(1.0 - label_smoothing) * on_target - label_smoothing * spread
    total = losses.masked_fill(~counts, 0.0).sum()
    return total / counts.sum() if reduction == "mean" else total
