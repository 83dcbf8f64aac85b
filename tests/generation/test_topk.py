"""Best tokens of logits, log of their normaliser, and best continuations of a beam."""

from __future__ import annotations

import pytest
import torch
from tiny_transformer import MARKS, batch, tiny

from transformer_fast import GenerationConfig, extension, generate
from transformer_fast.generation.beam import Search
from transformer_fast.generation.topk import best_tokens, choose, log_normalizer
from transformer_fast.testing import assert_as_exact_as_eager

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 8001])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_against_torch(rows: int, columns: int) -> None:
    logits = torch.randn(rows, columns) * 5
    for k in {1, min(2, columns), min(5, columns), min(12, columns)}:
        best, token = best_tokens(logits, k)
        assert torch.equal(best, logits.topk(k).values) and torch.equal(logits.gather(1, token), best)
        assert all(len(set(row)) == k for row in token.tolist())
    assert_as_exact_as_eager(log_normalizer(logits), logits.logsumexp(1), logits.double().logsumexp(1))


def test_of_equal_ones_the_first_comes_first() -> None:
    logits = torch.zeros(2, 40)
    logits[1, [7, 30, 33]] = 1.0
    assert best_tokens(logits, 4)[1].tolist() == [[0, 1, 2, 3], [7, 30, 33, 0]]


@pytest.mark.parametrize("place", [0, 20, 69])
def test_infinities_and_nan(place: int) -> None:
    logits = torch.full((5, 70), -INF)
    logits[1, place] = 2.0
    logits[2:] = torch.randn(3, 70)
    logits[2, place], logits[3, place] = INF, NAN
    logits[4, [place, 5]] = torch.tensor([NAN, INF])
    for given in (logits, logits.double()):
        assert log_normalizer(given)[:2].tolist() == [-INF, 2.0] and log_normalizer(given)[2:].isnan().all()
    best, token = best_tokens(logits, 3)
    assert best[0].tolist() == [-INF] * 3 and best[1].tolist() == [2.0, -INF, -INF] and token[1, 0] == place
    assert best[2, 0] == INF and token[2, 0] == place
    assert torch.equal(best[3], logits[3].nan_to_num(-INF).topk(3).values)


def test_offsets_beyond_the_exponential() -> None:
    logits = torch.randn(3, 50) + torch.tensor([[1e4], [-1e4], [0.0]])
    logits[2, 7] = 300.0
    assert_as_exact_as_eager(log_normalizer(logits), logits.logsumexp(1), logits.double().logsumexp(1))


def test_strided_logits() -> None:
    logits = torch.randn(60, 9).t()
    assert torch.equal(best_tokens(logits, 2)[0], logits.topk(2).values)
    assert torch.equal(log_normalizer(logits), log_normalizer(logits.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_elsewhere_torch_answers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 30, dtype=dtype)
    monkeypatch.setattr(extension, "load", lambda: False)
    for k in (1, 3):
        best, token = best_tokens(logits, k)
        assert torch.equal(best, logits.topk(k).values) and torch.equal(token, logits.topk(k).indices)
    assert torch.equal(log_normalizer(logits), logits.logsumexp(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("columns", [4, 17, 64, 1000])
def test_a_choice_is_both_at_once(columns, renormalize, dtype):
    """Suppressed tokens are left out at any place; the rest gives the same bits."""
    logits = torch.randn(9, columns, dtype=dtype) * 5
    for suppressed in ((), (0,), (columns - 1,), (1, 2, columns - 1)):
        masked = logits.clone()
        masked[:, list(suppressed)] = -INF
        for k in {1, min(6, columns - len(suppressed))}:
            before = logits.clone()
            found = choose(logits, k, suppressed, renormalize=renormalize)
            expected = masked if renormalize else logits
            best, token = best_tokens(masked, k)
            assert torch.equal(found.best, best) and torch.equal(found.token, token) and torch.equal(logits, before)
            assert_as_exact_as_eager(found.normalizer, expected.logsumexp(1), expected.double().logsumexp(1))
            if expected is logits:
                assert torch.equal(found.normalizer, log_normalizer(logits))


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_normalizer_of_a_choice_shows_a_nan(renormalize):
    """A NaN anywhere, also suppressed or beside an infinity, gives NaN in its row only."""
    logits = torch.randn(5, 40)
    logits[1, 7], logits[2, 3], logits[3, [0, 9]] = NAN, NAN, torch.tensor([INF, NAN])
    logits[4] = -INF
    found = choose(logits, 2, (3, 5), renormalize=renormalize)
    assert found.normalizer.isnan().tolist() == [False, True, True, True, False]
    assert found.best[4].tolist() == [-INF, -INF] and found.normalizer[4] == -INF


@pytest.mark.parametrize("candidates", [3, 6])  # as many candidates as the beam, and twice as many
def test_continuations_of_a_beam(candidates: int) -> None:
    """Compare with a stable sort of all continuations of a unit: units without rows, rows without a finite logit, NaN,
    ties, and slots in any order."""
    width, units, k = 3, 5, 4
    generator = torch.Generator().manual_seed(candidates)
    for case in range(20):
        places = torch.rand(units, width, generator=generator) < 0.7
        unit, slot = places.nonzero(as_tuple=True)
        mixed = torch.randperm(len(unit), generator=generator)
        unit, slot = unit[mixed].contiguous(), slot[mixed].contiguous()
        rows = len(unit)
        # Few values, which are sums without rounding: many are equal.
        best = torch.randint(-4, 3, (rows, k), generator=generator).float().sort(dim=1, descending=True).values
        best[torch.rand(rows, generator=generator) < 0.2, 2:] = -INF
        normalizer, log_prob = (torch.randint(0, 4, (rows,), generator=generator).float() for _ in range(2))
        token = torch.randint(0, 99, (rows, k), generator=generator)
        if rows and case % 4 == 0:
            best[0], normalizer[0] = -INF, -INF
        if rows > 1 and case % 4 == 1:
            log_prob[1] = NAN
        total = (log_prob - normalizer)[:, None] + best
        found = torch.ops.transformer_fast.choose_continuations(total, token, unit, slot, units, width, candidates)
        for u in range(units):
            order = sorted((int(slot[r]), r) for r in range(rows) if unit[r] == u)
            all_of_unit = [(total[r, i].item(), r, token[r, i].item()) for _, r in order for i in range(k)]
            expected = sorted((one for one in all_of_unit if one[0] > -INF), key=lambda one: -one[0])[:candidates]
            expected += [(-INF, 0, 0)] * (candidates - len(expected))
            assert list(zip(*(part[u].tolist() for part in found), strict=True)) == expected


def test_a_beam_chooses_as_its_tensors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ and PyTorch find the same continuations; steps without an end are equal with and without the short cut."""
    src, lengths = batch(9)
    for options in (
        {},
        {"n_best": 4},
        {"patience": 2.0},
        {"slots": "keep"},
        {"no_repeat_ngram": 1},
        {"suppress": (4,)},
    ):
        config = GenerationConfig(beam=4, **options)
        given = {"src_lengths": lengths, "config": config, **MARKS}
        native = generate(tiny(1), src, **given)
        with monkeypatch.context() as patch:
            patch.setattr("transformer_fast.generation.beam.use_native", lambda _: False)
            patch.setattr(Search, "_all_continue", lambda *_: False)
            assert generate(tiny(1), src, **given) == native
