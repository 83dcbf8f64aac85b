"""Every option of generation, in one frozen dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Span = int | tuple[float, float]


@dataclass(frozen=True)
class GenerationConfig:
    """Options of `generate`. Validated on construction.

    Attributes:
        beam: number of hypotheses per sentence; 1 is greedy decoding.
        n_best: number of hypotheses returned per sentence, at most `beam`; with `sample`, the number of draws.
        length_penalty: alpha of the penalty by which log P is divided; 0 ranks by probability only.
        length_norm: "gnmt", ((5 + length) / 6) ** alpha, or "power", length ** alpha. EOS counts.
        slots: use of a finished hypothesis's slot. "close": the slot is closed, so that at most `beam` finish. "keep":
            the next best continuation takes the slot, as in Hugging Face transformers; see `beam.py`.
        early_stop: True with slots "close": stop a sentence at its first n_best finished hypotheses, even if an open
            one could still win; with "keep", at its first `beam`. "now" (only with "keep"): stop when the best open
            hypothesis, if it ended now, would not beat the worst finished one.
        patience: a sentence ends when ceil(patience * beam) hypotheses have finished (Kasai et al. 2022, "A Call for
            Clarity in Beam Search"). Up to 1, a finished hypothesis closes its slot; above 1, the beam stays wide
            longer.
        sample: draw tokens instead of searching; `beam` must be 1.
        temperature: logits are divided by it before a draw. A temperature needs `sample`, as `top_k` and `top_p` do.
        top_k: draw from the k most likely tokens only; 0 is all.
        top_p: draw from the fewest tokens that together have this probability (Holtzman et al. 2020), in (0, 1].
        seed: seed of the draws; None takes torch's random state. With a seed, the draws of a sentence depend only on
            the seed and the number of the sentence, see `streams` of `generate`.
        max_length: largest number of tokens of an answer, EOS included: a number, or (a, b) for a * source length + b.
            A longer prefix is the answer.
        min_length: smallest number of tokens, EOS included, in the same two forms.
        no_repeat_ngram: no sequence of n tokens occurs twice in an answer; 0 is off.
        repetition_penalty: logits of tokens that the answer already has are divided by it if positive and multiplied
            if negative (Keskar et al. 2019, "CTRL"); 1 is off. For one model only: several have no common logits.
        suppress: target ids that are never chosen, such as the unknown token's.
        force_eos: an answer that reaches max_length ends in EOS there, which then has probability 1.
        renormalize: divide the probabilities by the sum over the tokens that may follow.
        alignments: return the attention of each answer's tokens to the source (last layer, mean of its heads).
        cache: keep keys and values between the steps, if the model supports it.
        quantize: "int8" multiplies with int8 weights, on a CPU, for fp32 models whose decoder takes a cache. Weights
            are quantised when `generate` is called, with one scale per output; inputs are quantised per row.
        keep_weights: keep the copies of weights that a call makes for its steps on a CPU, quantised or not, on the
            model's parameters for the next call. The copies take the memory of the weights once more. Parameters must
            not require gradients. A write between two calls is noticed if PyTorch counts it, such as loading a state.
            Other writes (through `.data`, numpy or DLPack) are noticed by a sample of each weight matrix that each call
            reads: it changes with whole matrices, rows or columns, but may miss single values of a matrix of more than
            8,192. After such a write, call once with `keep_weights=False`, or write with an op on the parameter itself
            under `torch.no_grad()`.

    All options except repetition_penalty, force_eos and renormalize choose among continuations without changing their
    probabilities.

    Raises:
        ValueError: names the option, its value and what was expected.

    Example:
        >>> tfast.GenerationConfig(beam=4, length_penalty=0.6).n_best
        1
    """

    beam: int = 1
    n_best: int = 1
    length_penalty: float = 0.6
    length_norm: str = "gnmt"
    slots: str = "close"
    early_stop: bool | str = False
    patience: float = 1.0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_length: Span = (2.0, 20)
    min_length: Span = 0
    no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    suppress: tuple[int, ...] = ()
    force_eos: bool = False
    renormalize: bool = False
    alignments: bool = False
    cache: bool = True
    quantize: str | None = None
    keep_weights: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "suppress", tuple(self.suppress))
        checks: list[tuple[str, Callable[[Any], bool], str]] = [
            ("beam n_best", lambda v: _is_int(v, 1), "an int >= 1"),
            ("top_k no_repeat_ngram", lambda v: _is_int(v, 0), "an int >= 0"),
            ("seed", lambda v: v is None or (_is_int(v, 0) and v < 2**63), "None or an int >= 0, below 2**63"),
            (
                "sample force_eos renormalize alignments cache keep_weights",
                lambda v: isinstance(v, bool),
                "True or False",
            ),
            ("early_stop", lambda v: isinstance(v, bool) or v == "now", 'True, False or "now"'),
            ("slots", lambda v: v in ("close", "keep"), '"close" or "keep"'),
            ("length_penalty", _is_number, "a finite number"),
            ("patience temperature repetition_penalty", lambda v: _is_number(v) and v > 0, "a number > 0"),
            ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
            ("quantize", lambda v: v in (None, "int8"), 'None or "int8"'),
            ("length_norm", lambda v: v in ("gnmt", "power"), '"gnmt" or "power"'),
            ("max_length", lambda v: _is_span(v, 1), "an int >= 1, or (a, b) for a * S + b"),
            ("min_length", lambda v: _is_span(v, 0), "an int >= 0, or (a, b) for a * S + b"),
            ("suppress", lambda v: all(_is_int(token, 0) for token in v), "target ids"),
        ]
        for names, holds, expected in checks:
            for name in names.split():
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        if self.sample and self.beam != 1:
            raise ValueError(f"sample=True draws without a beam; expected beam 1, got {self.beam}")
        for name in ("temperature", "top_k", "top_p"):
            if not self.sample and (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"{name} needs sample True, which draws tokens; got {name} {value} and sample False")
        if not self.sample and self.n_best > self.beam:
            raise ValueError(f"n_best is {self.n_best}, but a beam of {self.beam} holds only {self.beam} hypotheses")
        if self.early_stop == "now" and self.slots != "keep":
            raise ValueError(f'early_stop "now" needs slots "keep", got slots {self.slots!r}')
        if self.slots == "keep" and self.patience != 1:
            raise ValueError(f'slots "keep" supports no patience; expected patience 1, got {self.patience}')
        if isinstance(self.min_length, int) and isinstance(self.max_length, int) and self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, more than max_length {self.max_length}")
        if self.quantize and not self.cache:
            raise ValueError(f"quantize {self.quantize!r} needs cached steps; expected cache True, got False")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_span(value: Any, least: int) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(_is_number(part) and part >= 0 for part in value)
    return _is_int(value, least)
