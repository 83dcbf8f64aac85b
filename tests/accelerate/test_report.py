"""Printed report: whole texts of small models, in which every number is what the model has, and long names."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sdpa_models
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import transformer_fast as tfast
from examples import examples
from transformer_fast.accelerate import Report, Row
from transformer_fast.accelerate.report_text import WIDTH

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


def torchs() -> nn.Module:
    return nn.Transformer(32, 2, 2, 2, 64, batch_first=True)


TEXTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (bert, """\
attention: fused in 2 of 2 modules (BertSelfAttention, through transformers' interface)
22 modules swapped, 10 left; nothing to gain in 14 Linear, 1 ModuleList, 1 Tanh
 3 nn.Embedding               -> layers.Embedding             bert.embeddings.word_embeddings and 2 more
 5 nn.LayerNorm               -> layers.LayerNorm             bert.embeddings.LayerNorm and 4 more
 8 nn.Dropout                 -> layers.Dropout               bert.embeddings.dropout and 7 more
 4 BertSelfOutput, BertOutput -> huggingface.DropoutAddNorm   bert.encoder.layer.*.attention.output and 2 more
 2 BertIntermediate           -> huggingface.ActivatedLinear  bert.encoder.layer.*.intermediate
10 of 7 classes               left: unknown structure (the model, bert.embeddings, bert.encoder and 7 more)
"""),
    "whisper": (whisper, """\
attention: fused in 9 of 9 modules (WhisperAttention, through transformers' interface)
25 modules swapped, 9 left; nothing to gain in 2 Conv1d, 49 Linear, 2 ModuleList
 2 nn.Embedding               -> layers.Embedding                 model.encoder.embed_positions and 1 more
 3 WhisperEncoderLayer        -> huggingface.PreNormEncoderLayer  model.encoder.layers.*
17 nn.LayerNorm               -> layers.LayerNorm                 model.encoder....*.self_attn_layer_norm and 14 more
 3 WhisperDecoderLayer        -> huggingface.PreNormDecoderLayer  model.decoder.layers.*
 8 of 3 classes               left: unknown structure (the model, model and 6 more)
 1 WhisperPositionalEmbedding left: a subclass of nn.Embedding may compute something else
                              (model.decoder.embed_positions)
"""),
    "llama": (llama, """\
attention: fused in 2 of 2 modules (LlamaAttention, through transformers' interface)
6 modules swapped, 8 left; nothing to gain in 15 Linear, 1 ModuleList
1 nn.Embedding -> layers.Embedding     model.embed_tokens
5 LlamaRMSNorm -> huggingface.RMSNorm  model.layers.*.input_layernorm and 3 more
8 of 5 classes left: unknown structure (the model, model.layers.*, model.layers.*.mlp and 3 more)
"""),
    "torch": (torchs, """\
attention: fused in 6 of 6 modules (nn.MultiheadAttention)
38 modules swapped, 0 left; nothing to gain in 8 Linear, 2 ModuleList, 6 NonDynamicallyQuantizableLinear, 1 Transformer
 1 nn.TransformerEncoder      -> layers.TransformerEncoder       encoder
 2 nn.TransformerEncoderLayer -> layers.TransformerEncoderLayer  encoder.layers.*
 6 nn.MultiheadAttention      -> layers.MultiheadAttention       encoder.layers.*.self_attn and 4 more
14 nn.Dropout                 -> layers.Dropout                  encoder.layers.*.dropout and 12 more
12 nn.LayerNorm               -> layers.LayerNorm                encoder.layers.*.norm*, encoder.norm and 7 more
 1 nn.TransformerDecoder      -> layers.TransformerDecoder       decoder
 2 nn.TransformerDecoderLayer -> layers.TransformerDecoderLayer  decoder.layers.*
"""),
    "hand-written": (sdpa_models.Gpt, """\
attention: fused in 2 of 2 modules (GptAttention, where its code calls F.scaled_dot_product_attention)
19 modules swapped, 0 left; nothing to gain in 2 GELU, 9 Linear, 1 ModuleList
12 of 5 classes -> its code in tfast.functional()  the model, blocks.*, blocks.*.norm_*, blocks.*.attention and 3 more
 2 nn.Embedding -> layers.Embedding                tokens, positions
 5 nn.Dropout   -> layers.Dropout                  dropout, blocks.*.attention.out_dropout and 2 more
"""),
}  # fmt: skip


FUNCTIONAL = "hand-written"
"""Name of the text with ``functional=True``."""


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are swapped on some processors only."""
    monkeypatch.setattr("transformer_fast.accelerate.engine.is_faster", lambda weight: False)


LINE = re.compile(r" *(\d+) (.+?) +(?:-> (.+?)  +([^ ].*)|left: (.*?) +\((.*)\))")


@pytest.mark.parametrize("name", TEXTS)
def test_the_whole_text(name: str) -> None:
    """Each number is counted again in the model, by class."""
    make, expected = TEXTS[name]
    model = make()
    before = {path: type(m) for path, m in model.named_modules()}
    report = tfast.accelerate(model, functional=name == FUNCTIONAL)
    text = str(report)
    assert text == expected.rstrip("\n") and len(text.splitlines()) <= 10 and widest(text) <= WIDTH
    first, numbers, *lines = re.sub(r"\n {2,}(?=[a-z(])", "  ", text).splitlines()
    kinds = {path: name_of(kind) for path, kind in before.items()}
    attends = [path for path, kind in kinds.items() if re.search(rf"\({kind}[,)]", first)]
    changed = [path for path, m in model.named_modules() if type(m) is not before[path]]
    kept = [path for path in before if path not in changed]
    plain = collections.Counter(before[path].__name__ for path in kept if kinds[path].startswith("nn."))
    named_in_configs = [row.path for row in report.rows if (row.now or "").startswith("attn_implementation=")]
    left = [path for path in kept if not kinds[path].startswith("nn.") and path not in (*attends, *named_in_configs)]
    assert first.startswith(f"attention: fused in {len(attends)} of {len(attends)} modules (") and attends
    gain = ", ".join(f"{n} {kind}" for kind, n in sorted(plain.items()))
    assert numbers == f"{len(changed)} modules swapped, {len(left)} left; nothing to gain in {gain}"
    parsed = [LINE.fullmatch(line).groups() for line in lines]
    named = {kind for _, classes, *_ in parsed for kind in classes.split(", ")}
    for count, classes, now, swapped, _, unchanged in parsed:
        paths = changed if now else left
        if classes.startswith("of "):  # those that no other line names
            paths = [path for path in paths if kinds[path] not in named]
            assert classes == f"of {len({kinds[path] for path in paths})} classes"
        else:
            paths = [path for path in paths if kinds[path] in classes.split(", ")]
        assert int(count) == len(paths)
        places, _, more = (swapped or unchanged).partition(" and ")
        pattern = re.escape(places.replace("the model", "")).replace(r"\*", r"\d+").replace(r"\.\.\.\.", r"\..*\.")
        shown = [path for path in paths if re.fullmatch(pattern.replace(r",\ ", "|"), path)]
        assert len(paths) - len(shown) == (int(more.removesuffix(" more")) if more else 0)


@pytest.mark.parametrize("name", ["bert", "whisper", "torch"])
def test_layers_without_padding_are_one_line_more(name: str) -> None:
    """The number of swapped modules stays: layers of a stack have a line of their own."""
    make, expected = TEXTS[name]
    model = make()
    lines = str(tfast.accelerate(model, packed=True)).splitlines()
    first, numbers, *_ = expected.splitlines()
    assert lines[:2] == [first, numbers]
    layers = collections.Counter(type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Layer"))
    found = [line.split()[:2] for line in lines if "-> without padding" in line]
    assert found == [[str(count), kind] for kind, count in layers.items()]
    assert len(lines) == len(expected.splitlines()) + len(found)


WORDS = st.from_regex(r"[a-z_]{1,40}|[0-9]{1,3}", fullmatch=True)
PATHS = st.lists(WORDS, max_size=12).map(".".join)
CLASSES = st.from_regex(r"(nn\.)?[A-Z][A-Za-z]{0,120}", fullmatch=True)
REASONS = st.lists(st.text("abcdefgh", min_size=1, max_size=30), min_size=1, max_size=30).map(" ".join)
ROWS = st.lists(st.builds(Row, PATHS, CLASSES, st.none() | REASONS, REASONS), max_size=12)


@given(ROWS, ROWS, st.lists(REASONS, max_size=2), st.dictionaries(CLASSES, st.integers(1, 99), max_size=9))
@examples(60)
def test_no_line_is_wider_than_a_screen(
    rows: list[Row], attention: list[Row], notes: list[str], plain: dict[str, int]
) -> None:
    report = Report(rows, collections.Counter(plain), attention=attention, notes=notes)
    for reason in notes:
        report.padded_calls.add(reason)
    text = str(report)
    assert widest(text) <= WIDTH
    words = "".join(text.split())
    for row in (*rows, *attention):
        said = (row.why if row in attention else row.reason) if row.now is None else row.now
        assert "".join(said.split()) in words or row.why in said
    assert all("".join(note.split()) in words for note in notes)


def name_of(kind: type[nn.Module]) -> str:
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_the_page_shows_a_text_that_is_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "accelerate.md"
    comments = "".join(f"# {line}\n" for line in TEXTS["bert"][1].splitlines())
    assert f"{comments}```" in page.read_text()
