"""Result of ``Report.measure``."""

from __future__ import annotations

import dataclasses

from ..testing.timer import Timing


@dataclasses.dataclass(frozen=True)
class Speed:
    """Times of a step, plain and accelerated.

    Attributes:
        plain, accelerated: seconds of a step: the median, and the 20th and 80th percentile.
        plain_memory, accelerated_memory: largest number of bytes on the GPU during a step, without those that were
            there before, weights among them; None on a CPU.
    """

    plain: Timing
    accelerated: Timing
    plain_memory: int | None = None
    accelerated_memory: int | None = None

    @property
    def ratio(self) -> float:
        """Median time of the plain model over that of the accelerated one."""
        return self.plain.median / self.accelerated.median

    def __str__(self) -> str:
        text = f"{_time(self.plain.median)} plain, {_time(self.accelerated.median)} accelerated"
        if self.plain_memory is None or self.accelerated_memory is None:
            return text
        return f"{text}; peak memory {self.plain_memory / 2**20:,.0f} and {self.accelerated_memory / 2**20:,.0f} MiB"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A model on one batch, plain and accelerated. ``print`` shows one sentence, and the numbers behind it.

    Attributes:
        evaluation: speed of a forward in evaluation, without gradients.
        training: speed of a forward, the loss and a backward in training; None if there was no loss.
        padding: share of the batch's positions that are padding, from 0 to 1; None if nothing says which they are.
        fused: number of attention modules that the kernels compute.
        attention: number of attention modules.
        difference: largest difference of a result in evaluation, at tokens.
        largest: largest absolute value of the plain results there.
    """

    evaluation: Speed
    training: Speed | None
    padding: float | None
    fused: int
    attention: int
    difference: float
    largest: float

    @property
    def sentence(self) -> str:
        """Sentence with the ratios, the padding and the number of fused attention modules."""
        ratios = [(self.training, "in training"), (self.evaluation, "in evaluation")]
        known = [f"{speed.ratio:.1f}{{}} {where}" for speed, where in ratios if speed is not None]
        texts = [text.format("" if n else " times as fast") for n, text in enumerate(known)]
        parts = [", ".join(texts)]
        if self.padding is not None:
            parts.append(f"padding is {100 * self.padding:.0f} %")
        return "; ".join([*parts, f"attention fused in {self.fused} of {self.attention}"])

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.training is not None:
            lines.append(f"training step: {self.training}")
        lines.append(f"evaluation: {self.evaluation}")
        lines.append(f"largest difference of a result: {self.difference:.1e}, of values up to {self.largest:.3g}")
        return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
