"""Every search, form of model and option gives the answers of the modules without a cache."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from tiny_transformer import (
    MARKS,
    answers,
    assert_same,
    batch,
    by_modules,
    never_ending,
    tiny,
    tokens_of,
    with_reference_linears,
)  # fmt: skip
from torch import nn

from transformer_fast import GenerationConfig, Transformer, extension, generate
from transformer_fast.layers import MultiHeadAttention


def other_heads(seed: int, layers: int) -> nn.Module:
    """Return a model in which this many layers have two heads in one of their attentions."""
    model = tiny(seed)
    for layer in model.decoder.layers[:layers]:
        layer.attn_2 = MultiHeadAttention(2, 32)
    if layers == 1:
        model.decoder.layers[1].attn_1 = MultiHeadAttention(2, 32)
    return model.eval()


FORMS: dict[str, Callable[[int], nn.Module]] = {
    "pre-norm": tiny,
    "std": lambda seed: tiny(seed, norm="std"),
    "rms": lambda seed: tiny(seed, norm="rms"),
    "post-norm": lambda seed: tiny(seed, norm_first=False),
    "gelu": lambda seed: tiny(seed, norm_first=False, activation="gelu"),
    "tied": lambda seed: tiny(seed, tie_weights=True),
    "the attentions differ": lambda seed: other_heads(seed, 2),
    "the layers differ": lambda seed: other_heads(seed, 1),  # which have no cache
}
SHORT, LONGER = {"max_length": (1.0, 3)}, {"max_length": (2.0, 5)}
SEARCHES: dict[str, dict] = {
    "greedy": {},
    "suppressed": {"suppress": (5, 9), "renormalize": True, **LONGER},
    "rules": {"no_repeat_ngram": 2, "min_length": 4, **LONGER},
    "no token twice": {"no_repeat_ngram": 1, "repetition_penalty": 2.0, **SHORT},
    "forced end": {"repetition_penalty": 1.5, "force_eos": True, "renormalize": True, "suppress": (7,), **SHORT},
    "sample": {"sample": True, "n_best": 2, "seed": 5, **SHORT},
    "beam": {"beam": 5, **LONGER},
    "n-best": {"beam": 4, "n_best": 4, **SHORT},
    "wide beam": {"beam": 3, "n_best": 2, "slots": "keep", "early_stop": "now", **SHORT},
    "lengths": {"beam": 3, "min_length": (0.5, 2), "suppress": (4, 5), **SHORT},
    "repeats": {"beam": 2, "no_repeat_ngram": 2, "repetition_penalty": 1.5, **SHORT},
    "patience": {"beam": 3, "patience": 2.0, "early_stop": True, **SHORT},
    "alignments": {"beam": 3, "n_best": 2, "alignments": True, **SHORT},
}
PREFIX = [[7, 7], [], [3], [4, 5, 6, 7, 8]]


WAYS = "cached", "by modules", "kept weights", "int8"


def possible(form: str, way: str) -> bool:
    """Return True if a model of this form can decode in this way."""
    return way != "int8" or (form != "the layers differ" and extension.load())  # needs a cache


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with form, search and way; unsupported combinations are left out."""
    if "way" in metafunc.fixturenames:
        rows = [(form, *rest) for form, *rest in itertools.product(FORMS, SEARCHES, WAYS) if possible(form, rest[-1])]
        metafunc.parametrize(("form", "search", "way"), rows)


@pytest.mark.cover(60)
def test_every_way_has_the_answers_of_the_modules(form: str, search: str, way: str) -> None:
    seed = (list(FORMS).index(form) + list(SEARCHES).index(search)) % 3
    model, given, options = FORMS[form](seed).requires_grad_(False), batch(4, seed=seed), SEARCHES[search]
    prefix = PREFIX if seed == 1 else None
    oracle = with_reference_linears(model) if way == "int8" else model
    expected = answers(oracle, given, prefix=prefix, cache=False, **options)
    assert form == "tied" or len({str(each) for each in tokens_of(expected)}) > 1, "the source decides nothing"
    if way == "int8":  # the reference has no cache, so its sums of attention round differently
        found = answers(model, given, prefix=prefix, quantize=way, **options)
        assert_same(found, expected, tolerance=0.05)
    else:
        with by_modules() if way == "by modules" else contextlib.nullcontext():
            for _ in range(2):
                found = answers(model, given, prefix=prefix, keep_weights=way == "kept weights", **options)
                assert_same(found, expected)


@pytest.mark.cover("values")
@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("form", ["pre-norm", "post-norm", "two models"])
def test_past_blocks_of_the_cache_and_the_positional_table(form: str, search: str) -> None:
    """Search answers of many lengths with the fused step and with modules."""
    models = [never_ending(tiny(seed, max_len=40, norm_first=form == "pre-norm")) for seed in (0, 1)]
    model, growth = (models, 10.0) if form == "two models" else (models[0], 20.0)
    given, options = (batch(3)[0], torch.tensor([7, 1, 3])), {"max_length": (growth, 10)}
    options |= {"beam": 3, "n_best": 2} if search == "beam" else {}
    expected = answers(model, given, cache=False, **options)
    assert [len(each[0].tokens) for each in expected] == [growth * n + 10 for n in (7, 1, 3)]
    assert_same(answers(model, given, **options), expected)
    with by_modules():
        assert_same(answers(model, given, **options), expected)


@pytest.mark.parametrize("options", [{}, {"beam": 3}], ids=str)
def test_a_mask_that_is_no_length_and_a_source_with_nothing_to_read(options: dict) -> None:
    """Finished sentences leave the cache and others take their slots; the caller's mask must not change."""
    model, (src, _) = tiny(5), batch(6, seed=2)
    mask = torch.rand(6, 1, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[3] = False
    kept = mask.clone()
    config = {"max_length": 15, **options}
    found = generate(model, src, src_mask=mask, config=GenerationConfig(**config), **MARKS)
    expected = generate(model, src, src_mask=mask, config=GenerationConfig(cache=False, **config), **MARKS)
    assert_same(found, expected)
    assert torch.equal(mask, kept) and len({len(each[0].tokens) for each in found}) > 1


@pytest.mark.parametrize("options", [{}, {"beam": 2}, {"beam": 2, "quantize": "int8"}], ids=str)
def test_two_models(options: dict) -> None:
    models, given = [tiny(1), tiny(2)], batch()
    plain = {name: value for name, value in options.items() if name != "quantize"}
    oracles = models if plain == options else [with_reference_linears(m) for m in models]
    expected = answers(oracles, given, cache=False, **plain)
    assert_same(answers(models, given, **options), expected, tolerance=0.05 if plain != options else 1e-3)


@pytest.mark.parametrize("options", [{}, {"beam": 2}, {"quantize": "int8"}], ids=str)
def test_an_empty_batch(options: dict) -> None:
    nothing = torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    assert answers(tiny(), nothing, **options) == []


def test_sizes_at_which_every_unit_of_work_is_cut() -> None:
    """Quantised weights wider than a panel, deeper than a group, with more rows than one sum takes."""
    torch.manual_seed(3)
    model = Transformer(70, 70, 36, 1, 3, 0.1, d_ff=50, norm="layer").eval()
    with torch.no_grad():
        model.out.weight.mul_(8)
    given = torch.randint(2, 70, (30, 11)), torch.randint(1, 12, (30,))
    expected = answers(with_reference_linears(model), given, max_length=6, cache=False)
    assert_same(answers(model, given, max_length=6, quantize="int8"), expected, tolerance=0.05)
