"""Every pair of options that affect the same token, against the table of docs/generation.md, token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from generation_oracle import BOS, EOS, Oracle, sources
from torch import Tensor

from transformer_fast import GenerationConfig, generate
from transformer_fast.generation import Hypothesis

OPTIONS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 3},
    "max_length by the source": {"max_length": (1, 1)},
    "min_length": {"min_length": 4, "max_length": 6},
    "suppress": {"suppress": (2, 4)},
    "suppress all": {"suppress": (0, 2, 3, 4, 5)},
    "no_repeat_ngram": {"no_repeat_ngram": 1},
    "no_repeat_ngram of two": {"no_repeat_ngram": 2},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "force_eos": {"force_eos": True, "max_length": 4},
    "renormalize": {"renormalize": True},
    "prefix": {"prefix": [2, 4, 2]},
    "a prefix past max_length": {"prefix": [4, 3, 3, 2, 4, 4], "max_length": 4},
}
PAIRS = [*itertools.combinations(OPTIONS, 2)]
SEARCHES = {
    "greedy": {},
    "beam": {"beam": 3, "n_best": 3},
    "wide beam": {"beam": 3, "n_best": 3, "slots": "keep"},
    "draws": {"sample": True, "n_best": 3, "seed": 0},
}


def joined(first: str, second: str) -> dict[str, Any]:
    """Combine both options; the shorter of two limits counts, but not below the shortest answer."""
    both = {**OPTIONS[first], **OPTIONS[second]}
    lengths = [given["max_length"] for given in (OPTIONS[first], OPTIONS[second]) if "max_length" in given]
    if len(lengths) == 2:
        both["max_length"] = min(lengths, key=lambda length: length if isinstance(length, int) else 4)
        if "min_length" in both:
            both["max_length"] = 6
    return {"max_length": 8, "min_length": 0, **both} if "max_length" in both or "min_length" in both else both


class Table:
    """Rules of the docs' table for one sentence."""

    def __init__(self, model: Oracle, source: int, length: int, options: dict[str, Any]) -> None:
        self.model, self.source = model, source
        self.config = GenerationConfig(**{name: value for name, value in options.items() if name != "prefix"})
        self.prefix = list(options.get("prefix", ()))
        spans = self.config.max_length, self.config.min_length
        most, self.least = (
            math.floor(span[0] * length + span[1]) if isinstance(span, tuple) else span for span in spans
        )
        self.limit = max(most, len(self.prefix) + (self.config.force_eos and bool(self.prefix)))

    def next_token(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the allowed next tokens (-inf elsewhere), and those of all tokens."""
        config, n = self.config, len(tokens)
        logits = self.model.logits(self.source, tuple(tokens)).double()
        for token in set(tokens):
            penalty = config.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        allowed = torch.ones(self.model.vocab, dtype=torch.bool)
        if n < len(self.prefix):
            allowed = torch.arange(self.model.vocab) == self.prefix[n]
            if config.force_eos and n + 1 == self.limit:
                raise AssertionError("an EOS that is forced stands behind the prefix")
        elif config.force_eos and n + 1 == self.limit:
            logits = torch.full_like(logits, -math.inf)
            logits[EOS] = 0
        else:
            allowed[list(config.suppress)] = False
            allowed[EOS] &= n + 1 >= self.least
            size = config.no_repeat_ngram
            grams = {tuple(tokens[i : i + size]) for i in range(n - size + 1)} if size else set()
            for token in range(self.model.vocab):
                allowed[token] &= not size or (*tokens[n - size + 1 :], token) not in grams
        probable = logits.masked_fill(~allowed, -math.inf) if config.renormalize else logits
        return (logits - probable.logsumexp(0)).masked_fill(~allowed, -math.inf), logits - probable.logsumexp(0)

    def hold(self, answer: Hypothesis) -> None:
        """Check an answer by the table: every token is allowed, it ends where it must, and its probability is right."""
        tokens = [*answer.tokens, *([EOS] if answer.finished else [])]
        assert answer.tokens[: len(self.prefix)] == self.prefix[: len(answer.tokens)]
        assert len(answer.tokens) >= len(self.prefix) and len(tokens) <= self.limit and EOS not in answer.tokens
        log_prob = 0.0
        for n, token in enumerate(tokens):
            may_follow, _ = self.next_token(tokens[:n])
            assert may_follow[token] > -math.inf, f"token {n} of {tokens}"
            log_prob += float(may_follow[token])
        if not answer.finished and len(tokens) < self.limit:
            assert self.next_token(tokens)[0].max() == -math.inf, "an answer ends because nothing may follow"
        assert answer.log_prob == pytest.approx(log_prob, abs=1e-4)

    def greedy(self) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.limit:
            may_follow, _ = self.next_token(tokens)
            best = int(may_follow.argmax())
            if best == EOS or may_follow[best] == -math.inf:
                break
            tokens.append(best)
        return tokens


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_table_says_which_option_wins(first: str, second: str, search: str) -> None:
    options = joined(first, second)
    model, src = Oracle(6, seed=1), sources(4, width=3)
    given = {name: value for name, value in options.items() if name != "prefix"}
    prefix = [options["prefix"], []] * 2 if "prefix" in options else None
    config = GenerationConfig(**given, **SEARCHES[search])
    found = generate(model, src, bos=BOS, eos=EOS, prefix=prefix, config=config)
    for index, (source, answers) in enumerate(zip(src.sum(1).tolist(), found, strict=True)):
        own = dict(options)
        if index % 2:
            own.pop("prefix", None)
        table = Table(model, source, 3, own)
        for answer in answers:
            table.hold(answer)
        if search == "greedy":
            assert answers[0].tokens == table.greedy()
