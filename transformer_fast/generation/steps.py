"""Steps of one model, from prefixes to the logits of the next token: without a cache, or with one.

`UncachedStep` runs the decoder over the whole prefix. `CachedStep` runs it over the newest position; on a CPU all its
layers are one call where that computes the same (`fused.py`), and on a GPU CUDA graphs can replay it (`graphs.py`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.attention import layer_mask
from ..models import Decoder
from .cache import DecoderCache
from .config import GenerationConfig
from .forms import Form
from .fused import BeamSteps, Several, fused_step
from .graphs import StaticCache, StepGraphs, row_class
from .span_cache import SpanCache
from .topk import Choice
from .weights import WeightLayout, prepack


class CachedStep:
    """A model that computes the newest position only.

    Args:
        decoder, out: of the model.
        memory: (B, S, d_model), the encoder's outputs.
        mask: keep mask (B, 1, S) of the source, or None.
        config: says whether the newest position's attention to the source must be known, whether the steps are replayed
            as CUDA graphs, and whether weights are quantised; there must be no obstacle to what it says.
        rows: how many rows a step will have at most.
        spans: a step is `span_logits`, of several positions of each sentence, which has one hypothesis.
    """

    def __init__(
        self,
        decoder: Decoder,
        out: nn.Module,
        memory: Tensor,
        mask: Tensor | None,
        config: GenerationConfig,
        *,
        rows: int,
        spans: bool = False,
    ) -> None:
        rows = max(rows, memory.shape[0])
        rows = row_class(rows) if config.graph else rows
        layout = WeightLayout(config.quantize, config.keep_weights)
        self._decoder, self._out = (prepack(module, rows, layout) for module in (decoder, out))
        self._cache: DecoderCache
        self._graphs, self._fused = None, None
        if config.graph:
            self._cache = cache = StaticCache(self._decoder, memory, mask, rows=rows)
            self._graphs = StepGraphs(cache)
        else:
            kind, most = (SpanCache, memory.shape[0]) if spans else (DecoderCache, rows)
            self._cache = kind(self._decoder, memory, mask, rows=most, record=config.reads_attention)
            self._fused = fused_step(self._decoder, self._out, self._cache)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(rows, t) prefixes, BOS first -> (rows, vocabulary)."""
        newest = tokens[:, -1]
        logits = self._step(newest) if self._graphs is None else self._graphs(self._step, newest)
        self._cache.stepped()
        return logits

    def greedy_steps(self, tokens: Tensor, several: Several) -> Choice | None:
        """As `Decoding.greedy_steps`."""
        found = None if self._fused is None else self._fused.greedy(self._cache.enter(tokens[:, -1]), several)
        if found is None:
            return None
        self._cache.stepped(found.token.shape[1])
        return Choice(*map(self._cache.leave, found))

    def beam_steps(
        self, tokens: Tensor, log_prob: Tensor, width: int, candidates: int, several: Several
    ) -> BeamSteps | None:
        """As `Decoding.beam_steps`."""
        if self._fused is None:
            return None
        found = self._fused.beam(tokens[:, -1], log_prob, width, candidates, several)
        if found is not None:
            self._cache.stepped(found.history.shape[1] + 1)
        return found

    @property
    def attention(self) -> Tensor:
        return self._cache.leave(self._cache.weights)

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows.tolist())

    def span_logits(self, ids: Tensor, held: Tensor, *, newest: bool = False) -> Tensor:
        """ids (sentences, span), of which the first stand behind `held` positions, (sentences,) -> (sentences, span,
        vocabulary), or of the newest position alone. For steps made with `spans`."""
        assert isinstance(self._cache, SpanCache)
        self._cache.hold(held, ids.shape[1])
        hidden = self._hidden(ids.flatten()).unflatten(0, ids.shape)
        return self._out(hidden[:, -1:] if newest else hidden)

    def span_steps(self, newest: Tensor, held: Tensor, several: Several) -> Tensor | None:
        """The tokens of greedy steps, (sentences, steps), behind `newest`, (sentences,), which stand behind `held`
        positions; None where there is no single call for them."""
        assert isinstance(self._cache, SpanCache)
        self._cache.hold(held, 1)
        found = None if self._fused is None else self._fused.greedy(newest, several)
        if found is None:
            return None
        self._cache.hold(held, found.token.shape[1])  # `select` keeps what the last step has written: all of these
        return found.token

    def _step(self, newest: Tensor) -> Tensor:
        return self._out(self._cache.leave(self._hidden(self._cache.enter(newest))))

    def _hidden(self, ids: Tensor) -> Tensor:
        """ids (rows,) in the order of the cache -> (rows, d_model)."""
        hidden = None if self._fused is None else self._fused(ids)
        return self._decoder(ids[:, None], None, None, None, cache=self._cache)[:, -1] if hidden is None else hidden


class UncachedStep:
    """A model that runs over the whole prefix: any model, and the oracle of `CachedStep`."""

    attention: Tensor
    """(rows, S), where it was asked for."""

    def __init__(self, form: Form, memory: Tensor, mask: Tensor | None, *, attention: bool = False) -> None:
        self._reader = form.reader() if attention else None
        if attention and self._reader is None:
            raise ValueError(f"{type(form.model.decoder).__name__} has no layers whose attention could be read")
        self._form, self._mask, self._memory = form, mask, memory
        self._causal = torch.ones(1, 0, 0, dtype=torch.bool, device=memory.device)
        self._sentence = torch.arange(memory.shape[0], device=memory.device)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(rows, t) prefixes, BOS first -> (rows, vocabulary)."""
        length = tokens.shape[1]
        if self._causal.shape[-1] < length:
            # Grown by doubling: a slice of one mask serves every step.
            grown = torch.ones(2 * length, 2 * length, dtype=torch.bool, device=tokens.device)
            self._causal = grown.tril().unsqueeze(0)
        causal = self._causal[:, :length, :length]
        if self._reader is None:
            hidden = self._form.decode(tokens, self._memory, self._mask, causal)
        else:
            attention, queries, keys = self._reader
            with attention.register_forward_pre_hook(functools.partial(self._record, queries, keys)):
                hidden = self._form.decode(tokens, self._memory, self._mask, causal)
        return self._form.out(hidden[:, -1])

    def _record(self, queries: nn.Module, keys: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        newest, memory = inputs[0][:, -1:], inputs[1]
        q, k = (
            linear(x).unflatten(-1, (module.h, -1)).transpose(1, 2) for linear, x in ((queries, newest), (keys, memory))
        )
        weights = ops.attention(q, k, k, layer_mask(self._mask), return_weights=True)[1]
        self.attention = weights.float().mean(dim=1).squeeze(1)

    def select(self, rows: Tensor) -> None:
        sentence = self._sentence[rows]
        if torch.equal(sentence, self._sentence):
            return  # Rows of one sentence share its memory.
        self._sentence = sentence
        self._memory = self._memory[rows]
        self._mask = None if self._mask is None else self._mask[rows]
