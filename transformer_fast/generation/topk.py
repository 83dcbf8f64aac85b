"""Most likely next tokens, and the normalizer that turns logits into log-probabilities.

There are two ways: one op of the extension (fp32 on a CPU), and PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import extension


class Choice(NamedTuple):
    """Best tokens. best, token (rows, k): the largest logits per row and their tokens, largest first. normalizer
    (rows,): log-probabilities are logits minus this; NaN if a row has a NaN."""

    best: Tensor
    token: Tensor
    normalizer: Tensor


def choose(logits: Tensor, k: int, suppressed: Sequence[int] = (), *, renormalize: bool = False) -> Choice:
    """Compute `best_tokens` and `log_normalizer` in one pass; the logits stay unchanged.

    suppressed: ascending tokens that are not chosen; with `renormalize` they have no probability either.
    """
    if use_native(logits):
        return Choice(*torch.ops.transformer_fast.choose_tokens(logits, k, list(suppressed), renormalize))
    allowed = logits
    if suppressed:
        allowed = logits.clone()
        allowed[:, list(suppressed)] = -torch.inf
    normalizer = log_normalizer(allowed if renormalize else logits)
    if renormalize:
        normalizer = normalizer.masked_fill(logits.isnan().any(dim=1), torch.nan)
    return Choice(*best_tokens(allowed, k), normalizer)


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits, largest first, and their tokens, both (rows, k), of logits (rows, vocabulary) with k <=
    vocabulary.

    Ties: lowest token first on a CPU in fp32; in any order elsewhere. The token of a -inf is arbitrary.
    """
    if use_native(logits):
        best, token, _ = choose(logits, k)
        return best, token
    return logits.max(dim=-1, keepdim=True) if k == 1 else logits.topk(k, dim=-1)


def log_normalizer(logits: Tensor) -> Tensor:
    """Logsumexp (rows,) of logits (rows, vocabulary); NaN if one is NaN or plus infinity.

    log P of a token is its logit minus this value, so that no log-softmax of the whole vocabulary is written.
    """
    if use_native(logits):
        return choose(logits, 1).normalizer
    found = logits.logsumexp(dim=-1)
    return found.masked_fill(found == torch.inf, torch.nan)


def use_native(logits: Tensor) -> bool:
    """Return True if the C++ extension chooses tokens of such logits."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and extension.load()
