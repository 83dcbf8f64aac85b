"""Several steps of a search in one call equal single steps in tokens and bits; and the cases without such a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_fused import BOS, EOS, FORMS, VOCAB, tiny
from tiny_transformer import bits_of
from torch import nn

from transformer_fast import GenerationConfig, generate
from transformer_fast.generation import search
from transformer_fast.generation.decoding import CachedDecoding


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the number of steps of each call of the session."""
    steps: list[int] = []

    def counted(taken: Callable, count: Callable[[Any], int]) -> Callable:
        def call(*args: object, **options: object) -> object:
            found = taken(*args, **options)
            if found is not None:
                steps.append(count(found))
            return found

        return call

    greedy, beam = CachedDecoding.greedy, CachedDecoding.beam
    monkeypatch.setattr(CachedDecoding, "greedy", counted(greedy, lambda found: found.token.shape[1]))
    monkeypatch.setattr(CachedDecoding, "beam", counted(beam, lambda found: found.history.shape[1] + 1))
    return steps


def decoded(model: nn.Module, sentences: int = 7, **options: object) -> list[tuple]:
    """Search the answers to sources of many lengths, with exact scores."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(2, VOCAB, (sentences, 9), generator=generator)
    lengths = torch.randint(1, 10, (sentences,), generator=generator)
    config = GenerationConfig(**{"max_length": (3.0, 1), **options})
    found = generate(model, src, src_lengths=lengths, bos=BOS, eos=EOS, config=config)
    return bits_of(found)


def one_by_one(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list]) -> list:
    with monkeypatch.context() as patch:
        patch.setattr(search, "MOST_STEPS", 0)
        return run()


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"beam": 3, "n_best": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_are_those_of_step_by_step(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, form: dict, options: dict
) -> None:
    model = tiny(**form)
    found = decoded(model, **options)
    assert max(calls) > 1
    expected = one_by_one(monkeypatch, lambda: decoded(model, **options))
    assert found == expected and len({len(tokens) for tokens, *_ in found}) > 2


def test_greedy_decoding_takes_no_other_steps(calls: list[int]) -> None:
    found = decoded(tiny())
    assert sum(calls) == max(len(tokens) + finished for tokens, *_, finished in found)


WIDE = {"slots": "keep", "max_length": 24}
BEAMS: list[dict] = [
    {},
    {"max_length": 200},  # past two blocks of the cache
    {"suppress": (3, 7), "renormalize": True, "quantize": "int8"},
    {"length_penalty": 0, "n_best": 4},
    {"early_stop": True},
    {"patience": 2},
    {"beam": 30},  # more than the vocabulary
    {"beam": 1, "n_best": 1},
    # Beams that stay wide look at twice as many continuations, and stop being plain steps once a sentence has all its
    # answers.
    {**WIDE, "early_stop": True},
    {**WIDE, "early_stop": "now"},
    {**WIDE, "early_stop": False, "length_penalty": 0},
    {**WIDE, "early_stop": "now", "n_best": 4, "length_norm": "power", "renormalize": True, "quantize": "int8"},
    {**WIDE, "early_stop": "now", "force_eos": True, "max_length": 40},
    {**WIDE, "beam": 30},
]


@pytest.mark.parametrize("options", BEAMS, ids=str)
@pytest.mark.parametrize("ends", [-100.0, -0.5, 1.5])
def test_beams(calls: list[int], monkeypatch: pytest.MonkeyPatch, options: dict, ends: float) -> None:
    """Beams that never end, that end early or late, and not all at once."""
    model = tiny()
    model.out.bias.data[EOS] = ends
    options = {"beam": 4, **options}
    found = decoded(model, **options)
    assert found == one_by_one(monkeypatch, lambda: decoded(model, **options))
    if "slots" in options:
        assert options["beam"] > VOCAB // 2 or ends > 0 or max(calls) > 1
    elif ends == -100 and options["beam"] < VOCAB:  # otherwise EOS is among the first continuations
        longest = max(len(tokens) + finished for tokens, *_, finished in found)
        assert max(calls) > 1 and sum(calls) >= longest - 2


@pytest.mark.parametrize(
    ("options", "sentences", "several"),
    [
        ({"suppress": (3, 7), "renormalize": True}, 7, True),
        ({"force_eos": True}, 7, True),
        ({"min_length": 4}, 7, False),
        ({"no_repeat_ngram": 2}, 7, False),
        ({"max_length": 200}, 7, True),  # past two blocks of the cache
        ({"length_norm": "power", "keep_weights": True}, 7, True),
        # Some beams have ended: steps of several with fewer units than there were sentences.
        ({"beam": 4, "early_stop": True, "max_length": (5.0, 1)}, 12, True),
    ],
    ids=str,
)
def test_options(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, options: dict, sentences: int, several: bool
) -> None:
    model = tiny().requires_grad_(False)
    model.out.bias.data[EOS] = -0.5
    found = decoded(model, sentences, **options)
    assert found == one_by_one(monkeypatch, lambda: decoded(model, sentences, **options))
    assert sum(steps > 1 for steps in calls) > (3 if sentences > 7 else 0) if several else not calls


@pytest.mark.parametrize("beam", [1, 3])
def test_a_nan_names_its_token(beam: int) -> None:
    """The input at position 3 is NaN, so the logits of the fourth token are NaN."""
    model = tiny()
    model.out.bias.data[EOS] = -100
    model.decoder.pe.pe[0, 3] = math.nan
    with pytest.raises(FloatingPointError, match="logits for token 4 are NaN"):
        decoded(model, max_length=9, beam=beam)


def test_an_answer_without_a_possible_token_ends(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    model.out.bias.data[EOS] = -math.inf
    suppress = tuple(token for token in range(VOCAB) if token != EOS)
    found = decoded(model, suppress=suppress)
    assert calls == [1] and found == one_by_one(monkeypatch, lambda: decoded(model, suppress=suppress))
    assert found[0] == ([], 0.0, 0.0, False)


def test_a_last_norm_unlike_those_of_the_layers_is_called(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    model.decoder.norm.eps = 0.1
    found = decoded(model)
    assert not calls and found == one_by_one(monkeypatch, lambda: decoded(model))


def test_ensembles_and_alignments_take_single_steps(calls: list[int]) -> None:
    src = torch.randint(2, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    for models, config in (
        ([tiny(), tiny(norm="rms")], GenerationConfig()),
        ([tiny()], GenerationConfig(alignments=True)),
    ):
        assert len(generate(models, src, bos=BOS, eos=EOS, config=config)) == 2
    assert not calls
