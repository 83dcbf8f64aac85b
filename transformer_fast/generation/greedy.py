"""Decoding without a beam: the most likely token, or one drawn, again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import GenerationConfig
from .decoding import Decoding, Hypothesis, Lengths, Request, check_request, evaluating
from .rules import Rules
from .sampling import Sampler
from .scores import scored_hypothesis
from .topk import best_tokens, log_normalizer


def greedy(
    model: nn.Module,
    src: Tensor,
    *,
    src_lengths: Tensor | None = None,
    src_mask: Tensor | None = None,
    bos: int,
    eos: int,
    pad: int | None = None,
    max_length: Lengths = None,
    cache: bool = True,
) -> list[list[int]]:
    """Translate a batch, taking the most likely token at every step.

    model: `transformer_fast.Transformer`, or any module with `encoder(src, src_mask)`,
        `decoder(trg, memory, src_mask, trg_mask)` and `out`, or The Annotated Transformer's `EncoderDecoder` with its
        `generator`. It runs in evaluation mode without gradients and gets its own mode back.
    src: (B, S) integer source ids on the model's device. B = 0 gives [].
    src_lengths: (B,) true lengths, or src_mask: bool (B, 1, S), True = read; or pad: the id not to read.
        With none of the three every position is read.
    bos, eos: the target ids that begin and end an answer.
    max_length: the most tokens of an answer, EOS included: one int, or one for each sentence. Default
        2 * (source length) + 20. An answer that reaches it is returned as it stands.
    cache: keep keys and values between the steps, where the decoder is one of this package, or The Annotated
        Transformer's after `accelerate`; False runs it over the whole prefix at every step. The answers are the same.

    Returns B lists of target ids, in the order of src, without BOS and EOS.
    Raises ValueError for input that cannot be decoded, FloatingPointError if the model answers NaN.
    """
    request = check_request(
        model, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=max_length
    )
    if src.shape[0] == 0:
        return []
    config = GenerationConfig(cache=cache)
    with evaluating(model):
        found = sample_or_greedy([model], request, config, Rules(config, request), scored=False)
    return [hypotheses[0].tokens for hypotheses in found]


def sample_or_greedy(
    models: Sequence[nn.Module], request: Request, config: GenerationConfig, rules: Rules, *, scored: bool = True
) -> list[list[Hypothesis]]:
    """Choose one token after the other, the most likely one or one drawn. To be called within `evaluating`.

    Returns n_best hypotheses for each sentence, the best score first; without `scored`, all scores are NaN.
    """
    batch, device, copies = request.src.shape[0], request.src.device, config.n_best
    decoding = Decoding(models, request, config, rows=batch * copies)
    row = torch.arange(batch * copies, device=device)  # among all answers, for the draws
    sentence = row // copies
    if copies > 1:
        decoding.select(sentence)
    draw = Sampler(config, row.numel()) if config.sample else None
    tokens = torch.full((row.numel(), 1), request.bos, device=device)
    log_prob = torch.full((row.numel(),), 0.0 if scored else torch.nan, dtype=torch.float64, device=device)
    attention = torch.zeros(row.numel(), 0, request.src.shape[1], device=device) if config.reads_attention else None
    answers: list[list[Hypothesis]] = [[] for _ in range(batch)]
    while tokens.shape[0]:
        allowed, logits = rules.apply(decoding.next_logits(tokens), tokens, sentence)
        best, token = (found.squeeze(1) for found in best_tokens(allowed, 1))
        # Where every token is impossible (all logits -inf) the answer ends without that last token.
        stuck = best == -torch.inf
        if draw is not None:
            token = draw(allowed, row)
        if scored:
            chosen = logits.gather(1, token[:, None]).squeeze(1)
            log_prob += torch.where(stuck, 0.0, (chosen - log_normalizer(logits)).double())
        if attention is not None:
            attention = torch.cat([attention, decoding.attention[:, None]], dim=1)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
        ended = stuck | (token == request.eos)
        closed = ended | (tokens.shape[1] > request.limits[sentence])
        if bool(closed.any()):
            leaving = closed.nonzero().squeeze(1)
            maps = [None] * len(leaving) if attention is None else attention[leaving].unbind()
            columns = (t[leaving].tolist() for t in (sentence, tokens, ended, stuck, log_prob))
            for index, ids, without_last, was_stuck, value, weights in zip(*columns, maps, strict=True):
                body, length = ids[1:-1] if without_last else ids[1:], len(ids) - 1 - was_stuck
                finished = without_last and not was_stuck
                answers[index].append(scored_hypothesis(config, request, index, body, value, length, finished, weights))
            rows = (~closed).nonzero().squeeze(1)
            row, sentence, tokens, log_prob = row[rows], sentence[rows], tokens[rows], log_prob[rows]
            attention = None if attention is None else attention[rows]
            decoding.select(rows)
    for hypotheses in answers:
        hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
    return answers
