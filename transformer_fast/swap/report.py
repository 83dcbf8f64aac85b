"""Report of what ``accelerate`` did to a model, and the result of its ``measure``."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..dialects.common import LAST_WEIGHTS, LastWeights
from ..layers.padded_calls import PaddedCalls
from ..testing.timer import Timing
from .rows import ALREADY, Row, text_of

LOCK = threading.RLock()
"""Lock, held while a model is changed."""


_MISSING = object()


@dataclasses.dataclass
class Attribute:
    """A change of a module's own attribute."""

    module: nn.Module
    name: str
    new: Any
    old: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.old = self.module.__dict__.get(self.name, _MISSING)

    def apply(self) -> None:
        """Set the new value."""
        self.module.__dict__[self.name] = self.new

    def undo(self) -> None:
        """Restore the old value, unless the attribute was changed since."""
        if self.module.__dict__.get(self.name, _MISSING) is not self.new:
            return
        if self.old is _MISSING:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.old


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


@dataclasses.dataclass
class Report:
    """Result of ``accelerate``: print it for at most ten lines, or :meth:`undo` it.

    Attributes:
        rows: one row per swapped module, and per unchanged module that a reader might expect to be swapped.
        plain: number of ``torch.nn`` modules with nothing to gain (Linear, ReLU, containers), by class name.
        packed: True if the padding was to be skipped.
        padded_calls: reasons why calls of a packed model kept their padding so far, with counts.
        attention: one row per attention module; ``now`` is the way in which the kernels compute the module, None if
            they do not.
        notes: requests that this model cannot meet, with the reasons; with ``quantize``, numbers and memory.
        int8: paths of the layers that this call gave int8 weights.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    plain: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    packed: bool = False
    padded_calls: PaddedCalls = dataclasses.field(default_factory=PaddedCalls)
    attention: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    int8: tuple[str, ...] = ()
    _originals: list[tuple[nn.Module, type[nn.Module], type[nn.Module], dict[str, Any]]] = dataclasses.field(
        default_factory=list, repr=False
    )
    _changes: list[Any] = dataclasses.field(default_factory=list, repr=False)
    _freed: bool = dataclasses.field(default=False, repr=False)
    _explain: Callable[[Any], str] = dataclasses.field(default=str, repr=False)
    _measure: Callable[..., Measurement] = dataclasses.field(default=Measurement, repr=False)

    @property
    def swapped(self) -> list[Row]:
        """Modules that this call swapped."""
        return [row for row in self.rows if row.now is not None]

    @property
    def left(self) -> list[Row]:
        """Unchanged modules, each with the reason."""
        return [row for row in self.rows if row.now is None]

    @property
    def already(self) -> list[Row]:
        """Unchanged modules that already run on the fused ops: swapped by an earlier call, or of this package."""
        return [row for row in self.rows if row.why == ALREADY]

    def explain(self, batch: Any) -> str:
        """Count the calls of a batch that reach the kernels, and the positions that the layers compute.

        The model is called once, without gradients and in its current mode. Without ``packed=True`` the text shows
        what packing would skip. With ``functional=True`` a line counts the calls of torch's functions that are ours.

        Args:
            batch: arguments of the model: a dictionary of keyword arguments, a tuple, or one argument.
        """
        return self._explain(batch)

    def measure(
        self,
        batch: Any,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        rounds: int = 5,
        tolerance: float | None = None,
    ) -> Measurement:
        """Compare and time the model on a batch, plain and accelerated.

        Copies of the model run, and share one copy of its weights. The model, its gradients, buffers and mode, and the
        random states of PyTorch, NumPy and Python stay as they are, also after an error. Plain means: without what
        this call of ``accelerate`` did.

        The results of an evaluation are compared first, at tokens alone. Then both models run in turn: a forward in
        evaluation without gradients, and a training step, which is a forward, the loss and a backward. A call of
        ``measure`` inside ``torch.autocast`` measures with it. On a GPU, PyTorch's peak of memory starts anew.

        Args:
            batch: arguments of the model, as for :meth:`explain`: a dictionary of keyword arguments, a tuple, or one
                argument; for a model of sentence-transformers also a list of texts.
            loss: function of the model's output that returns a tensor with one value. Default: ``output.loss``, or
                ``output["loss"]``; without either, and with int8 weights, no training step is measured.
            rounds: number of samples of each model, at least 2; the result has the medians.
            tolerance: largest allowed difference, in parts of the largest plain value of an output. Default: 1e-3 in
                float32 and float64, 0.05 in 16 bits, and any finite difference with int8 weights.

        Returns:
            Times, memory, padding and the difference as attributes; ``print`` shows them, with one sentence first.

        Raises:
            FloatingPointError: if a result differs by more than ``tolerance``; the message has the largest difference.
            RuntimeError: if there is no plain model to compare with: ``accelerate`` changed nothing, ``undo`` was
                called, or ``quantize=Int8(free=True)`` freed weights.
            ValueError: if ``rounds`` is below 2, or the loss has not one value with a gradient.

        Example:
            >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
            >>> report = tfast.accelerate(torch.nn.TransformerEncoder(layer, 2), packed=True)
            >>> padding = torch.arange(8) >= torch.tensor([[8], [4]])
            >>> batch = {"src": torch.randn(2, 8, 32), "src_key_padding_mask": padding}
            >>> result = report.measure(batch, loss=lambda output: output.square().mean())
            >>> result.padding
            0.25
            >>> result.training.ratio > 0 and result.difference < 1e-5
            True
        """
        if rounds < 2:
            raise ValueError(f"measure: rounds must be at least 2, got {rounds}")
        if not (self._originals or self._changes):
            raise RuntimeError("measure: there is nothing to compare: accelerate changed nothing, or undo was called")
        return self._measure(self, batch, loss, rounds, tolerance)

    def _give_class(self, module: nn.Module, made: type[nn.Module]) -> None:
        """Give a module a class; :meth:`undo` restores the former one."""
        computed = [name for name, value in vars(made).items() if isinstance(value, LastWeights)]
        left = {name: module.__dict__[name] for name in computed if name in module.__dict__}
        self._originals.append((module, type(module), made, left))
        module.__class__ = made
        for name in left:
            setattr(module, name, module.__dict__.pop(name))

    def _apply(self, change: Attribute) -> None:
        """Make a change, which :meth:`undo` takes back."""
        self._changes.append(change)
        change.apply()

    def undo(self) -> None:
        """Undo all changes of this call. Parameters keep their current values.

        Raises:
            RuntimeError: if ``quantize=Int8(free=True)`` freed weights; nothing is undone then.
        """
        with LOCK:
            if self._freed:
                raise RuntimeError(
                    "undo is not possible: the fp32 weights were freed (free=True): load the model again"
                )
            for module, original, fast, attributes in reversed(self._originals):
                if type(module) is fast:
                    module.__class__ = original
                    module.__dict__.pop(LAST_WEIGHTS, None)
                    module.__dict__.update(attributes)
            self._originals.clear()
            for change in reversed(self._changes):
                change.undo()
            self._changes.clear()

    def __str__(self) -> str:
        calls = [f"{n} calls with padding: {reason}" for reason, n in self.padded_calls.reasons.items()]
        return text_of(self.rows, self.attention, [*self.notes, *calls], packed=self.packed)
