"""Printed report: whole texts of small models, in which every number is what the model has, and ten lines at most."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sdpa_models
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import transformer_fast as tfast
from examples import examples
from transformer_fast.accelerate import Report, Row
from transformer_fast.swap.rows import LINES, WIDTH

transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=99, **sizes))


def whisper() -> nn.Module:
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder")
             for name, n in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    config = transformers.WhisperConfig(d_model=32, vocab_size=99, begin_suppress_tokens=None, **sizes, **ids)
    return transformers.WhisperForConditionalGeneration(config)


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes))


TEXTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (bert, """\
attention: fused in 2 of 2 modules (BertSelfAttention); padding is computed: packed=True was not given
24 modules swapped, 8 left
  3 nn.Embedding               -> layers.Embedding (bert.embeddings.word_embeddings and 2 more)
  5 nn.LayerNorm               -> layers.LayerNorm (bert.embeddings.LayerNorm and 4 more)
  8 nn.Dropout                 -> layers.Dropout (bert.embeddings.dropout and 7 more)
  2 BertLayer                  -> huggingface.BertLayer (bert.encoder.layer.0 and 1 more)
  4 BertSelfOutput, BertOutput -> huggingface.DropoutAddNorm (bert.encoder.layer.0.attention.output and 3 more)
  2 BertIntermediate           -> huggingface.ActivatedLinear (bert.encoder.layer.0.intermediate and 1 more)
  8 modules of 6 classes       left: it keeps its own forward (the model and 7 more)
"""),
    "whisper": (whisper, """\
attention: fused in 9 of 9 modules (WhisperAttention); padding is computed: packed=True was not given
25 modules swapped, 9 left
  1 WhisperPositionalEmbedding left: a subclass of nn.Embedding may compute something else (model.decoder.embed_posit...
  2 nn.Embedding               -> layers.Embedding (model.encoder.embed_positions and 1 more)
  3 WhisperEncoderLayer        -> huggingface.PreNormEncoderLayer (model.encoder.layers.0 and 2 more)
 17 nn.LayerNorm               -> layers.LayerNorm (model.encoder.layers.0.self_attn_layer_norm and 16 more)
  3 WhisperDecoderLayer        -> huggingface.PreNormDecoderLayer (model.decoder.layers.0 and 2 more)
  8 modules of 3 classes       left: it keeps its own forward (the model and 7 more)
"""),
    "llama": (llama, """\
attention: fused in 2 of 2 modules (LlamaAttention); padding is computed: packed=True was not given
6 modules swapped, 8 left
  1 nn.Embedding         -> layers.Embedding (model.embed_tokens)
  5 LlamaRMSNorm         -> huggingface.RMSNorm (model.layers.0.input_layernorm and 4 more)
  8 modules of 5 classes left: it keeps its own forward (the model and 7 more)
"""),
    "torch": (lambda: nn.Transformer(32, 2, 2, 2, 64, batch_first=True), """\
attention: fused in 6 of 6 modules (nn.MultiheadAttention); padding is computed: packed=True was not given
38 modules swapped, 0 left
  1 nn.TransformerEncoder      -> layers.TransformerEncoder (encoder)
  2 nn.TransformerEncoderLayer -> layers.TransformerEncoderLayer (encoder.layers.0 and 1 more)
  6 nn.MultiheadAttention      -> layers.MultiheadAttention (encoder.layers.0.self_attn and 5 more)
 14 nn.Dropout                 -> layers.Dropout (encoder.layers.0.dropout and 13 more)
 12 nn.LayerNorm               -> layers.LayerNorm (encoder.layers.0.norm1 and 11 more)
  1 nn.TransformerDecoder      -> layers.TransformerDecoder (decoder)
  2 nn.TransformerDecoderLayer -> layers.TransformerDecoderLayer (decoder.layers.0 and 1 more)
"""),
    "hand-written": (sdpa_models.Gpt, """\
attention: fused in 2 of 2 modules (GptAttention, where its code calls F.scaled_dot_product_attention); padding is
  computed: packed=True was not given
19 modules swapped, 0 left
 12 modules of 5 classes -> its code in tfast.functional() (the model and 11 more)
  2 nn.Embedding         -> layers.Embedding (tokens and 1 more)
  5 nn.Dropout           -> layers.Dropout (dropout and 4 more)
"""),
}  # fmt: skip


FUNCTIONAL = "hand-written"
"""Name of the text with ``functional=True``."""


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are swapped on some processors only."""
    monkeypatch.setattr("transformer_fast.swap.accelerate.is_faster", lambda weight: False)


COMPUTED, SKIPPED = "padding is computed: packed=True was not given", "padding is skipped in "


@pytest.mark.parametrize("name", TEXTS)
def test_the_whole_text(name: str) -> None:
    """The rows are the modules whose classes were changed, and what is left of torch is counted."""
    make, expected = TEXTS[name]
    model = make()
    before = {path: type(m) for path, m in model.named_modules()}
    report = tfast.accelerate(model, functional=name == FUNCTIONAL)
    text = str(report)
    assert text == expected.rstrip("\n") and len(text.splitlines()) <= LINES and widest(text) <= WIDTH
    changed = {path for path, m in model.named_modules() if type(m) is not before[path]}
    configs = "attn_implementation="
    assert {row.path for row in report.swapped if not row.now.startswith(configs)} == changed
    torchs = (kind for path, kind in before.items() if path not in changed and kind.__module__.startswith("torch.nn."))
    assert report.plain == collections.Counter(kind.__name__ for kind in torchs)


@pytest.mark.parametrize(("name", "places"), [
    ("bert", "bert.encoder"), ("llama", "model"),
    ("torch", "encoder and decoder"),
])  # fmt: skip
def test_layers_without_padding_are_in_the_first_line(name: str, places: str) -> None:
    make, expected = TEXTS[name]
    report = tfast.accelerate(make(), packed=True)
    assert str(report).split() == expected.replace(COMPUTED, f"{SKIPPED}{places}").split()
    assert not report.notes and [row.path for row in report.rows if row.is_stack] == places.split(" and ")


WORDS = st.from_regex(r"[a-z_]{1,40}|[0-9]{1,3}", fullmatch=True)
PATHS = st.lists(WORDS, max_size=12).map(".".join)
CLASSES = st.from_regex(r"(nn\.)?[A-Z][A-Za-z]{0,120}", fullmatch=True)
REASONS = st.lists(st.text("abcdefgh", min_size=1, max_size=30), min_size=1, max_size=30).map(" ".join)
ROWS = st.lists(st.builds(Row, PATHS, CLASSES, st.none() | REASONS, REASONS), max_size=12)


@given(ROWS, ROWS, st.lists(REASONS, max_size=12), st.booleans())
@examples(60)
def test_any_report_has_ten_lines(rows: list[Row], attention: list[Row], notes: list[str], packed: bool) -> None:
    report = Report(rows, attention=attention, notes=notes, packed=packed)
    for reason in notes:
        report.padded_calls.add(reason)
    text = str(report)
    lines = text.splitlines()
    assert len(lines) <= LINES and widest(text) <= WIDTH
    words = "".join(text.split())
    if hidden := re.fullmatch(
        r"(\d+) more modules: report\.rows(; more reasons: report\.attention, report\.notes)?", lines[-1]
    ):
        assert len(lines) == LINES and int(hidden[1]) <= len(rows)
        shown = [LINE_START.match(line) for line in lines[:-1]]
        assert hidden[2] or int(hidden[1]) + sum(int(line[1]) for line in shown if line) <= len(rows)
        return
    assert all("".join(note.split()) in words for note in notes)
    assert all("".join(row.why.split()) in words for row in attention if row.now is None)


LINE_START = re.compile(r" *(\d+) (?:nn\.)?[A-Zo]")


def test_a_module_around_a_model_is_named() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([bert().bert])

        def forward(self, **given: Any) -> Any:
            return self.parts[0](**given).last_hidden_state.cumsum(1)

    report = tfast.accelerate(Tagger(), packed=True)
    first, second, *_ = str(report).splitlines()
    assert f"{SKIPPED}parts.0.encoder" in first and "Tagger" in second


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_the_page_shows_a_text_that_is_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "accelerate.md"
    comments = "".join(f"# {line}\n" for line in TEXTS["bert"][1].splitlines())
    assert f"{comments}```" in page.read_text()
