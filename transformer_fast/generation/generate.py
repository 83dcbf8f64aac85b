"""Generation with every option: `generate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .beam import Search
from .config import GenerationConfig, Span
from .decoding import evaluating
from .forms import form_of
from .greedy import GreedySearch
from .request import Hypothesis, Request, check_request
from .rules import Rules
from .search import SearchState


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
    streams: Sequence[int] | None = None,
    config: GenerationConfig | None = None,
) -> list[list[Hypothesis]]:
    """Translate a batch by greedy decoding, beam search or sampling, as the config says.

    Args:
        model: as in `greedy`; or several models with one target vocabulary, whose mean probabilities decide.
        src: (B, S) source ids; src_lengths, src_mask, bos, eos, pad: as in `greedy`.
        prefix: per sentence the target ids that its answers begin with, without BOS (an empty list for none). These ids
            count as chosen: in the length, in the probability, and in the answer.
        streams: with `config.sample`, per sentence the number of its stream of random numbers, 0 <= number < 2**63;
            default its index in the batch. With a seed, the answers of a sentence depend only on the seed and this
            number, whatever the batch.
        config: the options; the default is greedy decoding.

    Returns:
        Per sentence, in the order of src, one to `config.n_best` hypotheses, best first.

    Raises:
        ValueError: for input that cannot be decoded.
        FloatingPointError: if a model returns NaN or infinity.

    Example:
        >>> model = tfast.Transformer(20, 20, d_model=16, N=1, heads=2, dropout=0.0)
        >>> src = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> config = tfast.GenerationConfig(beam=4)
        >>> found = tfast.generate(model, src, pad=0, bos=1, eos=2, config=config)
        >>> [len(hypotheses) for hypotheses in found]
        [1, 1]
    """
    config = GenerationConfig() if config is None else config
    models = _as_models(model)
    request, rules = _prepare(
        models, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, prefix=prefix, config=config
    )
    if config.sample or streams is not None:
        request = dataclasses.replace(request, streams=_checked_streams(streams, src.shape[0]))
    if src.shape[0] == 0:
        return []
    with evaluating(*models):
        return _new_search(models, request, config, rules).run()


def _as_models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One model or several as a list, which must not be empty."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ValueError("model is an empty list; expected at least one model")
    return models


def _prepare(
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
    """Check the arguments of `generate`; return the request and the rules."""
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
    if reason := models_obstacle(models, config):
        raise ValueError(reason)
    limits, least = [], []
    for index, length in enumerate(request.lengths().tolist()):
        if reason := length_obstacle(config, length):
            raise ValueError(f"sentence {index} of the batch: {reason}")
        shortest, longest = _lengths(config, length)
        least.append(shortest)
        limits.append(longest)
    if prefix is not None:  # an answer contains the whole prefix, and a forced EOS after it
        limits = [max(limit, len(ids) + (config.force_eos and bool(ids))) for limit, ids in zip(limits, prefix)]
    request = dataclasses.replace(request, limits=torch.tensor(limits, dtype=torch.long, device=src.device))
    return request, Rules(config, request, torch.tensor(least, dtype=torch.long, device=src.device), prefix)


def models_obstacle(models: Sequence[nn.Module], config: GenerationConfig) -> str | None:
    """Reason why these models cannot decode together with these options, or None."""
    if len(models) > 1 and config.repetition_penalty != 1.0:
        return (
            f"repetition_penalty {config.repetition_penalty} needs logits, but the mean of {len(models)} models has"
            " probabilities only; expected one model, or repetition_penalty 1"
        )
    return None


def length_obstacle(config: GenerationConfig, length: int) -> str | None:
    """Reason why every answer to a source of this length would be too short or too long, or None."""
    least, most = _lengths(config, length)
    if least <= most:
        return None
    return (
        f"min_length {config.min_length} asks for at least {least} tokens, max_length {config.max_length} allows {most}"
        f" for a source of {length}"
    )


def _new_search(models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules) -> SearchState:
    """Return the search that the config requests. Call this function within `evaluating`."""
    if config.sample or config.beam == 1:
        return GreedySearch(models, request, config, rules)
    return Search(models, request, config, rules)


def _lengths(config: GenerationConfig, length: int) -> tuple[int, int]:
    """Smallest and largest number of tokens of an answer to a source of this length."""
    return _span(config.min_length, length), max(_span(config.max_length, length), 1)


def _span(span: Span, length: int) -> int:
    """Number of tokens for a source of this length."""
    return math.floor(span[0] * length + span[1]) if isinstance(span, tuple) else span


def _checked_streams(streams: Sequence[int] | None, batch: int) -> Tensor:
    """Return the streams as int64 (B,), for `Sampler`."""
    found = torch.arange(batch) if streams is None else torch.as_tensor(streams, dtype=torch.int64)
    if found.shape != (batch,) or bool((found < 0).any()):
        raise ValueError(f"streams must be {batch} numbers >= 0, one for each sentence, got {streams!r}")
    return found


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
