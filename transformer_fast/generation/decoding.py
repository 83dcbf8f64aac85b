"""Decoding: the open hypotheses of a batch, one per row, and the model that continues them.

`UncachedDecoding` runs the decoder over the whole prefix. `CachedDecoding` runs the decoder over the newest position.
On a CPU one call computes all layers of a decoder if they are plain (`session.py`). `Ensemble` has several models. A
search chooses the rows that continue by `select`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layers.attention import layer_mask
from ..models import Decoder
from ..ops.weight_layout import WeightLayout
from . import quantization
from .cache import DecoderCache, as_lengths
from .config import GenerationConfig
from .forms import Form, form_of
from .request import Request
from .session import BeamSteps, new_session
from .topk import Choice
from .weights import prepack

ENCODED_TOKENS = 1024
"""That a CPU encodes at a time: what layers leave of more does not stay in its caches."""


def start(models: Sequence[nn.Module], request: Request, config: GenerationConfig, *, rows: int) -> Decoding:
    """Encode the sources of a request and return its decoding, with one row per sentence.

    Args:
        models: models of forms that `form_of` knows; the mean of their probabilities counts.
        config: its options decide if keys and values are cached (for models that support it, see `forms`), if weights
            are quantised, and if the attention to the source is recorded.
        rows: largest number of rows.

    Raises:
        ValueError: if `config.quantize` or `config.keep_weights` is not possible; the message has the reason.
    """
    if config.keep_weights and _is_trained(models):
        raise ValueError(
            "keep_weights=True needs parameters that do not require gradients; expected model.requires_grad_(False) "
            "before the call"
        )
    layout = WeightLayout(config.quantize, config.keep_weights)
    forms = [quantization.apply(form_of(model), layout) for model in models]
    each = [_start_one(form, request, config, rows) for form in forms]
    return each[0] if len(each) == 1 else Ensemble(each)


def _start_one(form: Form, request: Request, config: GenerationConfig, rows: int) -> Decoding:
    mask = request.src_mask
    memory = _encode(form, request.src, mask)
    longest = int(request.limits.max()) if len(request.limits) else 1
    decoder = form.cached_decoder(memory, mask, longest) if config.cache else None
    if config.quantize and decoder is None:
        raise ValueError(f"quantize={config.quantize!r} is not possible: {form.no_cache()}")
    if decoder is None:
        return UncachedDecoding(form, memory, mask, attention=config.alignments)
    return CachedDecoding(decoder, form.out, memory, request, config, rows=rows)


class Decoding:
    """Open hypotheses of a batch, one per row, and a model that continues them."""

    @property
    def attention(self) -> Tensor:
        """Attention of the newest position to the source, fp32 (rows, S): the mean of the last layer's heads.
        Available if alignments were requested."""
        raise NotImplementedError

    def next_logits(self, tokens: Tensor, *, check: bool = True) -> Tensor:
        """Return logits (rows, vocabulary) of token t + 1 for prefixes (rows, t) that begin with BOS, in fp32 (fp64
        stays).

        The prefixes are those of the last call, reordered by `select`, each with one more token.
        Raises FloatingPointError if a model returns NaN or infinity, which no search can rank; without `check` the
        caller must call `refuse_nan`.
        """
        logits = self._logits(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if check:
            refuse_nan(logits.amax(), tokens)  # the maximum of values with a NaN is NaN
        return logits

    def greedy(self, tokens: Tensor, most: int) -> Choice | None:
        """Run several greedy steps in one call for prefixes (rows, t), each with the most likely token that is not
        suppressed.

        Returns the results of `topk.choose` per step, (rows, steps). Runs at most `most` steps, and stops after a
        step in which a row ends: it chooses EOS, has no possible token, or has NaN in its normalizer. Returns None,
        without a step, if one call cannot run several steps.
        """
        return None

    def beam(self, tokens: Tensor, log_prob: Tensor, width: int, candidates: int, most: int) -> BeamSteps | None:
        """Run several beam steps in one call, for beams whose `width` hypotheses are all open and in adjacent rows.

        Stops after the first step in which one of the best `width` continuations ends. The caller selects the rows
        of the last step only, from its best `candidates` continuations. Returns None as `greedy`.
        """
        return None

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row that repeats forks its hypothesis."""
        raise NotImplementedError

    def _logits(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Ensemble(Decoding):
    """Several models; the mean of their probabilities decides."""

    def __init__(self, each: Sequence[Decoding]) -> None:
        self._each = each

    def next_logits(self, tokens: Tensor, *, check: bool = True) -> Tensor:
        each = [one.next_logits(tokens, check=check) for one in self._each]
        return torch.stack([logits.log_softmax(dim=-1) for logits in each]).logsumexp(dim=0) - math.log(len(each))

    @property
    def attention(self) -> Tensor:
        return torch.stack([one.attention for one in self._each]).mean(dim=0)

    def select(self, rows: Tensor) -> None:
        for one in self._each:
            one.select(rows)


class CachedDecoding(Decoding):
    """Decoding with a model that computes only the newest position.

    Args:
        decoder, out: parts of the model.
        memory: (B, S, d_model), the encoder's outputs.
        request, config: arguments of the call; the options of the config must be possible.
        rows: largest number of rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        out: nn.Module,
        memory: Tensor,
        request: Request,
        config: GenerationConfig,
        *,
        rows: int,
    ) -> None:
        rows = max(rows, len(memory))
        layout = WeightLayout(config.quantize, config.keep_weights)
        self._decoder, self._out = (prepack(module, rows, layout) for module in (decoder, out))
        self._cache = DecoderCache(self._decoder, memory, request.src_mask, rows=rows, record=config.alignments)
        self._session = new_session(self._decoder, self._out, self._cache, request.eos, config)

    def greedy(self, tokens: Tensor, most: int) -> Choice | None:
        session, cache = self._prepared_session(len(tokens), most), self._cache
        if session is None:
            return None
        found = Choice(*session.greedy(cache.enter(tokens[:, -1]), most))
        cache.stepped(found.token.shape[1])
        return Choice(*map(cache.leave, found))

    def beam(self, tokens: Tensor, log_prob: Tensor, width: int, candidates: int, most: int) -> BeamSteps | None:
        session, cache = self._prepared_session(len(tokens), most, cells=True), self._cache
        if session is None:
            return None
        found = BeamSteps(*session.beam(tokens[:, -1], log_prob, cache.places(), width, candidates, most))
        cache.stepped(found.history.shape[1] + 1)
        return found

    @property
    def attention(self) -> Tensor:
        return self._cache.leave(self._cache.weights)

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows.tolist())

    def _prepared_session(self, rows: int, steps: int = 0, *, cells: bool = False) -> Any | None:
        """Return the result of `Session.prepare`; None if there is no session."""
        return None if self._session is None else self._session.prepare(rows, steps, cells=cells)

    def _logits(self, tokens: Tensor) -> Tensor:
        hidden = self._hidden(self._cache.enter(tokens[:, -1]))
        logits = self._out(self._cache.leave(hidden))
        self._cache.stepped()
        return logits

    def _hidden(self, ids: Tensor) -> Tensor:
        """Run the decoder on ids (rows,) in the order of the slots -> (rows, d_model)."""
        session = self._prepared_session(len(ids))
        if session is None:
            return self._decoder(ids[:, None], None, None, None, cache=self._cache)[:, -1]
        return self._decoder.norm(session.step(ids))


class UncachedDecoding(Decoding):
    """Decoding that runs the model over the whole prefix: any model, and the oracle of `CachedDecoding`."""

    def __init__(self, form: Form, memory: Tensor, mask: Tensor | None, *, attention: bool = False) -> None:
        self._reader = form.reader() if attention else None
        if attention and self._reader is None:
            raise ValueError(f"{type(form.model.decoder).__name__} has no layers whose attention weights can be read")
        self._form, self._mask, self._memory = form, mask, memory
        self._causal = torch.ones(1, 0, 0, dtype=torch.bool, device=memory.device)
        self._sentence = torch.arange(memory.shape[0], device=memory.device)

    def _logits(self, tokens: Tensor) -> Tensor:
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
        self._weights = weights.float().mean(dim=1).squeeze(1)

    @property
    def attention(self) -> Tensor:
        return self._weights

    def select(self, rows: Tensor) -> None:
        sentence = self._sentence[rows]
        if torch.equal(sentence, self._sentence):
            return  # rows of one sentence share its memory
        self._sentence = sentence
        self._memory = self._memory[rows]
        self._mask = None if self._mask is None else self._mask[rows]


def _encode(form: Form, src: Tensor, mask: Tensor | None) -> Tensor:
    """Run `form.encode`. A CPU encodes some sentences at a time, each group no wider than its longest source if
    `_trimmed_lengths` are known; outputs past that width are zero."""
    batch, width = src.shape
    if src.device.type != "cpu" or batch == 0:
        return form.encode(src, mask)
    lengths = _trimmed_lengths(form, mask) or [width] * batch
    parts, first = [], 0
    while first < batch:
        longest = max(lengths[first:])  # which is the first, where sources are sorted
        end = first + max(ENCODED_TOKENS // longest, 1)
        longest = max(lengths[first:end])
        own = None if mask is None else mask[first:end, :, :longest]
        part = form.encode(src[first:end, :longest], own)
        parts.append(part if longest == width else F.pad(part, (0, 0, 0, width - longest)))  # F.pad always copies
        first = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _trimmed_lengths(form: Form, mask: Tensor | None) -> list[int] | None:
    """Lengths of the sources, past which an encoder of this package does not read.

    None for another encoder, for a mask that is not equivalent to lengths, and if a sentence is all padding, over
    which attention is spread evenly.
    """
    if mask is None or not form.has_own_encoder():
        return None
    lengths = as_lengths(mask.squeeze(1))
    return None if lengths is None or bool((lengths < 1).any()) else lengths.tolist()


def refuse_nan(found: Tensor, tokens: Tensor) -> None:
    """Raise FloatingPointError if results of the logits of these prefixes are NaN or plus infinity."""
    if not bool((found < torch.inf).all()):
        raise FloatingPointError(
            f"the model's logits for token {tokens.shape[1]} are NaN or infinite; its weights are not usable for"
            " decoding"
        )


def _modules_of(models: Iterable[nn.Module]) -> set[nn.Module]:
    """All modules of models. `nn.Module.modules` is slower because it also makes names: a tenth of a short call."""
    found, new = set(models), list(models)
    while new:
        children = {child for module in new for child in module._modules.values() if child is not None}
        new = list(children - found)
        found.update(new)
    return found


def _is_trained(models: Iterable[nn.Module]) -> bool:
    """Return True if a parameter requires gradients."""
    parameters = (p for module in _modules_of(models) for p in module._parameters.values())
    return any(p is not None and p.requires_grad for p in parameters)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Context with inference mode and every module in evaluation mode; each module gets its own mode back, even
    after an error."""
    with evaluation_mode(*models), torch.inference_mode():
        yield


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Context with every module in evaluation mode; each module gets its own mode back, even after an error."""
    training = [module for module in _modules_of(models) if module.training]
    if training:
        for model in models:
            model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
