"""The training loop of a run.

A run is a pure function of its settings, its text and its step. A checkpoint holds the weights, Adam's moments, random
number states, the position in the data and the sums of the current report. So a killed run continues with the same bits
as an uninterrupted run, on the same kind of machine with the same number of threads.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .averaging import average_checkpoints, save_average, steps_to_average
from .batching import Corpus, TokenBatches
from .checkpoint import RunFolder
from .config import TrainConfig
from .environment import amp_dtype, choose_device, interruptible, multiplies_bf16, open_run
from .errors import CheckpointError, DivergedError
from .learner import Learner
from .model import build_model
from .optim import learning_rate
from .progress import Progress, Silent, Status, TerminalProgress, TrainResult, format_seconds
from .ranks import Ranks, gather_rng_states, process_group, restore_rng_states, seed_rank
from .reports import RunLog, Window
from .validation import Validation

STOPPED = (None, "patience", "max_time", "max_steps", "interrupted")  # if several apply, the last is reported
REPORT_EVERY = 20  # updates; a report reads the loss back from the device, which an update does not do


def train(
    config: TrainConfig,
    progress: Progress | None = None,
    *,
    translation: Mapping[str, Any] | None = None,
    build: Callable[[TrainConfig, int], nn.Module] = build_model,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainResult:
    """Train a translator, or continue the run in `config.save`.

    Args:
        config: the settings. `max_time` counts the seconds spent training, validating and saving, over all parts of
            a resumed run; reading the text and learning the vocabulary are not counted.
        progress: receiver of reports; by default a bar on a terminal, else a line every 10 seconds, on standard error.
        translation: options of `GenerationConfig` by name, kept in the run as the defaults of `translate`; None leaves
            the options of a run as they are.
        build: makes the model from the settings and the size of the vocabulary.
        clock: returns seconds; `time.process_time` makes `max_time` a budget of CPU time.

    The first interrupt (Ctrl-C or SIGTERM) ends the run after the current update with a checkpoint. Seeds torch's
    default generators.

    Started by torchrun, all processes train one model: each takes its part of the rows of every batch, gradients are
    summed, and rank 0 writes. An update is the same, up to rounding and the places of dropout, on any number of
    processes, so a run may be resumed on another number; the folder must be one they all see.

    Raises:
        ConfigError, DataError: settings or text that cannot work.
        CheckpointError: the folder cannot be written, or holds a damaged, foreign or differently configured run.
        DivergedError: the loss is no longer finite.
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """
    folder = RunFolder(config.save)
    with process_group(choose_device(config)) as ranks:
        progress = Silent() if ranks.rank else progress or TerminalProgress()
        try:
            writing = contextlib.nullcontext() if ranks.rank else folder.writing(progress.message)
            with writing, interruptible() as interrupted:
                return _Run(config, folder, progress, build, clock, ranks, translation).run(interrupted)
        finally:
            progress.close()
            if ranks.world_size > 1:
                # DDP and FSDP modules are in reference cycles, and hold connections. Freeing such a module after its
                # connection was closed may wait forever.
                gc.collect()


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        progress: Progress,
        build: Callable[[TrainConfig, int], nn.Module],
        clock: Callable[[], float],
        ranks: Ranks | None = None,
        translation: Mapping[str, Any] | None = None,
    ):
        self.config, self.folder, self.progress, self.clock = config, folder, progress, clock
        self.ranks = ranks = ranks or Ranks()
        self.device = choose_device(config)
        amp_dtype(config, self.device)  # raises before any text is read if the device does not support amp
        self.log = None if ranks.rank else RunLog(folder, tensorboard=config.tensorboard)
        if ranks.rank:
            ranks.barrier()  # rank 0 makes the folder, the other ranks then find it
        opened = replace(config, resume=True) if ranks.rank else config
        text, valid, self.tokenizer = open_run(opened, folder, translation)
        if not ranks.rank:
            ranks.barrier()
        corpus = Corpus(text, self.tokenizer, config.max_length)
        self.batches = TokenBatches(corpus, config.batch_tokens, config.seed)
        self.validation = Validation(config, valid, self.tokenizer, self.device)
        torch.manual_seed(config.seed)
        self.learner = Learner(config, build(config, len(self.tokenizer)), self.device, ranks)
        self.step = self.tokens = 0
        self.epoch_ended = False
        self.seconds_before = 0.0
        self.window = Window(self.device, ranks)
        self.last_loss: float | None = None
        self.saved_step = -1
        # State before the last validation of an interrupted run, which an uninterrupted run would not have: scores and
        # log size.
        self.at_end: dict[str, Any] | None = None
        self.log_bytes: int | None = None
        self._describe(corpus)
        if steps := folder.steps():
            self._restore(steps[-1])
        else:
            if self.log:
                self.log.begin(0, 0)
            seed_rank(ranks, config.seed, 0)
        self.clock_start = self.clock()
        self.report_start = (self.clock_start, self.tokens)

    def _describe(self, corpus: Corpus) -> None:
        parameters, amp = sum(p.numel() for p in self.learner.model.parameters()), self.learner.amp
        pairs = f"{len(corpus):,} sentence pair{'' if len(corpus) == 1 else 's'}"
        skipped = f", {corpus.empty + corpus.too_long:,} left out" if corpus.empty or corpus.too_long else ""
        self.progress.message(
            f"{pairs}{skipped}, {len(self.tokenizer):,} pieces, {parameters:,} parameters,"
            f" {self.device}{'' if amp is None else f' in {amp}'.replace('torch.', '')}"
        )
        if amp is not None and self.device.type == "cpu" and not multiplies_bf16():
            self.progress.message(
                "amp is 'bf16', but this CPU has no instructions for products of bfloat16 (AVX512-BF16 or AMX): "
                "every update takes several times as long as with amp 'off'"
            )

    # One update

    def run(self, interrupted: threading.Event) -> TrainResult:
        began = self.step
        with contextlib.closing(self.log) if self.log else contextlib.nullcontext():
            while not (stopped := self._reason_to_stop(interrupted)):
                self._update()
                self._show()
                if self.step % REPORT_EVERY == 0:
                    self._report()
                if self.step % self.config.valid_every == 0 if self.config.valid_every else self.epoch_ended:
                    self._validate()
                    self._save()
            if began == self.step == self.saved_step:
                if self.at_end:
                    self.validation.restore(self.at_end)
                if stopped != "interrupted":
                    self._report_finished(stopped)
            if self.step != self.saved_step:
                before = {"validation": self.validation.state(), "log_bytes": self.log.flush() if self.log else 0}
                if stopped != "interrupted":
                    self._validate()
                self._save(before)
            averaged = self.config.average_last and stopped != "interrupted" and not self.ranks.rank
            average_scores = self.ranks.broadcast_from_rank0(self._average() if averaged else {})
        return TrainResult(
            folder=str(self.folder.root),
            step=self.step,
            stopped=stopped,
            seconds=self._seconds(),
            tokens=self.tokens,
            scores=self.validation.scores,
            best_step=self.validation.best_step,
            best_scores=self.validation.best_scores,
            average_scores=average_scores,
        )

    def _report_finished(self, stopped: str) -> None:
        """Report that nothing was trained, where the result is, and how to continue training."""
        found = self.folder.path(self.validation.best_step or self.step)
        value = format_seconds(self.config.max_time) if stopped == "max_time" else getattr(self.config, stopped)
        advice = f"raise {stopped}, which is {value}, to train on"
        if stopped == "patience":
            advice += " (0: no limit)"
        elif stopped == "max_steps" and self.config.cooldown:
            advice = "its learning rate has cooled down; train another run, with more max_steps, in another folder"
        self.progress.message(
            f"the run in {self.folder.root} is finished at step {self.step:,}: nothing was trained. Its result is in"
            f" {found}; {advice}"
        )

    def _reason_to_stop(self, interrupted: threading.Event) -> str | None:
        config = self.config
        holds = (
            True,
            config.patience and self.validation.without_better >= config.patience,
            config.max_time is not None and self._seconds() >= config.max_time,
            self.step >= config.max_steps,
            interrupted.is_set(),
        )
        return STOPPED[int(self.ranks.max(max(index for index, held in enumerate(holds) if held)))]

    def _update(self) -> None:
        if self.log_bytes is not None and self.log:
            self.log.begin(self.log_bytes, self.step)
        self.log_bytes = None
        epochs = self.batches.epochs_done
        parts = [self.batches.next_batch(self.ranks.rank, self.ranks.world_size) for _ in range(self.config.accumulate)]
        tokens = sum(count for _, count in parts)
        self.window.add(*self.learner.update(self.step + 1, [batch for batch, _ in parts], tokens), tokens)
        self.step += 1
        self.epoch_ended = self.batches.epochs_done > epochs
        self.tokens += tokens

    # Reports

    def _seconds(self) -> float:
        return self.seconds_before + self.clock() - self.clock_start

    def _check_finite(self) -> None:
        if not math.isfinite(sum(self.window.sums())):
            raise DivergedError(
                f"training diverged: loss or gradient is not finite within the last {self.window.steps} updates before"
                f" step {self.step}; lower lr ({self.config.lr}) or lengthen warmup ({self.config.warmup})."
                f" Checkpoints so far are intact: {self.folder.steps() or 'none'}"
            )

    def _rate(self) -> float:
        """Target tokens per second since the last report."""
        return (self.tokens - self.report_start[1]) / max(self.clock() - self.report_start[0], 1e-9)

    def _show(self) -> None:
        seconds = self._seconds()
        fraction = max(self.step / self.config.max_steps, seconds / (self.config.max_time or math.inf))
        self.progress.update(Status(self.step, min(fraction, 1.0), seconds, self._rate(), self.last_loss))

    def _report(self) -> None:
        self._check_finite()
        loss, norm = self.window.sums()
        self.last_loss = loss / self.window.tokens
        self._log(
            loss=self.last_loss,
            gradient_norm=norm / self.window.steps,
            lr=learning_rate(self.step, self.config),
            tokens_per_second=self._rate(),
        )
        self.window.begin()
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
        model = self.learner.eval_model()
        if not self.ranks.rank:
            scores, summary = self.validation.measure(model)
            best = self.validation.take(self.step, scores)
            self._log(**scores)
            self.progress.message(f"step {self.step:,}: {summary}{', the best so far' if best else ''}")
        self.validation.restore(self.ranks.broadcast_from_rank0(self.validation.state()))
        self.report_start = (self.report_start[0] + self.clock() - pause, self.report_start[1])

    def _average(self) -> dict[str, float]:
        """Write the mean of the last checkpoints; its scores."""
        average = average_checkpoints(self.folder, self.config.average_last)
        scores, summary = self.validation.measure(self.learner.copy_with(average.tensors))
        sentences = self.config.bleu_sentences
        save_average(self.folder, replace(average, scores=scores, bleu_sentences=sentences))
        self._log(average_of=len(average.steps), **{f"average_{name}": value for name, value in scores.items()})
        self.progress.message(f"mean of the checkpoints {', '.join(map(str, average.steps))}: {summary}")
        return scores

    # Checkpoints

    def _save(self, before: dict[str, Any] | None = None) -> None:
        """Write a checkpoint. before: for a checkpoint that a run in one piece would not have, the state to go on
        with."""
        self._check_finite()
        window, groups = self.window.state(), self.learner.tensors()
        groups["optimizer"] |= gather_rng_states(self.ranks, self.device)
        self.saved_step = self.step
        if not self.log:
            return
        state = {
            "epoch": self.batches.epoch,
            "position": self.batches.position,
            "epoch_end": self.epoch_ended and not self.config.valid_every,
            "tokens": self.tokens,
            "seconds": self._seconds(),
            **window,
            **self.validation.state(),
            "scaler": self.learner.scaler.state_dict(),
            "log_bytes": self.log.flush(),
            "between": before,
        }
        self.folder.save(self.step, groups, state)
        self._prune(before["validation"]["best_step"] if before else None)

    def _prune(self, best_before: int | None = None) -> None:
        """Delete checkpoints; the best one stays, and the best one without the validation at the end of a piece."""
        averaged = steps_to_average(self.folder, self.config.average_last) if self.config.average_last else []
        self.folder.prune(self.config.keep_last, {*averaged, self.validation.best_step, best_before})

    def _restore(self, step: int) -> None:
        checkpoint = self.folder.load(step)
        state, optimizer = checkpoint.state, checkpoint.tensors["optimizer"]
        rng = {key: optimizer.pop(key) for key in list(optimizer) if key.startswith("rng:")}
        self.learner.load(checkpoint.tensors)
        restore_rng_states(self.ranks, rng, self.device, self.config.seed, step)
        self.step = self.saved_step = step
        try:
            log_bytes = self._continue(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder.path(step) / 'state.json'} is not of a training run: {type(error).__name__}: {error}."
                f" {self.folder.last_good(step)}"
            ) from None
        if self.log:
            self.log.begin(log_bytes, step)
            self._prune()
        self.progress.message(f"resumed {self.folder.root} at step {step:,}")
        if said := self.validation.changed_rule():
            self.progress.message(said)

    def _continue(self, state: dict[str, Any]) -> int:
        """Restore the plain values that `_save` wrote; returns the length of the log at that time."""
        self.batches.seek(state["epoch"], state["position"])
        self.epoch_ended = state.get("epoch_end", False)
        self.tokens, self.seconds_before = state["tokens"], state["seconds"]
        self.window.restore(state)
        self.validation.restore(state)
        if before := state.get("between"):
            self.at_end, self.log_bytes = self.validation.state(), before["log_bytes"]
            self.validation.restore(before["validation"])
        if state["scaler"]:
            self.learner.scaler.load_state_dict(state["scaler"])
        return state["log_bytes"]
