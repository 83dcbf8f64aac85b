"""Validation of a run's model, and the best step so far."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .batching import Corpus
from .checkpoint import Scores, is_better
from .config import TrainConfig
from .evaluate import corpus_bleu, corpus_loss
from .text import ParallelText
from .tokenizer import Tokenizer
from .translator import Translator


class Validation:
    """Held-out text, and the best scores measured on it.

    Args:
        config: the settings. text: the held-out text; None measures nothing.
        tokenizer: the run's. device: where the models are.

    Attributes:
        scores: scores of the last validation: "valid_loss" (nats per token) and "bleu", as far as measured.
        best_step, best_scores: the best one, as `is_better` compares.
        best_sentences: number of sentences of the best BLEU.
        without_better: validations since then.
    """

    def __init__(
        self, config: TrainConfig, text: ParallelText | None, tokenizer: Tokenizer, device: torch.device
    ) -> None:
        self.config, self.text, self.tokenizer, self.device = config, text, tokenizer, device
        self.corpus = Corpus(text, tokenizer) if text else None
        self.scores: Scores = {}
        self.best_step: int | None = None
        self.best_scores: Scores = {}
        self.best_sentences = 0
        self.without_better = 0

    def measure(self, model: nn.Module) -> tuple[Scores, str]:
        """Measure the scores of a model; also return them as text."""
        if self.text is None or self.corpus is None:
            return {}, "no validation text"
        loss = corpus_loss(model, self.corpus, self.config.batch_tokens, self.device)
        scores, summary = {"valid_loss": loss}, f"validation loss {loss:.3f}, perplexity {math.exp(min(loss, 700)):.2f}"
        if self.config.bleu_sentences:
            part = slice(self.config.bleu_sentences)
            translator = Translator(model, self.tokenizer, beam=1, longest=self.config.max_length)
            lines = translator.translate(self.text.source[part])
            bleu = corpus_bleu(list(lines), self.text.target[part], lowercase=self.config.lowercase)
            scores["bleu"] = bleu.score
            summary += f", BLEU {bleu.score:.2f} ({bleu.signature})"
        return scores, summary

    def take(self, step: int, scores: Scores) -> bool:
        """Record the scores of `step`; return True if they are the best so far."""
        self.scores = scores
        sentences = self.config.bleu_sentences
        same = sentences == self.best_sentences
        better = self.best_step is None or is_better(scores, self.best_scores, same_sentences=same)
        if better:
            self.best_step, self.best_scores, self.best_sentences = step, scores, sentences
        self.without_better = 0 if better else self.without_better + 1
        return better

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        names = "scores", "best_step", "best_scores", "best_sentences", "without_better"
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; the given state may hold more."""
        self.scores, self.best_step, self.best_scores = state["scores"], state["best_step"], state["best_scores"]
        self.best_sentences = state.get("best_sentences", self.config.bleu_sentences)
        self.without_better = state.get("without_better", 0)

    def changed_rule(self) -> str:
        """Message for a best step that was found by another rule than the next ones will be; else ""."""
        now, before = self.config.bleu_sentences, self.best_sentences
        if self.best_step is None or now == before:
            return ""
        return (
            f"BLEU is now measured on {now:,} sentences, before on {before:,}: steps are compared by validation loss"
            f" until one is better than step {self.best_step:,}"
        )
