"""CUDA graphs of the cached step.

A decoding step has some hundred small kernels. On a GPU most of a step's time is the host launching these kernels one
by one. A graph launches them all at once, but it replays exactly what it recorded: the same kernels on the same
addresses and shapes. So a step with a `StaticCache` has the number of positions in a tensor, and its number of rows is
rounded up to a power of two (results of unused rows are not read). Index tensors of a fixed size hold the places of the
rows. A graph is recorded for each such number of rows and each capacity of the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from .cache import DecoderCache, as_lengths

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Function that takes a step without arguments and returns its replay; both return the step's logits."""


def record(step: Callable[[], Tensor]) -> Replay:
    """Record a step as a CUDA graph. The step first runs twice on its own stream, so that compilation and allocation
    are done."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class StepGraphs:
    """Replays steps as graphs, which are recorded at first need.

    Args:
        cache: cache of the steps.
        capture: function that makes the replay of a step; `record`, except in tests.
    """

    def __init__(self, cache: StaticCache, capture: Capture = record) -> None:
        self._cache, self._capture = cache, capture
        self._replays: dict[tuple[int, int], Replay] = {}

    def __call__(self, step: Callable[[Tensor], Tensor], newest: Tensor) -> Tensor:
        """Replay `step` for the newest ids (rows,): logits (rows, vocabulary)."""
        tokens = self._cache.prepare(newest)
        key = len(tokens), self._cache.capacity
        if key not in self._replays:
            self._replays[key] = self._capture(lambda: step(tokens))
        # A copy, because the next replay writes over the result.
        return self._replays[key]()[: len(newest)].clone()


class StaticCache(DecoderCache):
    """`DecoderCache` whose steps a graph can record: values that change from step to step are at fixed addresses.

    mask: keep mask that is equivalent to lengths, each at least 1.
    """

    def __init__(self, decoder: nn.Module, memory: Tensor, mask: Tensor | None, *, rows: int) -> None:
        super().__init__(decoder, memory, mask, rows=rows)

        def per_row(dtype: torch.dtype) -> Tensor:
            return torch.zeros(self._max_rows, dtype=dtype, device=memory.device)

        self._tokens, self._position, self._entered, self._left = (per_row(torch.long) for _ in range(4))
        self._lengths, self._pages, self._source_lengths = (per_row(torch.int32) for _ in range(3))
        self._order = self._entered, self._left
        self._slots_changed()

    def select(self, rows: list[int]) -> None:
        if rows:  # without rows there is no further step
            super().select(rows)

    def prepare(self, newest: Tensor) -> Tensor:
        """Write the ids (rows,) of the next step and its position to the addresses that graphs read.

        Returns the ids for the graph, padded to the rounded number of rows. Call this method before each step.
        """
        rows = len(newest)
        self.own(rows)
        self._tokens[:rows] = newest
        self._position.fill_(self.length)
        self._lengths.fill_(self.length + 1)
        return self._tokens[: row_class(rows)]

    @property
    def capacity(self) -> int:
        """Number of positions for which there is room."""
        return self._states.shape[4]

    def position(self, rows: int) -> tuple[Tensor, int]:
        return self._position[:rows], self.capacity

    def attend_own(self, layer: int, q: Tensor, states: Tensor) -> Tensor:
        own = self._states[layer, : q.shape[0]]
        own.index_copy_(3, self._position[:1], states.unsqueeze(3))
        return ops.attention_decode(q, *own.unbind(1), self._lengths[: q.shape[0]])

    def attend_source(self, layer: int, q: Tensor) -> Tensor:
        k, v = self.cross[layer].transpose(2, 3).unbind(1)  # the source of a sentence is one page
        lengths, pages = self._source_lengths[: q.shape[0]], self._pages[: q.shape[0], None]
        return ops.attention_decode(q.transpose(1, 2), k, v, lengths, page_table=pages, causal=False).transpose(1, 2)

    def _slots_changed(self) -> None:
        """Let used slots read their sentence, and unused slots the first one."""
        rows = len(self._slots)
        slots = torch.tensor([*self._slots, *range(rows, self._max_rows)])
        sentences = torch.tensor([*self._sentences, *[0] * (self._max_rows - rows)]).to(self._pages.device)
        self._entered.copy_(slots.argsort())
        self._left.copy_(slots)
        self._pages.copy_(sentences)
        self._source_lengths.copy_(self.source_lengths[sentences])

    def _set_mask(self, mask: Tensor | None) -> None:
        _, batch, _, _, length, _ = self.cross.shape
        full = torch.full((batch,), length, device=self.cross.device)
        self.source_lengths = full if mask is None else mask.sum(dim=1)


def obstacle(device: torch.device, mask: Tensor | None, cached: bool, attention: bool) -> str | None:
    """Reason why a call cannot run on graphs, or None. mask: keep mask (B, 1, S) of the source."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, and the model is on {device}"
    if not cached:
        return "only cached steps can be recorded; expected cache=True and a decoder of transformer_fast's own layers"
    if attention:
        return "alignments and the coverage penalty read attention weights, which a recorded step does not compute"
    lengths = None if mask is None else as_lengths(mask.squeeze(1))
    if mask is not None and (lengths is None or not (lengths > 0).all()):
        return "the source mask must be padding on the right, and every sentence must have a token"
    return None


def row_class(rows: int) -> int:
    """Return the smallest power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()
