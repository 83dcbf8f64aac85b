"""Random calls: attention on the C++ kernels, generation with a cache and without, and wrong calls of every operator.

A call is a function of a seed. hypothesis draws the seeds: the same ones in every run of the short list, others by
``SEED=0 COUNT=500 nox -s fuzz``, which prints a call that fails and begins the next run with it. `FORMER` has calls
that once failed. tests/interpreter/test_fuzz.py draws calls of attention for the Triton kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from examples import examples
from tests.fuzz import fuzz, fuzz_generation
from tests.fuzz.fuzz_config import SEEDS
from tests.support.op_arguments import Recorded, changed_at_random, operators, problem_of, recorded

BACKEND = "native" if fuzz.DEVICE.type == "cpu" else "triton"

# Attention


@pytest.mark.parametrize("kind", fuzz.CHECKS)
def test_random_calls(kind: str) -> None:
    @given(fuzz.configs(BACKEND, kind))
    @examples(40)
    def check(c: fuzz.Config) -> None:
        fuzz.check(c, BACKEND)

    check()


@pytest.mark.parametrize("bias", ("none", "learned"))
def test_every_combination_of_mask_parts(bias: str) -> None:
    for c in fuzz.combinations():
        if c.bias == bias:
            fuzz.check(c, BACKEND)


PLAIN = {"kind": "padded", "B": 3, "H": 6, "Hkv": 3, "Lq": 2, "Lk": 65, "D": 128, "Dv": 128, "dtype": "fp32"}
PLAIN |= {"layout": "one head for all", "dialect": "keep", "window": (None, None, 0), "parts": (), "causal": 0}
PLAIN |= {"bias": "none", "dropout_p": 0.1, "empty_rows": "zero", "outputs": "out"}
FORMER: dict[str, dict[str, Any]] = {
    # Two queries and 65 keys, more than a tile: one long sum over D rounded more than a matrix-vector product's many.
    "weights": {"D": 80, "Dv": 12, "H": 3, "outputs": "weights", "scale": 0.5},
    # Scores were added up in another order than in the forward, and missed its logsumexp.
    "gradient of the bias": {"parts": ("dense", "lengths"), "bias": "learned", "scale": 1.0},
    # Scores of three queries were one long sum over D, with 2.1 times eager's error.
    "three queries": {
        "kind": "decode", "B": 1, "Lq": 3, "Lk": 31, "layout": "sliced", "dialect": "blocked", "dropout_p": 0.0,
        "parts": ("window", "documents"), "window": (128, 0, 0), "documents": 50, "offset": -13, "scale": -0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("number", (3, 726, 1090, 1879))
@pytest.mark.parametrize("name", FORMER)
def test_a_call_that_once_failed(name: str, number: int) -> None:
    fuzz.check(fuzz.Config(number=number, **(PLAIN | FORMER[name])), BACKEND)


# Generation


@pytest.mark.parametrize("kind", ["greedy", "beam", "sample"])
def test_random_options_of_generation(kind: str) -> None:
    counted: list[tuple[int, int]] = []

    @given(SEEDS)
    @examples(16)
    def check(seed: int) -> None:
        counted.append(fuzz_generation.check(fuzz_generation.config(seed, kind)))

    check()
    sentences, ties = map(sum, zip(*counted))
    assert ties <= max(1, 0.1 * sentences)


def test_a_difference_that_is_no_tie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change an answer of the cached search, as a mask at the wrong place would."""
    form = {"norm_first": True, "norm": "layer", "d_ff": 24, "tie_weights": False, "activation": "relu"}
    c = fuzz_generation.Config(
        number=1, models=1, form=form, layers=1, heads=2, sentences=4, width=5, padded="lengths", prefixed=False,
        dtype="fp32", options={"beam": 3, "max_length": 9, "alignments": False},
    )  # fmt: skip
    fuzz_generation.check(c)
    real = fuzz_generation.generate

    def wrong(*arguments: Any, config: Any, **given: Any) -> Any:
        found = real(*arguments, config=config, **given)
        return found if not config.cache else [[*found[-1]], *found[:-1]]

    monkeypatch.setattr(fuzz_generation, "generate", wrong)
    with pytest.raises(AssertionError, match="sentence 0"):
        fuzz_generation.check(c)


# Wrong calls


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", operators())
def test_wrong_calls(name: str) -> None:
    """Several arguments are changed at once: the call ends in an error that names one, or in the right result."""

    @given(SEEDS)
    @examples(24)
    def check(seed: int) -> None:
        for right in recorded()[name]:
            chance = random.Random(seed)
            call, said = changed_at_random(right, chance, chance.choice((1, 2, 3)))
            assert not problem_of(call), said

    check()


class Fault:
    """An operator with the schema of ``dropout`` that computes something else."""

    _schema = torch.ops.transformer_fast.dropout.default._schema

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor, **rest: Any) -> Tensor:
        return torch.empty_like(x) if x.is_meta else self.function(x)


def unnamed(x: Tensor) -> Tensor:
    raise ValueError("something is wrong")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.as_strided((x.numel() + 1,), (1,)).sum()[None], "memory outside"),
        (lambda x: torch.empty_like(x), "memory outside"),
        (lambda x: x.mT, "promised"),
        (lambda x: x + 1, "plain operators"),
        (unnamed, "names no argument"),
    ],
)
def test_a_fault_is_found(function: Callable[[Tensor], Tensor], says: str) -> None:
    arguments = recorded()["dropout"][0].arguments | {"x": torch.randn(3, 5, 7), "p": 0.0, "relu": False}
    arguments |= {"bias": None, "residual": None}
    assert not problem_of(Recorded(torch.ops.transformer_fast.dropout.default, arguments))
    assert says in problem_of(Recorded(Fault(function), arguments))
