"""Decoding steps that a CUDA graph can replay.

A step of decoding is some hundred small kernels, and on a GPU the host, which launches them one by one, is what takes
the time. A graph launches them all at once, but it replays exactly what it recorded: the same kernels on the same
addresses and shapes. So nothing in `StaticStep` depends on how far a translation is or on what was said: how many
positions the cache holds is a number on the device, rows are as many as their class has (powers of two; the rows beyond
those in use compute what nobody reads), and a beam changes places by an index of pages. A graph is recorded for each
class of rows and each capacity of the cache that a call meets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.attention import MultiHeadAttention
from ..layers.decoder import LayerCache
from ..layers.embedding import PositionalEncoder
from .cache import BLOCK, assign_slots, move_rows
from .weights import joined, prepared

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Takes a step without arguments, and returns what repeats it; both give the step's logits."""


def record(step: Callable[[], Tensor]) -> Replay:
    """Record a step as a CUDA graph. It runs twice before, on a stream of its own, so that what is compiled or
    allocated at a first call is there."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def obstacle(device: torch.device, mask: Tensor | None, cached: bool, attention: bool) -> str | None:
    """Why a call cannot run on graphs, or None. mask: keep mask (B, 1, S) of the source."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, and the model is on {device}"
    if not cached:
        return "only the cached steps of a decoder of transformer_fast can be recorded (cache=True, our own layers)"
    if attention:
        return "alignments and the coverage penalty read the attention's weights, which a recorded step does not make"
    if mask is not None and not _is_lengths(mask.squeeze(1)):
        return "the source mask must be padding on the right of sentences that have a token"
    return None


def _is_lengths(mask: Tensor) -> bool:
    lengths = mask.sum(dim=1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    return torch.equal(mask, expected) and bool((lengths > 0).all())


class StaticStep:
    """The newest position of up to `rows` open hypotheses through a decoder, for graphs.

    Args:
        decoder, out: of a `transformer_fast.Transformer`.
        memory: (B, S, d_model); row i is at first the only hypothesis of sentence i.
        lengths: (B,) tokens of each source; at least one each.
        rows: how many hypotheses there will be at most.
        capture: makes a replay of a step; `record`, unless a test looks at what would be recorded.
    """

    def __init__(
        self,
        decoder: nn.Module,
        out: nn.Module,
        memory: Tensor,
        lengths: Tensor,
        *,
        rows: int,
        capture: Capture = record,
    ) -> None:
        batch, device = memory.shape[0], memory.device
        self._rows = row_class(max(rows, batch))
        self._decoder, self._out, self._capture = prepared(decoder, self._rows), prepared(out, self._rows), capture
        self._place = _Place(decoder.pe)
        self._decoder._modules["pe"] = self._place
        layers = list(self._decoder.layers)
        self.length = 0
        self._held = 0
        self._cross = [
            joined(layer.attn_2.k_linear, layer.attn_2.v_linear)(memory).unflatten(-1, (2, layer.attn_2.h, -1))
            for layer in layers
        ]  # (B, S, 2, heads, d_k) each: a sentence is a page
        self._source_lengths = lengths.to(torch.int32)
        self._tokens = torch.zeros(self._rows, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._filled = torch.ones(self._rows, dtype=torch.int32, device=device)
        self._page = torch.zeros(self._rows, 1, dtype=torch.int32, device=device)
        self._read = torch.ones(self._rows, dtype=torch.int32, device=device)
        self._own: Tensor | None = None  # (layers, rows, 2, heads, capacity, d_k)
        self._slots = list(range(batch))  # of the caller's rows
        self._order: tuple[Tensor, Tensor] | None = None
        self._sentences = list(range(batch))  # of the slots
        self._tell_sentences()
        self._replays: dict[tuple[int, int], Replay] = {}
        me = weakref.proxy(self)  # no circle, as in `DecoderCache`
        self.layers = [
            LayerCache(_Own(me, i, layer.attn_1, self._rows), _Cross(me, i)) for i, layer in enumerate(layers)
        ]

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(rows, t) prefixes, BOS first -> (rows, vocabulary)."""
        rows, newest = tokens.shape[0], tokens[:, -1]
        self._make_room()
        self._tokens[:rows] = newest if self._order is None else newest.index_select(0, self._order[0])
        self._position.fill_(self._held)
        self._filled.fill_(self._held + 1)
        self._place.move_to(self._held)
        key = row_class(rows), self._own.shape[4]
        if key not in self._replays:
            self._replays[key] = self._capture(lambda: self._run(key[0]))
        logits = self._replays[key]()[:rows]
        self._held += 1
        # A copy, because the next replay writes over it.
        return logits.clone() if self._order is None else logits.index_select(0, self._order[1])

    def select(self, rows: Tensor) -> None:
        """Keep these of the caller's rows, in this order."""
        parents = [self._slots[row] for row in rows.tolist()]
        self._slots, moves = assign_slots(parents)
        sentences = [0] * len(parents)
        for slot, parent in zip(self._slots, parents, strict=True):
            sentences[slot] = self._sentences[parent]
        self._sentences = sentences
        if moves and self._own is not None:
            move_rows(self._own, moves, self._held)
        leaving = torch.tensor(self._slots)
        self._order = tuple(t.to(self._page.device) for t in (leaving.argsort(), leaving))
        self._tell_sentences()

    def _run(self, rows: int) -> Tensor:
        """What is recorded: no shape, address or branch in it changes from step to step."""
        self._active = rows
        hidden = self._decoder(self._tokens[:rows, None], None, None, None, cache=self)
        return self._out(hidden[:, -1])

    def _tell_sentences(self) -> None:
        """Rows in use read their sentence; the others the first."""
        page = torch.tensor(self._sentences, dtype=torch.int32).to(self._page.device)
        self._page[: len(page), 0] = page
        self._page[len(page) :] = 0
        torch.index_select(self._source_lengths, 0, self._page[:, 0].long(), out=self._read)

    def _make_room(self) -> None:
        if self._own is not None and self._held < self._own.shape[4]:
            return
        attention, capacity = self._decoder.layers[0].attn_1, BLOCK if self._own is None else 2 * self._own.shape[4]
        shape = len(self.layers), self._rows, 2, attention.h, capacity, attention.d_k
        # Zeros: rows that nobody reads are computed too, and NaN among them would look like an error of the model's.
        grown = self._cross[0].new_zeros(shape)
        if self._own is not None:
            grown[..., : self._held, :] = self._own
        self._own = grown

    def append(self, layer: int, states: Tensor) -> Tensor:
        """(rows, 2, heads, d_k), keys and values of the newest position -> (rows, 2, heads, capacity, d_k)."""
        own = self._own[layer, : self._active]
        own.index_copy_(3, self._position, states.unsqueeze(3))
        return own

    def read_own(self, q: Tensor, states: Tensor) -> Tensor:
        k, v = states.unbind(1)
        return ops.attention_decode(q, k, v, self._filled[: self._active])

    def read_source(self, layer: int, q: Tensor) -> Tensor:
        k, v = self._cross[layer].unbind(2)
        rows = slice(0, self._active)
        return ops.attention_decode(q, k, v, self._read[rows], page_table=self._page[rows], causal=False)


class _Place(nn.Module):
    """Stands for the positional encoder: its table is the one row of the position at hand, at one address."""

    def __init__(self, encoder: PositionalEncoder) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0).eval()
        self._encoder = [encoder]
        self._row = encoder.table(1)[:1].clone()

    def move_to(self, position: int) -> None:
        self._row.copy_(self._encoder[0].table(position + 1)[position : position + 1])

    def table(self, length: int) -> Tensor:
        """(1, d_model)"""
        return self._row


class _Own:
    """Self-attention of one layer."""

    def __init__(self, step: StaticStep, layer: int, attention: MultiHeadAttention, rows: int) -> None:
        self._step, self._layer = step, layer
        self._project = joined(attention.q_linear, attention.k_linear, attention.v_linear, rows=rows)

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        states = self._project(x).view(x.shape[0], 3, attention.h, attention.d_k)
        known = self._step.append(self._layer, states[:, 1:])
        return self._step.read_own(states[:, 0].unsqueeze(2), known).reshape(x.shape)


class _Cross:
    """Attention of one layer to the source."""

    def __init__(self, step: StaticStep, layer: int) -> None:
        self._step, self._layer = step, layer

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        q = attention.q_linear(x).view(x.shape[0], 1, attention.h, attention.d_k).transpose(1, 2)
        return self._step.read_source(self._layer, q).transpose(1, 2).reshape(x.shape)


def row_class(rows: int) -> int:
    """The smallest power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()
