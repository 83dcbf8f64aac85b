"""Progress of training and of translating: a bar on a terminal, else a line at intervals."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

from tqdm import tqdm


@dataclass(frozen=True)
class Status:
    """State of a run.

    Attributes:
        step: updates done.
        fraction: share of the run that is over, 0..1, by `max_steps` or `max_time`, whichever ends it first.
        seconds: training time so far, resumed parts included.
        tokens_per_second: target tokens per second since the last report, padding not counted.
        loss: mean training loss up to the last report, nats per token, smoothed labels; None before the first.
    """

    step: int
    fraction: float
    seconds: float
    tokens_per_second: float
    loss: float | None

    @property
    def eta(self) -> float:
        """Seconds left at the pace so far; infinite at the very start."""
        return self.seconds * (1 - self.fraction) / self.fraction if self.fraction else float("inf")


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        folder: the run folder.
        step: updates done.
        stopped: reason for the end: "max_steps", "max_time", "patience" or "interrupted".
        seconds: training time on the clock, resumed parts included.
        tokens: target tokens trained on, padding not counted.
        scores: scores of the last validation: "valid_loss" (nats per token) and "bleu", as far as measured.
        best_step, best_scores: the best validation, which is the highest BLEU, else the lowest loss.
        average_scores: scores of the mean of the last checkpoints, if requested and measured.
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


class Progress(Protocol):
    """Protocol for receivers of `train`'s reports: any object with these three methods."""

    def update(self, status: Status) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def format_seconds(seconds: float) -> str:
    """`seconds` as 1:02:03 or 4:05, and an unknown (infinite) time as ?."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TerminalProgress:
    """A tqdm bar where `stream` is a terminal, else one line every `interval` seconds.

    Args:
        stream: output stream; standard error by default, so that standard output can be piped.
        interval: minimum number of seconds between two lines, without a bar.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 10.0):
        self._stream = stream or sys.stderr
        self._interval = interval
        self._last_line = time.monotonic()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            form = "{percentage:3.0f}% |{bar}| {desc}"
            self._bar = tqdm(total=1.0, file=self._stream, bar_format=form, dynamic_ncols=True)

    def update(self, status: Status) -> None:
        loss = "" if status.loss is None else f"  loss {status.loss:.3f}"
        text = (
            f"step {status.step:,}{loss}  {status.tokens_per_second:,.0f} tok/s"
            f"  {format_seconds(status.seconds)} < {format_seconds(status.eta)}"
        )
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(status.fraction - self._bar.n)
        elif time.monotonic() - self._last_line >= self._interval:
            self._last_line = time.monotonic()
            print(f"{100 * status.fraction:3.0f}%  {text}", file=self._stream, flush=True)

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class LineProgress:
    """Progress of translation by lines: a tqdm bar if `stream` is a terminal, else one line every `interval` seconds.
    The object is a context manager that closes the bar.

    Args:
        count: function that returns the total number of lines, or None; called once, and only for a bar.
        hidden: show messages alone.
        stream, interval: as for `TerminalProgress`.
    """

    def __init__(
        self,
        count: Callable[[], int | None],
        *,
        hidden: bool = False,
        stream: TextIO | None = None,
        interval: float = 10.0,
    ):
        self._stream = stream or sys.stderr
        self._interval = math.inf if hidden else interval
        self._lines = 0
        self._start = self._last_line = time.monotonic()
        self._bar: tqdm | None = None
        if self._stream.isatty() and not hidden:
            self._bar = tqdm(total=count(), unit=" lines", file=self._stream, dynamic_ncols=True)

    def update(self) -> None:
        """Count one more translated line."""
        self._lines += 1
        if self._bar is not None:
            self._bar.update()
        elif (now := time.monotonic()) - self._last_line >= self._interval:
            self._last_line, seconds = now, now - self._start
            rate = self._lines / max(seconds, 1e-9)
            print(
                f"{self._lines:,} lines  {rate:,.1f} lines/s  {format_seconds(seconds)}", file=self._stream, flush=True
            )

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Silent(Progress):
    """Progress that reports nothing."""
