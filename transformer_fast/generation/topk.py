"""The most likely next tokens, and what makes log-probabilities of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import extension


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits (rows, vocabulary), k <= vocabulary -> the k greatest, the greatest first, and their tokens, (rows, k).

    Of equal ones the first token comes first on a CPU in fp32; elsewhere in no order. The token of a -inf is arbitrary.
    """
    if _use_native(logits):
        return torch.ops.transformer_fast.best_tokens(logits, k)
    return logits.max(dim=-1, keepdim=True) if k == 1 else logits.topk(k, dim=-1)


def log_normalizer(logits: Tensor) -> Tensor:
    """logits (rows, vocabulary) -> their logsumexp (rows,): log P of a token is its logit less this, so that a
    log-softmax of the whole vocabulary need not be written."""
    if _use_native(logits):
        return torch.ops.transformer_fast.log_normalizer(logits)
    return logits.logsumexp(dim=-1)


def _use_native(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and extension.load()
