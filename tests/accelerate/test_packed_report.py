"""Report of a packed model: `explain` for a batch, reasons that are logged once, and inference mode."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from test_packed_calls import BART, BERT, both  # noqa: E402

import transformer_fast as tfast  # noqa: E402


def test_explain_counts_positions_and_tokens() -> None:
    call, seq2seq = packed.batch(BERT, "right"), packed.batch(BART, "right")
    _, _, report = both(BERT)
    text = report.explain(call.given)
    assert text.splitlines()[2].split() == ["bert.encoder", "(2)", "27", "17", "17"]
    assert text.endswith("these layers skip 37% of their positions, which are padding")
    kept = report.explain(call.given | {"output_attentions": True})
    assert kept.splitlines()[2].split()[:4] == ["bert.encoder", "(2)", "27", "27"]
    assert kept.splitlines()[2].endswith("attention weights are requested (output_attentions)")
    _, _, report = both(BART)
    rows = [line.split() for line in report.explain(seq2seq.given).splitlines()[2:-1]]
    assert rows == [
        ["model.encoder", "(2)", "27", "17", "17"],
        ["model.decoder", "(2)", "21", "13", "13"],
    ]
    assert "no padding" in both(BERT)[2].explain((torch.ones(2, 5, dtype=torch.int64),))


def test_explain_says_what_would_be_left_out() -> None:
    model = packed.make(BERT)
    report = tfast.accelerate(model)
    kinds = [type(m) for m in model.modules()]
    text = report.explain(packed.batch(BERT, "right").given)
    assert text.startswith("with packed=True:\n") and "37% of their positions" in text
    assert [type(m) for m in model.modules()] == kinds


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _, without, _ = both(BERT)
    with caplog.at_level("INFO", logger="transformer_fast"):
        for _ in range(2):
            without(**packed.batch(BERT, "right").given, output_attentions=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a batch runs with its padding: attention weights are requested (output_attentions)"]
