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
    assert text.splitlines()[1:3] == [
        "calls: layer_norm 6, embed 3, attention_packed 2", "bert.encoder (2): 17 of 27 positions",
    ]  # fmt: skip
    assert text.endswith("these layers skip 37% of their positions, which are padding")
    kept = report.explain(call.given | {"output_attentions": True})
    reason = "attention weights are requested (output_attentions)"
    assert kept.splitlines()[2] == f"bert.encoder (2): 27 of 27 positions: {reason}"
    assert kept.splitlines()[1] == "calls: layer_norm 7, embed 6, attention 2, attention_weights 2"
    _, _, report = both(BART)
    assert report.explain(seq2seq.given).splitlines()[2:-1] == [
        "model.encoder (2): 17 of 27 positions", "model.decoder (2): 13 of 21 positions",
    ]  # fmt: skip
    assert "no padding" in both(BERT)[2].explain((torch.ones(2, 5, dtype=torch.int64),))


def test_explain_says_what_would_be_left_out() -> None:
    model = packed.make(BERT)
    report = tfast.accelerate(model)
    kinds = [type(m) for m in model.modules()]
    text = report.explain(packed.batch(BERT, "right").given)
    assert text.startswith("with packed=True:\n") and "37% of their positions" in text
    assert [type(m) for m in model.modules()] == kinds


def test_explain_counts_the_attention_that_stays_torchs() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(self.norm(x), x, x)

    text = tfast.accelerate(Own()).explain(torch.randn(1, 2, 3, 8))
    assert "calls: layer_norm 1, torch's own attention 1" in text.splitlines()


def test_a_reason_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    _, without, _ = both(BERT)
    for _ in range(2):
        without(**packed.batch(BERT, "right").given, output_attentions=True)
        without(**packed.batch(BERT, "right").given)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "transformer_fast"]
    reason = "attention weights are requested (output_attentions)"
    assert said == [("WARNING", f"packed=True: a batch runs with its padding: {reason}")]


@pytest.mark.parametrize("name", [BERT, BART, "T5ForConditionalGeneration", "MPNetForMaskedLM"])
def test_accelerate_and_explain_log_no_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"decoder_start_token_id": 1} if name.startswith("T5") else {}
    for options in ({}, {"packed": True}):
        report = tfast.accelerate(packed.make(name, **settings), **options)
        str(report)
        if not options:
            report.explain(packed.batch(name, "between").given)
    assert not [record for record in caplog.records if record.name == "transformer_fast"]
