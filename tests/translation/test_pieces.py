"""A run in one piece and the same run in several pieces leave the same files and validate at the same steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_training import Messages, outcome, short_config

from examples import examples
from transformer_fast.translation import RunFolder, load_trained, train
from transformer_fast.translation.checkpoint import is_better
from transformer_fast.translation.validation import Validation

FOLDERS = itertools.count()


def run(corpus: dict[str, str], save: Path, ends: list[int], **changes: Any) -> tuple[Any, list[str]]:
    """Train in pieces that end at these steps; return the last result, and all messages."""
    progress = Messages()
    for end in ends:
        config = short_config(corpus, save, resume=True, **{"valid_every": 3, "max_steps": end, **changes})
        result = train(config, progress)
    return result, progress.texts


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    """Replace validation by given scores per step."""
    scores: dict[int, dict[str, float]] = {}
    take = Validation.take
    monkeypatch.setattr(Validation, "measure", lambda *_: ({"valid_loss": 1.0}, "scripted"))
    monkeypatch.setattr(Validation, "take", lambda self, step, found: take(self, step, scores.get(step, found)))
    return scores


LOSSES = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=16, max_size=16)
BLEUS = st.lists(st.sampled_from([0.2, 0.9, 1.5, 20.0]), min_size=16, max_size=16)


@examples(5)
@given(
    losses=LOSSES,
    bleus=st.none() | BLEUS,
    ends=st.lists(st.integers(1, 14), max_size=4, unique=True).map(sorted),
    patience=st.sampled_from([0, 1, 2]),
    average_last=st.sampled_from([0, 2]),
)
def test_the_files_are_those_of_one_piece(
    corpus: dict[str, str],
    tmp_path: Path,
    scripted: dict[int, dict[str, float]],
    losses: list[float],
    bleus: list[float] | None,
    ends: list[int],
    patience: int,
    average_last: int,
) -> None:
    scripted.clear()
    scripted.update({step: {"valid_loss": loss} for step, loss in enumerate(losses)})
    for step, bleu in enumerate(bleus or ()):
        scripted[step]["bleu"] = bleu
    options = {"patience": patience, "average_last": average_last, "keep_last": 2, "bleu_sentences": 2}
    folders = [tmp_path / str(next(FOLDERS)) for _ in range(2)]
    whole, _ = run(corpus, folders[0], [15], **options)
    pieces, _ = run(corpus, folders[1], [*ends, 15], **options)
    assert outcome(folders[0]) == outcome(folders[1])
    assert (whole.step, whole.stopped, whole.best_step) == (pieces.step, pieces.stopped, pieces.best_step)
    assert RunFolder(folders[0]).best_step() == RunFolder(folders[1]).best_step()


def test_the_best_checkpoint_outlives_a_better_end_of_a_piece(
    corpus: dict[str, str], tmp_path: Path, scripted: dict[int, dict[str, float]]
) -> None:
    """Found by hypothesis: step 13 ends a piece and is better, but a run in one piece does not validate there."""
    scripted.update({step: {"valid_loss": 1.0, "bleu": 1.5 if step == 13 else 0.2} for step in range(16)})
    options = {"keep_last": 2, "bleu_sentences": 2}
    run(corpus, tmp_path / "whole", [15], **options)
    run(corpus, tmp_path / "pieces", [1, 13, 15], **options)
    assert RunFolder(tmp_path / "pieces").steps() == RunFolder(tmp_path / "whole").steps() == [3, 12, 15]
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "pieces")


def test_a_finished_run_that_is_started_again_tells_its_own_result(
    corpus: dict[str, str], tmp_path: Path, scripted: dict[int, dict[str, float]]
) -> None:
    """Step 5 is the run's best, although a run in one piece to 9 does not validate there."""
    scripted.update({3: {"valid_loss": 3.0}, 5: {"valid_loss": 2.0}})
    first, _ = run(corpus, tmp_path / "run", [5])
    again, said = run(corpus, tmp_path / "run", [5])
    assert first.best_step == again.best_step == 5 and again.scores == {"valid_loss": 2.0}
    assert "is finished at step 5" in said[-1] and load_trained(tmp_path / "run").step == 5


def test_a_missing_bleu_is_not_a_bleu_of_zero(
    corpus: dict[str, str], tmp_path: Path, scripted: dict[int, dict[str, float]]
) -> None:
    scripted.update({step: {"valid_loss": 10.0 - step, "bleu": 40.0} for step in (3, 6)})
    scripted.update({step: {"valid_loss": 10.0 - step} for step in (9, 12, 15)})
    run(corpus, tmp_path / "run", [6], bleu_sentences=2, patience=3)
    result, said = run(corpus, tmp_path / "run", [15], bleu_sentences=0, patience=3)
    assert result.best_step == 15 and result.stopped == "max_steps"
    assert any(line.startswith("BLEU is now measured on 0 sentences, before on 2: steps are") for line in said)


@pytest.mark.parametrize(
    ("scores", "than", "same", "better"),
    [
        ({"bleu": 3.0, "valid_loss": 9.0}, {"bleu": 2.0, "valid_loss": 1.0}, True, True),
        ({"bleu": 0.138, "valid_loss": 7.07}, {"bleu": 0.05, "valid_loss": 6.1}, True, False),
        ({"bleu": 0.05, "valid_loss": 6.1}, {"bleu": 0.138, "valid_loss": 7.07}, True, True),
        ({"bleu": 1.0, "valid_loss": 7.0}, {"bleu": 0.9, "valid_loss": 6.0}, True, True),
        ({"bleu": 3.0, "valid_loss": 9.0}, {"bleu": 2.0, "valid_loss": 1.0}, False, False),
        ({"valid_loss": 1.0}, {"bleu": 50.0, "valid_loss": 2.0}, True, True),
        ({"bleu": 50.0, "valid_loss": 2.0}, {"valid_loss": 1.0}, True, False),
        ({"bleu": 5.0, "valid_loss": 1.0}, {"bleu": 5.0, "valid_loss": 2.0}, True, True),
        ({"valid_loss": 1.0}, {"valid_loss": 1.0}, True, False),
    ],
)
def test_scores_are_compared_with_their_like(
    scores: dict[str, float], than: dict[str, float], same: bool, better: bool
) -> None:
    assert is_better(scores, than, same_sentences=same) == better


def test_an_older_checkpoint_that_is_damaged_does_not_stop_the_run(
    corpus: dict[str, str], tmp_path: Path, scripted: dict[int, dict[str, float]]
) -> None:
    run(corpus, tmp_path / "run", [6], keep_last=3)
    (RunFolder(tmp_path / "run").path(3) / "state.json").write_text("{")
    result, _ = run(corpus, tmp_path / "run", [9], keep_last=3)
    assert result.step == 9 and RunFolder(tmp_path / "run").steps() == [3, 6, 9]
