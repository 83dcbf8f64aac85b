"""Random options of generation on random models: decoding with a cache against decoding without.

Tokens must be the same and scores the same to rounding. An answer that differs is a tie only if it is shown to be one:
somewhere on its way the uncached search must have put two candidates in order whose scores lie closer together than
`TIES` of benchmarks/compare_cached.py. The models are made far from ties, so that fp32 has hardly any; in bf16, which
rounds 65,536 times as coarsely, there are, and what is not a tie must be the same. Draws are compared in fp32.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from benchmarks.compare_cached import DTYPES, TIES, margins
from transformer_fast import GenerationConfig, Transformer, generate

BOS, EOS, VOCAB = 0, 1, 12
SCORES = {"fp32": 1e-3, "bf16": 0.5}
"""Largest difference of equal scores: sums over up to twenty tokens of logits of about twenty."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One call: the model's form, the batch and the options of `generate`."""

    number: int
    models: int
    form: dict[str, Any]
    layers: int
    heads: int
    sentences: int
    width: int
    padded: str  # "lengths", "mask", "none"
    prefixed: bool
    dtype: str
    options: dict[str, Any]


def config(seed: int, kind: str) -> Config:
    """Return the configuration of a seed, for a kind of search: "greedy", "beam" or "sample"."""
    chance = random.Random(seed)
    pick = lambda *values: chance.choice(values)  # noqa: E731
    options: dict[str, Any] = {
        "length_penalty": pick(0.0, 0.6, 1.0, -0.5),
        "length_norm": pick("gnmt", "power"),
        "early_stop": pick(False, False, True),
        "patience": pick(1.0, 1.0, 0.5, 2.0),
        "max_length": pick(9, (1.0, 3), 20),
        "min_length": pick(0, 2, (0.5, 1)),
        "no_repeat_ngram": pick(0, 0, 1, 2, 3),
        "repetition_penalty": pick(1.0, 1.0, 1.5),
        "suppress": pick((), (5,), (2, 7)),
        "alignments": pick(False, True),
    }
    if pick(True, False):  # no more than suppressed tokens: several steps are taken in one call
        options |= {"min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0, "alignments": False}
    if kind == "sample":
        draws = {"temperature": pick(1.0, 0.5), "top_k": pick(0, 4), "top_p": pick(1.0, 0.8), "seed": pick(1, 2)}
        options |= {**draws, "sample": True, "n_best": pick(1, 3)}
    else:
        beam = 1 if kind == "greedy" else pick(2, 3, 5)
        options |= {"beam": beam, "n_best": pick(1, beam)}
    options |= {"force_eos": pick(False, False, True), "renormalize": pick(False, False, True)}
    if kind == "beam" and pick(False, True):
        options |= {"slots": "keep", "patience": 1.0, "early_stop": pick(False, True, "now")}
    models = pick(1, 1, 1, 2)
    if models > 1:
        options["repetition_penalty"] = 1.0
    return Config(
        number=seed % 2**20,
        models=models,
        form={
            "norm_first": pick(True, True, False),
            "norm": pick("layer", "std", "rms"),
            "d_ff": pick(24, 40),
            "tie_weights": pick(False, False, "decoder"),
            "activation": pick("relu", "swish", "gelu"),
        },
        layers=pick(1, 2, 3),
        heads=pick(1, 2, 4),
        sentences=pick(1, 2, 4, 7, 30),
        width=pick(1, 5, 9),
        padded=pick("lengths", "lengths", "mask", "none"),
        prefixed=pick(False, False, False, True),
        dtype="fp32" if kind == "sample" else pick("fp32", "fp32", "bf16"),
        options=options,
    )


def make_model(c: Config, index: int) -> Transformer:
    """Make a random model that is far from ties; its answers depend on the source and the prefix."""
    torch.manual_seed(c.number * 10 + index)
    model = Transformer(VOCAB, VOCAB, 16, c.layers, c.heads, 0.1, **c.form)
    with torch.no_grad():
        model.out.weight.mul_(1 if c.form["tie_weights"] else 6)
        model.out.bias[EOS] += 2
        for layer in model.decoder.layers:
            layer.attn_2.v_linear.weight.mul_(6)
            layer.attn_1.v_linear.weight.mul_(3)
    return model.to(DTYPES[c.dtype]).eval()


def make_batch(c: Config) -> dict[str, Any]:
    """Return the arguments of `generate` besides models and options."""
    generator = torch.Generator().manual_seed(c.number)
    shape = c.sentences, c.width
    lengths = torch.randint(1, c.width + 1, (c.sentences,), generator=generator)
    given: dict[str, Any] = {"src": torch.randint(2, VOCAB, shape, generator=generator), "bos": BOS, "eos": EOS}
    if c.padded == "lengths":
        given["src_lengths"] = lengths
    elif c.padded == "mask":
        given["src_mask"] = (torch.rand(c.sentences, 1, c.width, generator=generator) > 0.3) | (
            torch.arange(c.width) == 0
        )
    if c.prefixed:
        longest = 12 if c.number % 4 == 0 else 2  # longer than `max_length` may be
        given["prefix"] = [[3, 4, 3, 5, 6, 7, 3, 4, 8, 9, 2, 4][: int(n) * 7 % (longest + 1)] for n in lengths]
    return given


def check(c: Config) -> tuple[int, int]:
    """Raise AssertionError unless both searches agree. Returns the number of sentences and the number of ties."""
    models, given = [make_model(c, index) for index in range(c.models)], make_batch(c)

    def decode(cache: bool) -> list:
        return generate(models, config=GenerationConfig(**c.options, cache=cache), **given)

    ties, known, tie = 0, None, TIES[c.dtype]
    for index, (ours, theirs) in enumerate(zip(decode(True), decode(False), strict=True)):
        if [(h.tokens, h.finished) for h in ours] != [(h.tokens, h.finished) for h in theirs]:
            assert not c.options.get("sample"), f"sentence {index} was drawn as {ours}, and uncached as {theirs}"
            known = margins(lambda: decode(False)) if known is None else known
            assert known[index] <= tie, f"sentence {index}, margin {known[index]:.1e}: {ours}, and uncached {theirs}"
            ties += 1
            continue
        for one, other in zip(ours, theirs, strict=True):
            assert abs(one.score - other.score) <= SCORES[c.dtype], f"sentence {index}: {one} and {other}"
            assert (one.alignment is not None) == c.options["alignments"]
            if one.alignment is not None and c.dtype == "fp32":
                torch.testing.assert_close(one.alignment, other.alignment, atol=1e-4, rtol=1e-3)
    return c.sentences, ties
