"""Generation with every option: `generate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .beam import Search
from .config import GenerationConfig, Span
from .decoding import Hypothesis, Request, check_request, evaluating
from .forms import form_of
from .greedy import GreedySearch
from .rules import Rules
from .search import SearchState
from .speculative import SpeculativeSearch
from .wide_beam import WideSearch


def generate(
    model: nn.Module | Sequence[nn.Module],
    src: Tensor,
    *,
    src_lengths: Tensor | None = None,
    src_mask: Tensor | None = None,
    bos: int,
    eos: int,
    pad: int | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    config: GenerationConfig | None = None,
) -> list[list[Hypothesis]]:
    """Translate a batch as the config says: greedily, by beam search or by drawing.

    Args:
        model: as in `greedy`; or several with one target vocabulary, the mean of whose probabilities decides.
        src: (B, S) source ids; src_lengths, src_mask, bos, eos, pad: as in `greedy`.
        prefix: for each sentence the target ids that its answers begin with (none: an empty list), BOS aside. They
            count as chosen: in the length, in the probability, and in the answer.
        config: the options; the default is greedy decoding.

    Returns:
        For each sentence, in the order of src, at most `config.n_best` hypotheses and at least one, the best first.

    Raises:
        ValueError: for input that cannot be decoded. FloatingPointError: if a model answers NaN.
    """
    config = GenerationConfig() if config is None else config
    models = as_models(model)
    request, rules = prepare(
        models, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, prefix=prefix, config=config
    )
    if src.shape[0] == 0:
        return []
    with evaluating(*models):
        return new_search(models, request, config, rules).run()


def as_models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One model or several as a list, which must not be empty."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ValueError("model is an empty list; expected at least one model")
    return models


def prepare(
    models: Sequence[nn.Module],
    src: Tensor,
    *,
    src_lengths: Tensor | None,
    src_mask: Tensor | None = None,
    bos: int,
    eos: int,
    pad: int | None = None,
    prefix: Sequence[Sequence[int]] | None,
    config: GenerationConfig,
) -> tuple[Request, Rules]:
    """The arguments of `generate`, checked; what a search takes besides the models and the config."""
    request, *_ = [
        check_request(one, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=None)
        for one in models
    ]
    vocabularies = {form_of(one).vocabulary for one in models}
    if len(vocabularies) > 1:
        raise ValueError(f"the models have target vocabularies of different sizes: {sorted(map(str, vocabularies))}")
    vocabulary = vocabularies.pop()
    for token in config.suppress:
        if token == eos or (vocabulary is not None and token >= vocabulary):
            raise ValueError(f"suppress names token {token}: it is EOS, or outside the vocabulary of {vocabulary}")
    _check_prefix(prefix, request, vocabulary)
    request = dataclasses.replace(request, limits=_span(config.max_length, request).clamp(min=1))
    least = _span(config.min_length, request)
    if bool((least > request.limits).any()):
        raise ValueError(f"min_length {config.min_length} is more than max_length {config.max_length} allows")
    return request, Rules(config, request, least, prefix)


def new_search(models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules) -> SearchState:
    """The search that the config asks for. To be called within `evaluating`."""
    if config.draft_tokens:
        return SpeculativeSearch(models, request, config, rules)
    if config.sample or config.beam == 1:
        return GreedySearch(models, request, config, rules)
    search = WideSearch if config.slots == "keep" else Search
    return search(models, request, config, rules)


def _span(span: Span, request: Request) -> Tensor:
    if not isinstance(span, tuple):
        return torch.full_like(request.limits, span)
    slope, base = span
    return torch.tensor([math.floor(slope * n + base) for n in request.lengths().tolist()], device=request.src.device)


def _check_prefix(prefix: Sequence[Sequence[int]] | None, request: Request, vocabulary: int | None) -> None:
    if prefix is None:
        return
    batch = request.src.shape[0]
    if len(prefix) != batch:
        raise ValueError(f"prefix has {len(prefix)} entries; expected one list of ids for each of {batch} sentences")
    for index, ids in enumerate(prefix):
        for token in ids:
            outside = vocabulary is not None and token >= vocabulary
            if isinstance(token, bool) or not isinstance(token, int) or token < 0 or outside or token == request.eos:
                raise ValueError(f"prefix[{index}] has {token!r}; expected target ids, and no EOS")
