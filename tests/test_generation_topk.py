"""The best tokens of logits, and the logarithm of their normaliser."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_as_exact_as_eager, poisoned_memory

from transformer_fast import extension
from transformer_fast.generation.topk import best_tokens, choose, log_normalizer

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 8001])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_against_torch(rows: int, columns: int) -> None:
    logits = torch.randn(rows, columns) * 5
    for k in {1, min(2, columns), min(5, columns), min(12, columns)}:
        with poisoned_memory():
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
    assert torch.equal(log_normalizer(logits).isnan(), logits.logsumexp(1).isnan())
    assert log_normalizer(logits)[:3].tolist() == [-INF, 2.0, INF]
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
    """And without the suppressed tokens, wherever they stand; what is not suppressed alone gives the same bits."""
    logits = torch.randn(9, columns, dtype=dtype) * 5
    for suppressed in ((), (0,), (columns - 1,), (1, 2, columns - 1)):
        masked = logits.clone()
        masked[:, list(suppressed)] = -INF
        for k in {1, min(6, columns - len(suppressed))}:
            before = logits.clone()
            with poisoned_memory():
                found = choose(logits, k, suppressed, renormalize=renormalize)
            expected = masked if renormalize else logits
            best, token = best_tokens(masked, k)
            assert torch.equal(found.best, best) and torch.equal(found.token, token) and torch.equal(logits, before)
            assert_as_exact_as_eager(found.normalizer, expected.logsumexp(1), expected.double().logsumexp(1))
            if expected is logits:
                assert torch.equal(found.normalizer, log_normalizer(logits))


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_normalizer_of_a_choice_shows_a_nan(renormalize):
    """Wherever it stands, also where it is suppressed or beside an infinity; no other row has one."""
    logits = torch.randn(5, 40)
    logits[1, 7], logits[2, 3], logits[3, [0, 9]] = NAN, NAN, torch.tensor([INF, NAN])
    logits[4] = -INF
    found = choose(logits, 2, (3, 5), renormalize=renormalize)
    assert found.normalizer.isnan().tolist() == [False, True, True, True, False]
    assert found.best[4].tolist() == [-INF, -INF] and found.normalizer[4] == -INF
