"""Quality of a model on held-out text: loss and BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..masks import AttentionMask
from ..models import Transformer
from .batching import Batch, Corpus, plan_batches
from .tokenizer import PAD


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Compute `(B, T, vocab)` scores of the next token. The target needs only a look-ahead mask: padding is on the
    right, so no real token sees padding, and losses ignore predictions at padding."""
    return model(batch.source, batch.target_in, _source_mask(batch), AttentionMask.causal(0))


def _source_mask(batch: Batch) -> AttentionMask:
    return AttentionMask.lengths(batch.source_lengths.to(batch.source.device))


def token_loss(scores: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum of the label-smoothed cross-entropy over all targets that are not padding, in nats.

    Args:
        scores: `(B, T, vocab)` logits, any float dtype; computed in fp32 at least.
        target: `(B, T)` int64.
        smoothing: probability mass spread evenly over the vocabulary (Szegedy et al. 2016; the paper, section 5.4).
    """
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
    )


def batch_loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """`token_loss` of a batch; a `transformer_fast.Transformer` computes it without ever holding all logits."""
    if not isinstance(model, Transformer):
        return token_loss(logits(model, batch), batch.target_out, smoothing)
    if model.packed:
        source, target = (AttentionMask.lengths(side) for side in (batch.source_lengths, batch.target_lengths))
        masks = source, target & AttentionMask.causal()
    else:
        masks = _source_mask(batch), AttentionMask.causal()
    inputs = batch.source, batch.target_in, *masks, batch.target_out
    return model.loss(*inputs, label_smoothing=smoothing, ignore_index=PAD, reduction="sum")


@torch.no_grad()
def corpus_loss(model: nn.Module, corpus: Corpus, batch_tokens: int, device: torch.device) -> float:
    """Mean cross-entropy of a corpus in nats per token, without smoothing and dropout."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for indices in plan_batches(corpus, batch_tokens, range(len(corpus))):
        batch = corpus.batch(indices).to(device)
        total += batch_loss(model, batch).item()
        tokens += batch.tokens
    model.train(was_training)
    return total / tokens


@dataclass(frozen=True)
class Bleu:
    """sacreBLEU of a corpus, 0..100, and the signature that says how it was computed."""

    score: float
    signature: str


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> Bleu:
    """BLEU with one reference (Post 2018, "A Call for Clarity in Reporting BLEU Scores").

    Args:
        lowercase: compare without case.
        tokenize: sacreBLEU's tokenizer for both sides; "none" for text that is tokenised already.
    """
    metric = sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(score, str(metric.get_signature()))
