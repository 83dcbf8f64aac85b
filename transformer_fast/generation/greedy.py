"""Greedy decoding: take the most likely token, again and again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .decoding import Decoding, Lengths, check_request, evaluating


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
        `decoder(trg, memory, src_mask, trg_mask)` and `out`. It runs in evaluation mode without gradients and
        gets its own mode back.
    src: (B, S) integer source ids on the model's device. B = 0 gives [].
    src_lengths: (B,) true lengths, or src_mask: bool (B, 1, S), True = read; or pad: the id not to read.
        With none of the three every position is read.
    bos, eos: the target ids that begin and end an answer.
    max_length: the most tokens of an answer, EOS included: one int, or one for each sentence. Default
        2 * (source length) + 20. An answer that reaches it is returned as it stands.
    cache: keep keys and values between the steps, where the decoder is one of ours; False runs it over the whole
        prefix at every step. The answers are the same.

    Returns B lists of target ids, in the order of src, without BOS and EOS.
    Raises ValueError for input that cannot be decoded, FloatingPointError if the model answers NaN.
    """
    request = check_request(
        model, src, src_lengths=src_lengths, src_mask=src_mask, bos=bos, eos=eos, pad=pad, max_length=max_length
    )
    answers: list[list[int]] = [[] for _ in range(src.shape[0])]
    if not answers:
        return answers
    with evaluating(model):
        decoding = Decoding(model, request, rows=len(answers), cache=cache)
        sentence = torch.arange(len(answers), device=src.device)
        tokens = torch.full((len(answers), 1), bos, device=src.device)
        while tokens.shape[0]:
            best, choice = decoding.next_logits(tokens).max(dim=-1)
            tokens = torch.cat([tokens, choice[:, None]], dim=1)
            # Where every token is impossible (all logits -inf) the answer ends without that last choice.
            stuck = best == -torch.inf
            ended = stuck | (choice == eos)
            closed = ended | (tokens.shape[1] > request.limits[sentence])
            if bool(closed.any()):
                leaving = zip(sentence[closed].tolist(), tokens[closed].tolist(), ended[closed].tolist(), strict=True)
                for index, ids, without_last in leaving:
                    answers[index] = ids[1:-1] if without_last else ids[1:]
                rows = (~closed).nonzero().squeeze(1)
                sentence, tokens = sentence[rows], tokens[rows]
                decoding.select(rows)
    return answers
