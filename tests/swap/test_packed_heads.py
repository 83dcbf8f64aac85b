"""``accelerate(model, packed=True)`` on every text model of transformers with a head, or without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import packed_models as packed

import transformer_fast as tfast
from transformer_fast.huggingface.heads import HEADS, Head, listed

PAGE = Path(__file__).parents[2] / "docs" / "packed.md"
TABLES = [table for head in HEADS if not head.on_tokens for table in head.tables if table not in ("", "PRETRAINING")]
WITHOUT_KEYS = {
    "T5GemmaForTokenClassification", "UltraVBertForSequenceClassification", "UltrabertForSequenceClassification",
}  # fmt: skip
"""Models whose heads read queries at padding at the left, which see no key: see docs/masks.md."""
FEW = {
    "BertForMultipleChoice", "SplinterForQuestionAnswering", "T5ForTokenClassification",
    "BertForNextSentencePrediction", "GPT2ForSequenceClassification", "RobertaForQuestionAnswering",
}  # fmt: skip
"""Models of the short list."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow("one of three hundred models"))
        for name in sorted(set().union(*map(listed, TABLES)))
    ],
)
def test_no_head_is_wrong(name: str) -> None:
    calls = [packed.batch(name, padding) for padding in ("right", "left", "between")]
    try:
        plain, fast = packed.make(name), packed.make(name)
        expected = [packed.step(plain, call) for call in calls]
    except Exception as error:
        pytest.skip(f"no padded step of the plain model: {type(error).__name__}")
    report = tfast.accelerate(fast, packed=True)
    for call, step in zip(calls, expected, strict=True):
        found = packed.step(fast, call)
        if name in WITHOUT_KEYS and call is calls[1]:
            step = {key: value for key, value in step.items() if key not in dict(plain.named_parameters())}
        scale = max(value.abs().max().item() for value in step.values() if value.numel())
        packed.close(found, step, atol=1e-4 * max(1.0, scale), nan=True)
    reasons = report.padded_calls.reasons
    assert not any("own; it may" in reason or "is unknown; it may" in reason for reason in reasons)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.tables[0])
def test_the_page_has_each_head(head: Head) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    (row,) = (row for row in rows if re.search(rf"(\.\.|_FOR_|`){head.tables[0]}(_MAPPING|\.\.)", row))
    assert all(table in row for table in head.tables)
    assert ("position of a row" in row) == head.one_position
    assert ("loss run on tokens" in row) == head.on_tokens
