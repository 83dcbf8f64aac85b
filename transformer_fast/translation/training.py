"""The training loop: everything a run is, in the order in which it happens.

A run is a pure function of its settings, its text and its step. Weights, Adam's moments, random number states, the
place in the data and the sums of the report under way are all in a checkpoint, so a run that was killed, at any
moment, continues bit for bit as if never stopped (on the same kind of machine with the same number of threads).
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .averaging import average_checkpoints, save_average, steps_to_average
from .batching import Batch, Corpus, TokenBatches
from .checkpoint import RunFolder, Tensors
from .config import TrainConfig
from .ema import MovingAverage
from .environment import amp_dtype, choose_device, interruptible, open_run
from .errors import DivergedError
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
from .reports import RunLog
from .validation import Validation

STOPPED = (None, "max_steps", "max_time", "patience", "interrupted")  # where processes disagree, the last holds
REPORT_EVERY = 20  # updates; a report reads the loss back from the device, which an update does not do


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        folder: the run folder.
        step: updates done.
        stopped: why it ended: "max_steps", "max_time", "patience" or "interrupted".
        seconds: training time on the clock, resumed parts included.
        tokens: target tokens trained on, padding not counted.
        scores: of the last validation: "valid_loss" (nats a token) and "bleu", as far as measured.
        best_step, best_scores: the best validation, which is the highest BLEU, else the lowest loss.
        average_scores: of the mean of the last checkpoints, if it was asked for and measured.
    """

    folder: str
    step: int
    stopped: str
    seconds: float
    tokens: int
    scores: dict[str, float]
    best_step: int | None
    best_scores: dict[str, float]
    average_scores: dict[str, float]


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
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """
    folder = RunFolder(config.save)
    with joined(choose_device(config)) as ranks:
        progress = progress or TerminalProgress() if ranks.first else Silent()
        try:
            with folder.writing() if ranks.first else contextlib.nullcontext(), interruptible() as interrupted:
                run = _Run(config, folder, progress, build, clock, ranks)
                with contextlib.closing(run.log) if run.log else contextlib.nullcontext():
                    return run.run(interrupted)
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
        self.log = RunLog(folder, tensorboard=config.tensorboard) if ranks.first else None
        text, valid, self.tokenizer = self._open()
        corpus = Corpus(text, self.tokenizer, config.max_length)
        self.batches = TokenBatches(corpus, config.batch_tokens, config.seed)
        self.validation = Validation(config, valid, self.tokenizer, self.device)
        torch.manual_seed(config.seed)
        self.model = build(config, len(self.tokenizer)).to(self.device)
        self.optimizer = build_optimizer(self.model, config)
        self.ema = MovingAverage(self.model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp == torch.float16)
        self.step = self.tokens = 0
        self.epoch_ended = False
        self.seconds_before = 0.0
        self.window = torch.zeros(2, dtype=torch.float64, device=self.device)  # sums of loss and gradient norm
        self.window_tokens = self.window_steps = 0
        self.last_loss: float | None = None
        self.saved_step = -1
        self._describe(corpus)
        if self.folder.steps():
            self._restore(self.folder.steps()[-1])
        else:
            if self.log:
                self.log.begin(0, 0)
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
            if self.step % self.config.valid_every == 0 if self.config.valid_every else self.epoch_ended:
                self._validate()
                self._save()
        if self.step != self.saved_step:
            if stopped != "interrupted":
                self._validate()
            self._save()
        averaged = self.config.average_last and stopped != "interrupted"
        average_scores = self.ranks.of_the_first(self._average() if averaged and self.ranks.first else {})
        return TrainResult(
            str(self.folder.root),
            self.step,
            stopped,
            self._seconds(),
            self.tokens,
            self.validation.scores,
            self.validation.best_step,
            self.validation.best_scores,
            average_scores,
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
        if self.config.patience and self.validation.without_better >= self.config.patience:
            return "patience"
        return None

    def _update(self) -> None:
        epochs = self.batches.epochs_done
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
        self.epoch_ended = self.batches.epochs_done > epochs
        if self.ema:
            self.ema.update(self.step)
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
        if self.log:
            line = {"step": self.step, "epoch": self.batches.epoch, "tokens": self.tokens, "seconds": self._seconds()}
            self.log.write({**line, **values})

    def _validate(self) -> None:
        self._check_finite()
        if self.validation.text is None:
            return
        pause = self.clock()
        if self.ranks.first:
            scores, said = self.validation.measure(self._served())
            best = self.validation.take(self.step, scores)
            self._log(**scores)
            self.progress.message(f"step {self.step:,}: {said}{', the best so far' if best else ''}")
        self.validation.restore(self.ranks.of_the_first(self.validation.state()))
        self.report_start = (self.report_start[0] + self.clock() - pause, self.report_start[1])

    def _served(self) -> nn.Module:
        """The model that is validated: one with the moving average, where there is one."""
        if not self.ema:
            return self.model
        return self._copy_with({**model_tensors(self.model), **self.ema.tensors()})

    def _copy_with(self, tensors: Tensors) -> nn.Module:
        model = copy.deepcopy(self.model)
        load_model_tensors(model, tensors)
        return model

    def _average(self) -> dict[str, float]:
        """Write the mean of the last checkpoints; its scores."""
        average = average_checkpoints(self.folder, self.config.average_last)
        scores, said = self.validation.measure(self._copy_with(average.tensors))
        save_average(self.folder, replace(average, scores=scores))
        self._log(average_of=len(average.steps), **{f"average_{name}": value for name, value in scores.items()})
        self.progress.message(f"mean of the checkpoints {', '.join(map(str, average.steps))}: {said}")
        return scores

    # Checkpoints

    def _save(self) -> None:
        self._check_finite()
        window, rng = self._window(), random_states(self.ranks, self.device)
        self.saved_step = self.step
        if not self.log:
            return
        state = {
            "epoch": self.batches.epoch,
            "position": self.batches.position,
            "epoch_end": self.epoch_ended and not self.config.valid_every,
            "tokens": self.tokens,
            "seconds": self._seconds(),
            "window": window,
            "window_tokens": self.window_tokens,
            "window_steps": self.window_steps,
            **self.validation.state(),
            "scaler": self.scaler.state_dict(),
            "log_bytes": self.log.flush(),
        }
        groups = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.model, self.optimizer) | rng}
        if self.ema:
            groups["ema"] = groups["model"] | self.ema.tensors()
        self.folder.save(self.step, groups, state)
        self._prune()

    def _prune(self) -> None:
        averaged = steps_to_average(self.folder, self.config.average_last) if self.config.average_last else []
        self.folder.prune(self.config.keep_last, {*averaged, self.validation.best_step})

    def _restore(self, step: int) -> None:
        checkpoint = self.folder.load(step)
        state, tensors = checkpoint.state, dict(checkpoint.tensors["optimizer"])
        rng = {key: tensors.pop(key) for key in list(tensors) if key.startswith("rng:")}
        load_model_tensors(self.model, checkpoint.tensors["model"])
        load_optimizer_tensors(self.model, self.optimizer, tensors)
        if self.ema:
            self.ema.load(checkpoint.tensors["ema"])
        continue_random(self.ranks, rng, self.device, self.config.seed, step)
        self.batches.seek(state["epoch"], state["position"])
        self.step = self.saved_step = step
        self.epoch_ended = state.get("epoch_end", False)
        self.tokens, self.seconds_before = state["tokens"], state["seconds"]
        self.window.copy_(torch.tensor(state["window"], dtype=torch.float64))
        self.window[0] *= self.ranks.first  # the sum of all is the first one's to keep
        self.window_tokens, self.window_steps = state["window_tokens"], state["window_steps"]
        self.validation.restore(state)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.log:
            self.log.begin(state["log_bytes"], step)
            self._prune()
        self.progress.message(f"resumed {self.folder.root} at step {step:,}")
