"""The training loop: everything a run is, in the order in which it happens.

A run is a pure function of its settings, its text and its step. Weights, Adam's moments, random number states, the
place in the data and the sums of the report under way are all in a checkpoint, so a run that was killed, at any
moment, continues bit for bit as if never stopped (on the same kind of machine with the same number of threads).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .batching import Batch, Corpus, TokenBatches
from .checkpoint import RunFolder
from .config import TrainConfig
from .environment import amp_dtype, choose_device, interruptible, open_run
from .errors import CheckpointError, DivergedError
from .evaluate import corpus_bleu, corpus_loss, translate_greedily
from .model import (
    build_model,
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
)
from .optim import build_optimizer, learning_rate
from .progress import Progress, Silent, Status, TerminalProgress
from .ranks import Objective, Ranks, continue_random, joined, random_states, scatter_random

STOPPED = (None, "max_steps", "max_time", "interrupted")  # where processes disagree, the last of these holds
REPORT_EVERY = 20  # updates; a report reads the loss back from the device, which an update does not do


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        folder: the run folder.
        step: updates done.
        stopped: why it ended: "max_steps", "max_time" or "interrupted".
        seconds: training time on the clock, resumed parts included.
        tokens: target tokens trained on, padding not counted.
        scores: of the last validation: "valid_loss" (nats a token) and "bleu", as far as measured.
        best_step, best_scores: the best validation, which is the highest BLEU, else the lowest loss.
    """

    folder: str
    step: int
    stopped: str
    seconds: float
    tokens: int
    scores: dict[str, float]
    best_step: int | None
    best_scores: dict[str, float]


def train(
    config: TrainConfig,
    progress: Progress | None = None,
    *,
    build: Callable[[TrainConfig, int], nn.Module] = build_model,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainResult:
    """Train a translator, or continue the run in `config.save`.

    Args:
        config: the settings. `max_time` counts the seconds spent training, validating and saving, over all parts of
            a resumed run; reading the text and learning the vocabulary are not counted.
        progress: where reports go; by default a bar on a terminal, else a line every 10 seconds, on standard error.
        build: makes the model from the settings and the size of the vocabulary.
        clock: returns seconds; `time.process_time` makes `max_time` a budget of CPU time.

    The first interrupt (Ctrl-C or SIGTERM) ends the run after the current update with a checkpoint. Seeds torch's
    default generators.

    Started by torchrun, all processes train one model: each takes its part of the rows of every batch, gradients are
    summed, and the first writes. An update is the same, up to rounding and the places of dropout, on any number of
    processes, so a run may be resumed on another number; the folder must be one they all see.

    Raises:
        ConfigError, DataError: settings or text that cannot work.
        CheckpointError: the folder cannot be written, or holds a damaged, foreign or differently configured run.
        DivergedError: the loss is no longer finite.
    """
    folder = RunFolder(config.save)
    with joined(choose_device(config)) as ranks:
        progress = progress or TerminalProgress() if ranks.first else Silent()
        try:
            with folder.writing() if ranks.first else contextlib.nullcontext(), interruptible() as interrupted:
                return _Run(config, folder, progress, build, clock, ranks).run(interrupted)
        finally:
            progress.close()


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        progress: Progress,
        build: Callable[[TrainConfig, int], nn.Module],
        clock: Callable[[], float],
        ranks: Ranks | None = None,
    ):
        self.config, self.folder, self.progress, self.clock = config, folder, progress, clock
        self.ranks = ranks = ranks or Ranks()
        self.device = choose_device(config)
        self.amp = amp_dtype(config, self.device)
        text, self.valid, self.tokenizer = self._open()
        corpus = Corpus(text, self.tokenizer, config.max_length)
        self.batches = TokenBatches(corpus, config.batch_tokens, config.seed)
        self.valid_corpus = Corpus(self.valid, self.tokenizer) if self.valid else None
        torch.manual_seed(config.seed)
        self.model = build(config, len(self.tokenizer)).to(self.device)
        self.optimizer = build_optimizer(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp == torch.float16)
        self.step = self.tokens = 0
        self.seconds_before = 0.0
        self.scores: dict[str, float] = {}
        self.best_step: int | None = None
        self.best_scores: dict[str, float] = {}
        self.window = torch.zeros(2, dtype=torch.float64, device=self.device)  # sums of loss and gradient norm
        self.window_tokens = self.window_steps = 0
        self.last_loss: float | None = None
        self.saved_step = -1
        self._describe(corpus)
        if self.folder.steps():
            self._restore(self.folder.steps()[-1])
        else:
            self._cut_log(0)
            scatter_random(self.ranks, config.seed, 0)
        self.objective = Objective(self.model, config.label_smoothing, ranks)
        self.clock_start = self.clock()
        self.report_start = (self.clock_start, self.tokens)

    def _open(self) -> Any:
        """The run's text and tokenizer: the first process makes the folder, the others then find it."""
        if self.ranks.first:
            opened = open_run(self.config, self.folder)
            self.ranks.wait()
            return opened
        self.ranks.wait()
        return open_run(replace(self.config, resume=True), self.folder)

    def _describe(self, corpus: Corpus) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        skipped = f", {corpus.empty + corpus.too_long:,} left out" if corpus.empty or corpus.too_long else ""
        self.progress.message(
            f"{len(corpus):,} sentence pairs{skipped}, {len(self.tokenizer):,} pieces, {parameters:,} parameters,"
            f" {self.device}{'' if self.amp is None else f' in {self.amp}'.replace('torch.', '')}"
        )

    # One update

    def run(self, interrupted: threading.Event) -> TrainResult:
        while not (stopped := self._reason_to_stop(interrupted)):
            self._update()
            self._show()
            if self.step % REPORT_EVERY == 0:
                self._report()
            if self.step % self.config.valid_every == 0:
                self._validate()
                self._save()
        if self.step != self.saved_step:
            if stopped != "interrupted":
                self._validate()
            self._save()
        return TrainResult(
            str(self.folder.root),
            self.step,
            stopped,
            self._seconds(),
            self.tokens,
            self.scores,
            self.best_step,
            self.best_scores,
        )

    def _reason_to_stop(self, interrupted: threading.Event) -> str | None:
        return STOPPED[int(self.ranks.largest(STOPPED.index(self._own_reason_to_stop(interrupted))))]

    def _own_reason_to_stop(self, interrupted: threading.Event) -> str | None:
        if interrupted.is_set():
            return "interrupted"
        if self.step >= self.config.max_steps:
            return "max_steps"
        if self.config.max_time is not None and self._seconds() >= self.config.max_time:
            return "max_time"
        return None

    def _update(self) -> None:
        parts = [self.batches.next_part(self.ranks.rank, self.ranks.world) for _ in range(self.config.accumulate)]
        tokens = sum(whole for _, whole in parts)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step + 1, self.config)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for left, (batch, _) in zip(reversed(range(len(parts))), parts):
            with self.objective.separately(left > 0):
                # Divided by the tokens of the whole update: every token weighs the same, however the batches split.
                loss = self._loss(batch) / tokens
                self.scaler.scale(loss).backward()
            self.window[0] += loss.detach() * tokens / self.ranks.world
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        if not self.scaler.is_enabled():  # the scaler skips updates with infinite gradients by itself
            self.window[1] += norm
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.tokens += tokens
        self.window_tokens += tokens
        self.window_steps += 1

    def _loss(self, batch: Batch) -> torch.Tensor:
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            return self.objective(batch)

    # Reports

    def _seconds(self) -> float:
        return self.seconds_before + self.clock() - self.clock_start

    def _check_finite(self) -> None:
        if not math.isfinite(sum(self._window())):
            raise DivergedError(
                f"training diverged: loss or gradient is not finite within the last {self.window_steps} updates before"
                f" step {self.step}; lower lr ({self.config.lr}) or lengthen warmup ({self.config.warmup})."
                f" Checkpoints so far are intact: {self.folder.steps() or 'none'}"
            )

    def _window(self) -> list[float]:
        """The sums of the loss, over all processes, and of the gradient norm, which all have."""
        loss, norm = self.window.tolist()
        return [self.ranks.total(loss), norm]

    def _rate(self) -> float:
        """Target tokens a second since the last report."""
        return (self.tokens - self.report_start[1]) / max(self.clock() - self.report_start[0], 1e-9)

    def _show(self) -> None:
        seconds = self._seconds()
        fraction = max(self.step / self.config.max_steps, seconds / (self.config.max_time or math.inf))
        self.progress.update(Status(self.step, min(fraction, 1.0), seconds, self._rate(), self.last_loss))

    def _report(self) -> None:
        self._check_finite()
        loss, norm = self._window()
        self.last_loss = loss / self.window_tokens
        self._log(
            loss=self.last_loss,
            gradient_norm=norm / self.window_steps,
            lr=learning_rate(self.step, self.config),
            tokens_per_second=self._rate(),
        )
        self.window.zero_()
        self.window_tokens = self.window_steps = 0
        self.report_start = (self.clock(), self.tokens)

    def _log(self, **values: Any) -> None:
        if not self.ranks.first:
            return
        line = {"step": self.step, "epoch": self.batches.epoch, "tokens": self.tokens, "seconds": self._seconds()}
        with self._writing_log(), open(self.folder.log, "a", encoding="utf-8") as log:
            log.write(json.dumps({**line, **values}) + "\n")

    @contextlib.contextmanager
    def _writing_log(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder.log}: {error.strerror or error}") from error

    def _validate(self) -> None:
        self._check_finite()
        if self.valid is None or self.valid_corpus is None:
            return
        pause = self.clock()
        if self.ranks.first:
            self._measure()
        measured = self.scores, self.best_step, self.best_scores
        self.scores, self.best_step, self.best_scores = self.ranks.of_the_first(measured)
        self.report_start = (self.report_start[0] + self.clock() - pause, self.report_start[1])

    def _measure(self) -> None:
        loss = corpus_loss(self.model, self.valid_corpus, self.config.batch_tokens, self.device)
        self.scores = {"valid_loss": loss}
        text = f"step {self.step:,}: validation loss {loss:.3f}, perplexity {math.exp(min(loss, 700)):.2f}"
        if self.config.bleu_sentences:
            part = slice(self.config.bleu_sentences)
            lines = translate_greedily(self.model, self.tokenizer, self.valid.source[part], self.device)
            bleu = corpus_bleu(lines, self.valid.target[part])
            self.scores["bleu"] = bleu.score
            text += f", BLEU {bleu.score:.2f} ({bleu.signature})"
        if self.best_step is None or _quality(self.scores) > _quality(self.best_scores):
            self.best_step, self.best_scores = self.step, self.scores
            text += ", the best so far"
        self._log(**self.scores)
        self.progress.message(text)

    # Checkpoints

    def _save(self) -> None:
        self._check_finite()
        window, rng = self._window(), random_states(self.ranks, self.device)
        self.saved_step = self.step
        if not self.ranks.first:
            return
        with self._writing_log(), open(self.folder.log, "ab") as log:
            os.fsync(log.fileno())
            log_bytes = log.tell()
        state = {
            "epoch": self.batches.epoch,
            "position": self.batches.position,
            "tokens": self.tokens,
            "seconds": self._seconds(),
            "window": window,
            "window_tokens": self.window_tokens,
            "window_steps": self.window_steps,
            "scores": self.scores,
            "best_step": self.best_step,
            "best_scores": self.best_scores,
            "scaler": self.scaler.state_dict(),
            "log_bytes": log_bytes,
        }
        moments = optimizer_tensors(self.model, self.optimizer)
        self.folder.save(self.step, {"model": model_tensors(self.model), "optimizer": {**moments, **rng}}, state)
        self.folder.prune(self.config.keep_last, self.best_step)

    def _restore(self, step: int) -> None:
        checkpoint = self.folder.load(step)
        state, tensors = checkpoint.state, dict(checkpoint.tensors["optimizer"])
        rng = {key: tensors.pop(key) for key in list(tensors) if key.startswith("rng:")}
        load_model_tensors(self.model, checkpoint.tensors["model"])
        load_optimizer_tensors(self.model, self.optimizer, tensors)
        continue_random(self.ranks, rng, self.device, self.config.seed, step)
        self.batches.seek(state["epoch"], state["position"])
        self.step = self.saved_step = step
        self.tokens, self.seconds_before = state["tokens"], state["seconds"]
        self.window.copy_(torch.tensor(state["window"], dtype=torch.float64))
        self.window[0] *= self.ranks.first  # the sum of all is the first one's to keep
        self.window_tokens, self.window_steps = state["window_tokens"], state["window_steps"]
        self.scores, self.best_step, self.best_scores = state["scores"], state["best_step"], state["best_scores"]
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._cut_log(state["log_bytes"])
        if self.ranks.first:
            self.folder.prune(self.config.keep_last, self.best_step)
        self.progress.message(f"resumed {self.folder.root} at step {step:,}")

    def _cut_log(self, size: int) -> None:
        """Drop what was logged after the checkpoint; it will happen, and be logged, once more."""
        if not self.ranks.first:
            return
        with self._writing_log():
            if self.folder.log.exists() and self.folder.log.stat().st_size > size:
                os.truncate(self.folder.log, size)


def _quality(scores: dict[str, float]) -> tuple[float, float]:
    return scores.get("bleu", 0.0), -scores.get("valid_loss", math.inf)
