"""Parts of greedy and beam search: checked inputs, the step from prefixes to the next token, evaluation mode.

Only `Decoding` calls a model. It runs the encoder once, keeps one row for every open hypothesis, and computes how
likely each next token is, given the tokens so far. The searches tell it which rows go on (`select`), and a key/value
cache needs to know no more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import Decoder
from . import graphs, quantization
from .cache import as_lengths
from .config import GenerationConfig
from .forms import Form, form_of
from .fused import BeamSteps, Several
from .steps import CachedStep, UncachedStep
from .topk import Choice
from .weights import WeightLayout

Lengths = int | Sequence[int] | Tensor | None

ENCODED_TOKENS = 1024
"""That a CPU encodes at a time: what layers leave of more does not stay in its caches."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Request:
    """A checked batch: source ids (B, S), keep mask (B, 1, S) or None, tokens of the longest answers (B,), the ids that
    begin and end an answer, and the stream of random numbers of each sentence (B,)."""

    src: Tensor
    src_mask: Tensor | None
    limits: Tensor
    bos: int
    eos: int
    streams: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def lengths(self) -> Tensor:
        """(B,) how many source positions are read."""
        return _source_lengths(self.src, self.src_mask)


@dataclass(frozen=True)
class Hypothesis:
    """One translation. tokens: target ids without BOS and EOS. score: log_prob over the length penalty, plus the
    coverage penalty. log_prob: the natural log of its probability. finished: False if max_length cut it off before
    EOS. alignment: (len(tokens), S) attention to the source, where it was asked for."""

    tokens: list[int]
    score: float
    log_prob: float
    finished: bool
    alignment: Tensor | None = field(default=None, compare=False)


def check_request(
    model: nn.Module,
    src: Tensor,
    *,
    src_lengths: Tensor | None,
    src_mask: Tensor | None,
    bos: int,
    eos: int,
    pad: int | None,
    max_length: Lengths,
) -> Request:
    """Refuse what cannot be decoded, name what was wrong, and bring the rest to one form."""
    if not isinstance(src, Tensor) or src.dim() != 2 or src.dtype not in _INTEGERS:
        got = f"{src.dtype} {tuple(src.shape)}" if isinstance(src, Tensor) else type(src).__name__
        raise ValueError(f"src must be an integer tensor of token ids (batch, length), got {got}")
    if src.shape[0] > 0 and src.shape[1] == 0:
        raise ValueError(f"src has {src.shape[0]} sentences but no positions; expected at least one token each")
    vocabulary = form_of(model).vocabulary
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device != src.device:
        raise ValueError(f"src is on {src.device} but the model is on {parameter.device}; expected one device")
    for name, token in (("bos", bos), ("eos", eos)):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} must be a token id (an int >= 0), got {token!r}")
        if vocabulary is not None and token >= vocabulary:
            raise ValueError(f"{name} is token {token}, outside the model's target vocabulary of {vocabulary}")
    mask = _source_mask(src, src_lengths, src_mask, pad)
    return Request(src, mask, _limits(src, mask, max_length), bos, eos)


def _source_mask(src: Tensor, lengths: Tensor | None, mask: Tensor | None, pad: int | None) -> Tensor | None:
    batch, width = src.shape
    if lengths is not None and mask is not None:
        raise ValueError("give src_lengths or src_mask, not both")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (batch, 1, width) or mask.is_floating_point():
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"src_mask must be a bool keep mask of shape {(batch, 1, width)}, got {got}")
        return mask.to(device=src.device, dtype=torch.bool)
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=src.device)
        if lengths.shape != (batch,) or lengths.dtype not in _INTEGERS:
            raise ValueError(
                f"src_lengths must be {batch} integers, one for each sentence, got {lengths.dtype} "
                f"{tuple(lengths.shape)}"
            )
        if batch and (int(lengths.min()) < 0 or int(lengths.max()) > width):
            raise ValueError(f"src_lengths must lie in [0, {width}], the width of src, got {lengths.tolist()}")
        return (torch.arange(width, device=src.device) < lengths[:, None]).unsqueeze(1)
    return None if pad is None else (src != pad).unsqueeze(1)


def _limits(src: Tensor, mask: Tensor | None, max_length: Lengths) -> Tensor:
    if max_length is None:
        return 2 * _source_lengths(src, mask) + 20
    batch = src.shape[0]
    limits = torch.as_tensor(max_length, device=src.device)
    if limits.dtype not in _INTEGERS or limits.shape not in ((), (batch,)) or bool((limits < 1).any()):
        raise ValueError(f"max_length must be an int >= 1, or {batch} of them, got {max_length!r}")
    return limits.long().expand(batch)


def _source_lengths(src: Tensor, mask: Tensor | None) -> Tensor:
    return torch.full((src.shape[0],), src.shape[1], device=src.device) if mask is None else mask.sum(dim=(1, 2))


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Source ids side by side: (B, S), filled up with `pad` on the right, and the lengths (B,)."""
    lengths = [len(source) for source in sources]
    rows = [[*source, *[pad] * (max(lengths) - len(source))] for source in sources]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)


class Decoding:
    """The open hypotheses of a batch, one a row, and the models that continue them.

    Args:
        models: each of a form that `form_of` knows; of several, the mean of their probabilities counts.
        request: from `check_request`; one row for each sentence at first.
        config: says whether keys and values are cached where a model can (see `forms`), whether the cached steps are
            replayed as CUDA graphs, whether weights are quantised, whether tokens are drafted, and whether the
            attention to the source must be known.
        rows: how many rows there will be at most.

    Raises:
        ValueError: with `config.graph`, `config.quantize`, `config.draft_tokens` or `config.keep_weights`, where that
            cannot be; says why.
    """

    def __init__(self, models: Sequence[nn.Module], request: Request, config: GenerationConfig, *, rows: int) -> None:
        self._steps: list[CachedStep | UncachedStep] = []
        self._draft: CachedStep | None = None
        if config.keep_weights and _is_trained(models):
            raise ValueError(
                "keep_weights=True is for models that are no longer trained, but there are parameters that require "
                "gradients; expected model.requires_grad_(False) before"
            )
        layout = WeightLayout(config.quantize, config.keep_weights)
        self._forms = [quantization.apply(form_of(model), layout) for model in models]
        mask, attention = request.src_mask, config.reads_attention
        longest = int(request.limits.max()) if len(request.limits) else 1
        for form in self._forms:
            memory = _encode(form, request.src, mask)
            decoder = form.cached_decoder(memory, mask, longest) if config.cache else None
            if config.graph and (reason := graphs.obstacle(request.src.device, mask, decoder is not None, attention)):
                raise ValueError(f"graph=True cannot be: {reason}")
            if config.quantize and decoder is None:
                raise ValueError(f"quantize={config.quantize!r} cannot be: {form.no_cache()}")
            if config.draft_tokens:
                self._draft = self._draft_step(form, decoder, memory, mask, config)
                rows *= config.draft_tokens + 1
            if decoder is None:
                self._steps.append(UncachedStep(form, memory, mask, attention=attention))
            else:
                spans = config.draft_tokens > 0
                self._steps.append(CachedStep(decoder, form.out, memory, mask, config, rows=rows, spans=spans))

    def next_logits(self, tokens: Tensor, *, check: bool = True) -> Tensor:
        """(rows, t) prefixes, BOS first -> (rows, vocabulary) logits of token t + 1, in fp32 (fp64 stays).

        The prefixes are those of the last call, as `select` has ordered them, and one token more.
        Raises FloatingPointError if a model answers NaN or infinity, which no search can rank; without `check` the
        caller asks `refuse_nan`.
        """
        each = []
        for step in self._steps:
            logits = step.next_logits(tokens)
            each.append(logits if logits.dtype == torch.float64 else logits.float())
            if check:
                refuse_nan(each[-1].amax(), tokens)  # a maximum of numbers with a NaN among them is NaN
        if len(each) == 1:
            return each[0]
        return torch.stack([logits.log_softmax(dim=-1) for logits in each]).logsumexp(dim=0) - math.log(len(each))

    def greedy_steps(self, tokens: Tensor, several: Several) -> Choice | None:
        """Several calls of `next_logits` in one, behind prefixes (rows, t), each row going on with its most likely
        token: what `topk.choose` gives of each, (rows, steps). There is none behind one in which a row ends: chooses
        EOS, has nothing to choose, or has a NaN in its normalizer. None, and nothing done, where steps cannot be taken
        in one call."""
        step = self._steps[0]
        if len(self._steps) > 1 or not isinstance(step, CachedStep):
            return None
        return step.greedy_steps(tokens, several)

    def beam_steps(
        self, tokens: Tensor, log_prob: Tensor, width: int, candidates: int, several: Several
    ) -> BeamSteps | None:
        """The same for beams of which all `width` hypotheses are open, whose rows stand side by side: steps up to the
        first in which one of the best `width` continuations ends. The caller selects the rows of the last step alone,
        of its best `candidates` continuations."""
        step = self._steps[0]
        if len(self._steps) > 1 or not isinstance(step, CachedStep):
            return None
        return step.beam_steps(tokens, log_prob, width, candidates, several)

    def span_logits(self, ids: Tensor, held: Tensor) -> Tensor:
        """With `draft_tokens`: ids (rows, span) behind so many positions, held (rows,) -> fp32 logits of what follows
        each, (rows, span, vocabulary). What an earlier call gave for later positions is no longer known."""
        (step,) = self._steps
        assert isinstance(step, CachedStep)  # __init__ refuses all others
        return step.span_logits(ids, held)

    def draft_logits(self, ids: Tensor, held: Tensor) -> Tensor:
        """The same by the draft, behind the last id alone, (rows, 1, vocabulary)."""
        assert self._draft is not None
        return self._draft.span_logits(ids, held, newest=True)

    def draft_steps(self, newest: Tensor, held: Tensor, several: Several) -> Tensor | None:
        """(rows, steps) tokens that the draft chooses behind `newest` (rows,), as `greedy_steps` does."""
        assert self._draft is not None
        return self._draft.span_steps(newest, held, several)

    def _draft_step(
        self, form: Form, decoder: Decoder | None, memory: Tensor, mask: Tensor | None, config: GenerationConfig
    ) -> CachedStep:
        """The steps of the same decoder with int8 weights."""
        reason = quantization.obstacle(form.model)
        if len(self._forms) > 1:
            reason = f"there are {len(self._forms)} models; expected one"
        elif decoder is None:
            reason = form.no_cache()
        if reason is not None or decoder is None:
            raise ValueError(f"draft_tokens={config.draft_tokens} cannot be: {reason}")
        config = dataclasses.replace(config, draft_tokens=0, quantize="int8")
        return CachedStep(decoder, form.out, memory, mask, config, rows=2 * memory.shape[0], spans=True)

    @property
    def attention(self) -> Tensor:
        """(rows, S) fp32: the newest position's attention to the source, the mean of all heads of the last layer."""
        return torch.stack([step.attention for step in self._steps]).mean(dim=0)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order (a row may be named several times: its continuations)."""
        for step in self._steps:
            step.select(rows)
        if self._draft is not None:
            self._draft.select(rows)


def _encode(form: Form, src: Tensor, mask: Tensor | None) -> Tensor:
    """`form.encode`. A CPU encodes some sentences at a time, and where `_trimmed_lengths` are known, no wider than the
    longest of them; what stands past that is zero."""
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
    """The lengths of sources, behind which an encoder of this package does not read; None for another encoder, for a
    mask that is more than lengths, and where a sentence is nothing but padding, over all of which attention is spread
    evenly."""
    if mask is None or not form.has_own_encoder():
        return None
    lengths = as_lengths(mask.squeeze(1))
    return None if lengths is None or bool((lengths < 1).any()) else lengths.tolist()


def refuse_nan(found: Tensor, tokens: Tensor) -> None:
    """Raise FloatingPointError for a NaN, or plus infinity, in what was found of the logits of these prefixes."""
    if not bool((found < torch.inf).all()):
        raise FloatingPointError(
            f"the model's logits for token {tokens.shape[1]} are NaN or infinite; its weights are not usable for"
            " decoding"
        )


def _modules_of(models: Iterable[nn.Module]) -> set[nn.Module]:
    """All modules of models. `nn.Module.modules` also makes their names: a tenth of a short call."""
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
    """Inference mode, every module in evaluation mode; each gets its own mode back, also after an error."""
    with evaluation_mode(*models), torch.inference_mode():
        yield


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; each gets its own mode back, also after an error."""
    training = [module for module in _modules_of(models) if module.training]
    if training:
        for model in models:
            model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
