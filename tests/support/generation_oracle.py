"""Model whose best answers can be enumerated, and the enumeration."""

import itertools
import math

import pytest
import torch
from torch import nn

from transformer_fast import GenerationConfig, generate

BOS, EOS = 0, 1
MARKS = {"bos": BOS, "eos": EOS}


class Oracle(nn.Module):
    """A "model" whose next-token logits are a fixed random function of (source sentence, prefix).

    The oracle has the Transformer's interface, so generation cannot tell; as it is a function of the prefix only, its
    best sequences can be enumerated. The oracle records how it was run.
    """

    def __init__(self, vocab=4, seed=0, spread=1.5, edit=None, dtype=torch.float32):
        super().__init__()
        self.vocab, self.seed, self.spread, self.edit, self.dtype = vocab, seed, spread, edit, dtype
        self.out = nn.Identity()  # not an identity matrix: 0 * -inf is NaN
        self.out.out_features = vocab
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.dropout = nn.Dropout(0.5)
        self.encoded = 0
        self.rows = []
        self.modes = set()

    def encoder(self, src, src_mask):
        self.encoded += 1
        keep = torch.ones_like(src) if src_mask is None else src_mask.squeeze(1).long()
        return (src * keep).sum(1)[:, None, None].to(self.dtype)

    def decoder(self, trg, memory, src_mask, trg_mask):
        assert memory.shape[0] == trg.shape[0] and (src_mask is None or src_mask.shape[0] == trg.shape[0])
        assert trg_mask.shape[-2:] == (trg.shape[1],) * 2
        self.rows.append(trg.shape[0])
        self.modes.add((self.training, torch.is_grad_enabled()))
        hidden = torch.full((*trg.shape, self.vocab), float("inf"), dtype=self.dtype)  # only the last is for use
        for row, (source, prefix) in enumerate(zip(memory.flatten().tolist(), trg.tolist(), strict=True)):
            hidden[row, -1] = self.logits(int(source), tuple(prefix[1:]))
        return self.dropout(hidden)

    def logits(self, source, prefix):
        key = hash((self.seed, source, prefix)) % (1 << 62)  # hashes of ints and their tuples are fixed
        logits = torch.randn(self.vocab, generator=torch.Generator().manual_seed(key)) * self.spread
        return (logits if self.edit is None else self.edit(logits, prefix)).to(self.dtype)

    def log_prob(self, source, tokens):
        """Return the natural log-probability of the tokens after BOS, one softmax at a time."""
        steps = [self.logits(source, tuple(tokens[:i])).double().log_softmax(-1) for i in range(len(tokens))]
        return sum(step[token].item() for step, token in zip(steps, tokens, strict=True))


def sources(batch, width=3, seed=0):
    return torch.randint(2, 90, (batch, width), generator=torch.Generator().manual_seed(seed))


def every_finished(model, source, longest, alpha):
    """Return all sequences of at most `longest` tokens that end in EOS, best first: (tokens without EOS, score)."""
    words = [token for token in range(model.vocab) if token != EOS]
    found = []
    for length in range(1, longest + 1):
        for body in itertools.product(words, repeat=length - 1):
            log_prob = model.log_prob(source, (*body, EOS))
            if log_prob > -math.inf:
                found.append((list(body), log_prob / ((5 + length) / 6) ** alpha))
    return sorted(found, key=lambda pair: -pair[1])


def slow_beam(model, source, beam, longest, alpha=0.6, patience=1.0):
    """Compute a beam search by its definition, with lists and without early stop: the best continuations fill the
    slots, and one that ends in EOS closes its slot. Returns (tokens without EOS, score) of the finished ones, best
    first."""
    survivors, finished, quota = [((), 0.0)], [], math.ceil(patience * beam)
    for length in range(1, longest + 1):
        grown = []
        for tokens, log_prob in survivors:
            step = model.logits(source, tokens).double().log_softmax(-1)
            grown += [((*tokens, token), log_prob + step[token].item()) for token in range(model.vocab)]
        slots = min(beam, max(quota, beam) - len(finished))
        best = sorted((pair for pair in grown if pair[1] > -math.inf), key=lambda pair: -pair[1])[:slots]
        finished += [
            (list(tokens[:-1]), value / ((5 + length) / 6) ** alpha) for tokens, value in best if tokens[-1] == EOS
        ]
        survivors = [pair for pair in best if pair[0][-1] != EOS]
        if len(finished) >= quota or not survivors:
            break
    return sorted(finished, key=lambda pair: -pair[1])


def slow_wide_beam(model, source, beam, longest, alpha, early_stop):
    """Compute a beam search of constant width by its definition, with lists. Returns (tokens with EOS, score) of the
    finished ones, best first."""
    survivors, finished = [((), 0.0)], []
    for length in range(1, longest + 1):
        grown = []
        for tokens, log_prob in survivors:
            step = model.logits(source, tokens).double().log_softmax(-1)
            grown += [((*tokens, token), log_prob + step[token].item()) for token in range(model.vocab)]
        best = sorted(grown, key=lambda pair: -pair[1])[: 2 * beam]
        ended = [tokens[-1] == EOS or length == longest for tokens, _ in best]
        finished += [(t, value / length**alpha) for (t, value), end in zip(best[:beam], ended, strict=False) if end]
        finished = sorted(finished, key=lambda pair: -pair[1])[:beam]
        survivors = [pair for pair, end in zip(best, ended, strict=True) if not end][:beam]
        reach = longest if early_stop is False and alpha > 0 else length
        if not survivors or len(finished) < beam:
            continue
        if early_stop is True or finished[-1][1] >= survivors[0][1] / reach**alpha:
            break
    return finished


def prefer_eos(vocab, by):
    """Return an edit of logits that makes EOS more likely; `by` is a number, or a function of the prefix."""
    ends = torch.eye(vocab)[EOS]
    return lambda logits, prefix: logits + ends * (by(prefix) if callable(by) else by)


def search(model, src, prefix=None, **options):
    """Return the tokens of every hypothesis, sentence by sentence, and the hypotheses."""
    found = generate(model, src, prefix=prefix, config=GenerationConfig(**options), **MARKS)
    return [[h.tokens for h in hypotheses] for hypotheses in found], found


def assert_found(tokens, hypotheses, expected):
    """Assert that the answers of a sentence are these (tokens, score), in order."""
    assert tokens == [body for body, _ in expected]
    assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-4)
