"""``accelerate(model, packed=True)`` on models of transformers with each head: equal to the plain model at tokens."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import transformer_fast as tfast
from examples import examples

pytest.importorskip("transformers")
import huggingface_models as models
import packed_models as packed

from transformer_fast.huggingface import supported
from transformer_fast.huggingface.heads import HEADS, Head, listed
from transformer_fast.layers.padded_calls import GAPS, NO_SOURCE

READS = "the model's head reads a position that is padding"
"""Reason of a model whose head reads the first or the last position of each row."""

MODELS = {
    name: reasons
    for names, reasons in (
        ("BertForMaskedLM RobertaForMaskedLM XLMRobertaForMaskedLM ElectraForMaskedLM AlbertForMaskedLM "
         "DistilBertForMaskedLM CamembertForMaskedLM EuroBertForMaskedLM BertForTokenClassification "
         "DistilBertForTokenClassification ElectraModel DistilBertModel GPT2LMHeadModel LlamaForCausalLM "
         "Qwen2ForCausalLM GPTNeoXForCausalLM OPTForCausalLM PhiForCausalLM BartForCausalLM XLMRobertaForCausalLM "
         "ErnieForMaskedLM Data2VecTextForMaskedLM RobertaPreLayerNormForMaskedLM RoCBertForMaskedLM OlmoForCausalLM "
         "Olmo2ForCausalLM CohereForCausalLM GlmForCausalLM Glm4ForCausalLM HeliumForCausalLM ArceeForCausalLM "
         "ApertusForCausalLM SeedOssForCausalLM Ernie4_5ForCausalLM GraniteForCausalLM GemmaForCausalLM "
         "GPTBigCodeForCausalLM Qwen3ForCausalLM PLBartForCausalLM BlenderbotForCausalLM "
         "BlenderbotSmallForCausalLM", {}),
        ("ModernBertForMaskedLM MistralForCausalLM Gemma2ForCausalLM T5EncoderModel SmolLM3ForCausalLM Phi3ForCausalLM "
         "Ministral3ForCausalLM MinistralForCausalLM Starcoder2ForCausalLM Olmo3ForCausalLM Cohere2ForCausalLM",
         {"between": GAPS}),
        ("BartForConditionalGeneration MBartForConditionalGeneration MarianMTModel M2M100ForConditionalGeneration "
         "PegasusForConditionalGeneration PLBartForConditionalGeneration BlenderbotForConditionalGeneration "
         "BlenderbotSmallForConditionalGeneration", {"a whole row": NO_SOURCE}),
        ("T5ForConditionalGeneration MT5ForConditionalGeneration", {"a whole row": NO_SOURCE, "between": GAPS}),
        ("BertModel RobertaModel BertForSequenceClassification RobertaForSequenceClassification "
         "DistilBertForSequenceClassification", {"left": READS, "a whole row": READS}),
        ("GPT2ForSequenceClassification LlamaForSequenceClassification", {"a whole row": READS}),
    )
    for name in names.split()
}  # fmt: skip
"""Classes, and for each padding side the reason why their calls keep padding."""
DECODES = ("ForConditionalGeneration", "MTModel")


@pytest.mark.cover("values")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", packed.PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_plain_model(name: str, padding: str) -> None:
    sides = packed.Sides(packed.make(name, **packed.SETTINGS.get(name, {})))
    assert any(row.now == "without padding" for row in sides.report.rows)
    reason = MODELS[name].get(padding)
    call = packed.batch(name, padding)
    # A query without keys has no gradient in our op, but has one in eager: see docs/masks.md.
    gradients = reason is None or padding != "a whole row"
    for training in (True, False):
        sides.hold(call, training=training, gradients=gradients)
    assert set(sides.report.padded_calls.reasons) == ({reason} if reason else set())
    if padding == "none":
        return
    with torch.no_grad():
        output = sides.packed(**call.given)
    for key in ("logits", "last_hidden_state"):
        if key in output and output[key].shape[:2] == call.tokens.shape and not reason and "Token" not in name:
            assert not output[key][~call.tokens].any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith(DECODES)])
def test_a_decoder_without_padding_beside_an_encoder_with_some(name: str, attention: str) -> None:
    """With sdpa such a decoder gets no mask, and its layers say that they are causal."""
    sides = packed.Sides(packed.make(name, attention, **packed.SETTINGS.get(name, {})))
    call = packed.batch(name, "right")
    target = call.given.pop("labels").clamp(min=1)
    call = packed.Batch(call.given | {"decoder_input_ids": target}, torch.ones_like(target, dtype=torch.bool))
    for training in (True, False):
        sides.hold(call, training=training, use_cache=False)
    assert sides.is_packed()


def test_every_stack_of_the_table_is_tried() -> None:
    tried = {type(packed.make(name)).__module__ for name in MODELS}
    assert tried >= supported.FILES


def test_a_stack_whose_attention_drops_the_boundaries_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron's attention passes no further arguments on, so its class is in no table."""
    file = "transformers.models.nemotron.modeling_nemotron"
    monkeypatch.setitem(supported.STACKS, f"{file}.NemotronModel", "Model")
    monkeypatch.setattr(supported, "FILES", supported.FILES | {file})
    sides = packed.Sides(packed.make("NemotronForCausalLM"))
    sides.hold(packed.batch("NemotronForCausalLM", "right"), training=True)
    reason = "a NemotronAttention does not get the boundaries of the sequences"
    assert list(sides.report.padded_calls.reasons) == [reason]


def test_a_new_family_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "transformers.models.bert_generation.modeling_bert_generation"
    name = "BertGenerationDecoder"
    before = packed.Sides(packed.make(name, is_decoder=True))
    assert not any(row.now == "without padding" for row in before.report.rows)
    monkeypatch.setitem(supported.STACKS, f"{file}.BertEncoder", "Encoder")
    monkeypatch.setattr(supported, "FILES", supported.FILES | {file})
    sides = packed.Sides(packed.make(name, is_decoder=True))
    sides.hold(packed.batch("BertLMHeadModel", "right"), training=True)
    assert sides.is_packed() and any(row.now == "without padding" for row in sides.report.rows)


DRAWN = (
    "BertForMaskedLM", "BertForTokenClassification", "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM",
    "BartForConditionalGeneration", "T5ForConditionalGeneration",
)  # fmt: skip


@functools.cache
def sides(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a model without padding and the same model with padding; both run on the fused ops."""
    padded = packed.make(name, **packed.SETTINGS.get(name, {}))
    without = copy.deepcopy(padded)
    tfast.accelerate(padded)
    tfast.accelerate(without, packed=True)
    return without, padded


@pytest.mark.filterwarnings("ignore")
@examples(20, 500)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(DRAWN))
    rows, length, target = (data.draw(st.integers(1, most)) for most in (3, 7, 5))

    def some(width: int) -> Tensor:
        row = st.lists(st.booleans(), min_size=width, max_size=width)
        return torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))

    keep = some(length)
    ids = torch.randint(4, models.VOCABULARY - 4, (rows, length))
    given_ = {"input_ids": ids.where(keep, models.PAD), "attention_mask": keep.long()}
    tokens = some(target) if name.endswith(DECODES) else keep
    counted = some(tokens.shape[1]) if data.draw(st.booleans()) else tokens
    labels = torch.randint(4, models.VOCABULARY - 4, counted.shape)
    labels = labels % 2 if "Token" in name else labels
    given_["labels"] = labels.where(counted, packed.IGNORED)
    tokens = tokens & (counted.flip(1).cumsum(1).flip(1) > 0) if tokens is not keep else tokens
    found = []
    for model in sides(name):
        model.zero_grad(set_to_none=True)
        output = model(**given_)
        output.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": output.loss, "logits": output.logits[tokens], **gradients})
    packed.close(*found, nan=True)


EVERY = [str(case) for case in models.language_models() if case.name not in {*models.NOT_MADE, *MODELS}]


@pytest.mark.slow("one of two hundred models")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_no_model_is_wrong(name: str) -> None:
    """Every other language model of transformers, with padding on each side."""
    try:
        plain = packed.make(name)
        packed.step(plain, packed.batch(name, "right"))
    except Exception as error:
        pytest.skip(f"no padded training step of the plain model: {type(error).__name__}")
    for parameter in plain.parameters():
        parameter.grad = None
    sides = packed.Sides(packed.make(name))
    for padding in packed.PADDING:
        before = dict(sides.report.padded_calls.reasons)
        try:
            packed.step(sides.plain, packed.batch(name, padding))
        except (IndexError, RuntimeError):  # some models read the last token of a row, which may have none
            assert padding == "a whole row"
            continue
        sides.hold(packed.batch(name, padding), training=True, gradients=padding != "a whole row")
        reasons = sides.report.padded_calls.reasons.keys() - before
        assert not any("own; it may" in reason or "is unknown; it may" in reason for reason in reasons)


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
