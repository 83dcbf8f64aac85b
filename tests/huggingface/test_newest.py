"""The verdict of the sweep of the newest libraries (`tests/support/newest.py`)."""

from __future__ import annotations

from functools import partial

import pytest

transformers = pytest.importorskip("transformers")
import newest  # noqa: E402

from transformer_fast.huggingface import supported, whole_layers  # noqa: E402

BERT_CALLS = list(newest.batches("BertForMaskedLM"))
BERT = partial(newest.training_steps, partial(newest.make, "BertForMaskedLM"), BERT_CALLS)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own environment has no peft."""
    monkeypatch.setattr(newest, "LIBRARIES", ("torch", "transformers"))


def test_a_wrong_number_fails_and_the_others_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = whole_layers.dropout_add_norm
    monkeypatch.setattr(whole_layers, "dropout_add_norm", lambda *args: 1.001 * right(*args))
    rows = [("BERT", BERT), ("Llama", partial(newest.by_name, "LlamaForCausalLM"))]
    monkeypatch.setattr(newest, "rows", lambda: iter(rows))
    assert newest.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("WRONG  BERT: AssertionError: ") and lines[2] == "equal  Llama"
    assert lines[3].startswith("2 rows: 1 wrong, 0 left in part; ")


def test_classes_of_another_version_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supported, "VERSIONS", ((4, 0),))
    monkeypatch.setattr(newest, "rows", lambda: iter([("BERT", BERT)]))
    assert newest.main() == 0
    first, last, _ = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("left   BERT: ") and "BertSelfOutput is not swapped" in first
    assert last == f"left   transformers {transformers.__version__}: the table has ((4, 0),)"


def test_every_row_has_a_name_of_its_own() -> None:
    names = [name for name, _ in newest.rows()]
    assert len(names) == len(set(names)) > 70
