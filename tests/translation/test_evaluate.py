"""Loss, BLEU and exact matches of a model's answers."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from small_training import fresh_run, short_config

from transformer_fast.translation.evaluate import corpus_bleu, corpus_loss, token_loss
from transformer_fast.translation.tokenizer import PAD


def test_loss_is_the_smoothed_cross_entropy_of_real_tokens() -> None:
    scores = torch.randn(3, 5, 11, dtype=torch.float64)
    target = torch.randint(1, 11, (3, 5))
    target[0, 3:] = PAD
    target[2, 1:] = PAD
    expected = 0.0
    for row, column in itertools.product(range(3), range(5)):
        if target[row, column] != PAD:
            log_p = scores[row, column].log_softmax(0)
            wanted = torch.full((11,), 0.2 / 11, dtype=torch.float64)
            wanted[target[row, column]] += 0.8
            expected -= float((wanted * log_p).sum())
    assert float(token_loss(scores, target, 0.2)) == pytest.approx(expected, rel=1e-12)


def test_loss_of_16_bit_scores_is_computed_in_fp32() -> None:
    scores, target = torch.randn(2, 3, 50).bfloat16(), torch.randint(1, 50, (2, 3))
    assert token_loss(scores, target).dtype == torch.float32
    assert torch.equal(token_loss(scores, target), token_loss(scores.float(), target))


def test_bleu_has_a_signature() -> None:
    lines = ["a small house stands on the hill", "the dog runs through the snow"]
    same, other = corpus_bleu(lines, lines), corpus_bleu(lines[::-1], lines)
    assert same.score == pytest.approx(100.0)
    assert other.score < 20
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", same.signature)


def test_validation_loss_does_not_depend_on_the_batches(corpus: dict[str, str], tmp_path: Path) -> None:
    config = short_config(corpus, tmp_path)
    run = fresh_run(config)
    run.learner.model.train()
    small, large = (
        corpus_loss(run.learner.model, run.validation.corpus, budget, torch.device("cpu")) for budget in (40, 4000)
    )
    assert small == pytest.approx(large, rel=1e-5)
    assert run.learner.model.training
    assert small == pytest.approx(math.log(60), rel=0.5)
