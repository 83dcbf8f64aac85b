"""``accelerate(model, packed=True)``: what a call of a model of transformers may be given, and what it returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from accelerated import assert_copied_and_undone, pair, state  # noqa: E402
from transformers.loss import loss_utils  # noqa: E402

import transformer_fast as tfast  # noqa: E402
from transformer_fast.huggingface.heads import READS_PADDING  # noqa: E402
from transformer_fast.huggingface.logits import TokenLogits  # noqa: E402
from transformer_fast.layers.padded_calls import GAPS, NO_TOKEN, recorded  # noqa: E402
from transformer_fast.masks.packing import Packing  # noqa: E402

BERT, GPT2, BART, LLAMA = "BertForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration", "LlamaForCausalLM"
DROPOUTS = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


def both(name: str, **settings: Any) -> tuple[nn.Module, nn.Module, tfast.accelerate.Report]:
    """Return a padded model, its copy without padding, and the copy's report; both run on the fused ops."""
    padded = packed.make(name, **settings)
    without = copy.deepcopy(padded)
    tfast.accelerate(padded)
    return padded, without, tfast.accelerate(without, packed=True)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", [BERT, BART, "the first layer of BERT"])
def test_gradient_checkpoints(name: str, reentrant: bool) -> None:
    model = BART if name == BART else BERT
    _, plain, _ = both(model, **(DROPOUTS if model == BERT else {"dropout": 0.2, "attention_dropout": 0.2}))
    again = copy.deepcopy(plain)
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if name not in (BERT, BART):
        again.bert.encoder.layer[1].gradient_checkpointing = False
    call, found = packed.batch(model, "right"), []
    for each in (plain, again):
        torch.manual_seed(3)
        found.append(packed.step(each.train(), call))
    assert found[1].keys() == found[0].keys()
    packed.close(found[1], found[0])


def test_a_reentrant_checkpoint_inside_a_layer() -> None:
    class Again(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor, mask: Tensor, *_: Any, **kwargs: Any) -> Any:
            return checkpoint(lambda x, m: self.inner(x, m, **kwargs), hidden, mask, use_reentrant=True)

    plain = packed.make(BERT)
    again = copy.deepcopy(plain)
    for layer in again.bert.encoder.layer:
        layer.attention = Again(layer.attention)
    call, found = packed.batch(BERT, "right"), []
    for model in (plain, again):
        report = tfast.accelerate(model, packed=True)
        step = packed.step(model.train(), call)
        found.append({name.replace(".inner", ""): t for name, t in step.items()})
    assert list(report.padded_calls.reasons) == ["a Again inside is not known; it may read padding"]
    packed.close(*found)


def test_autocast() -> None:
    padded, without, report = both(BERT)
    call = packed.batch(BERT, "left")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = packed.step(without, call), packed.step(padded, call)
    assert ours["logits"].dtype == theirs["logits"].dtype == torch.bfloat16
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0.1, atol=0.05)
    assert not report.padded_calls.reasons


def test_a_call_that_keeps_its_padding_draws_the_dropout_of_a_padded_model() -> None:
    name = "T5ForConditionalGeneration"
    padded, without, report = both(name, dropout_rate=0.2, decoder_start_token_id=1)
    call, found = packed.batch(name, "between"), []
    for model in (padded, without):
        torch.manual_seed(3)
        found.append(packed.step(model.train(), call))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert list(report.padded_calls.reasons) == [GAPS]


Given = dict[str, Any]
NO_LABELS = {"labels": None, "use_cache": False}
OPT = "OPTForCausalLM"  # which counts positions by the values of the mask


CALLS: dict[str, tuple[str, str, Callable[[Any, Given], Tensor], list[str]]] = {
    "by position": (BERT, "right", lambda m, given: m(given["input_ids"], given["attention_mask"]).logits, []),
    "tuples": (BERT, "right", lambda m, given: m(**given, return_dict=False)[1], []),
    "tuples of a decoder": (BART, "right", lambda m, given: m(**given, return_dict=False)[1], []),
    "inference mode": (BERT, "right", lambda m, given: torch.inference_mode()(lambda: m(**given).logits)(), []),
    "no tokens": (
        BERT, "right",
        lambda m, given: m(given["input_ids"], torch.zeros_like(given["attention_mask"])).logits.flatten(0, 1),
        [NO_TOKEN],
    ),
    "other numbers": (
        OPT, "left", lambda m, given: m(**given | {"attention_mask": 2 * given["attention_mask"]}).logits, [],
    ),
    "a loss of sentences": (
        "BertForPreTraining", "right",
        lambda m, given: m(**given, labels=given["input_ids"], next_sentence_label=torch.tensor([0, 1, 0])).loss,
        [READS_PADDING],
    ),
    "a loss of choices": (
        "GPT2DoubleHeadsModel", "right",
        lambda m, given: m(**given, labels=given["input_ids"], mc_token_ids=torch.tensor([8, 2, 4])).loss, [],
    ),
    **{
        f"logits of {keep}": (
            LLAMA, "left",
            lambda m, given, keep=keep: m(**given | NO_LABELS, logits_to_keep=keep).logits[:, -1], [],
        )
        for keep in (torch.tensor([0, packed.LENGTH - 1]), torch.tensor([packed.LENGTH - 1]), 2)
    },
}  # fmt: skip
"""Model, padding, a call that returns a tensor, and the reasons of a call that keeps its padding."""


@pytest.mark.parametrize("name", CALLS)
def test_outputs_are_those_of_the_plain_model_at_tokens_and_zero_at_padding(name: str) -> None:
    model, padding, run, reasons = CALLS[name]
    (plain, fast, report), call = packed.pair(model), packed.batch(model, padding)
    ours, theirs = (run(m.eval(), call.given) for m in (fast, plain))
    if ours.shape[:2] == call.tokens.shape:
        assert not ours[~call.tokens].any()
        ours, theirs = ours[call.tokens], theirs[call.tokens]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert list(report.padded_calls.reasons) == reasons


@pytest.mark.parametrize("name", [BERT, GPT2, BART])
def test_a_batch_without_padding_is_computed_as_before(name: str) -> None:
    padded, without, _ = both(name)
    call = packed.batch(name, "none")
    if "labels" in call.given:
        call.given["labels"] = call.given["labels"].clamp(min=4)
    ours, theirs = packed.step(without, call), packed.step(padded, call)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_inputs_of_a_decoder_end_where_its_labels_do() -> None:
    _, without, report = both(BART)
    call = packed.batch(BART, "right")
    with recorded() as passes:
        without(**call.given)
    assert [each.packing.total for each in passes[1:]] == [int(call.tokens.sum())]
    assert not report.padded_calls.reasons


@pytest.mark.parametrize("name", [GPT2, BART])
def test_generation_is_that_of_the_plain_model(name: str) -> None:
    padded, without, _ = both(name)
    call = packed.batch(name, "left").given
    given = {"input_ids": call["input_ids"], "attention_mask": call["attention_mask"]}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ours, theirs = (m.eval().generate(**given, **options) for m in (without, padded))
    assert torch.equal(ours, theirs)


def test_the_config_decides_on_a_cache_in_evaluation_without_labels() -> None:
    padded, without, report = both(GPT2)
    call = packed.batch(GPT2, "left").given
    ids = {"input_ids": call["input_ids"], "attention_mask": call["attention_mask"]}
    assert without.train()(**ids).past_key_values is None
    for model in (padded.eval(), without.eval()):
        assert model(**ids, use_cache=False).past_key_values is None
    assert without(**call).past_key_values is None and not report.padded_calls.reasons
    for given in ({}, {"use_cache": True}):
        theirs, ours = (m(**ids, **given).past_key_values for m in (padded, without))
        assert ours.get_seq_length() == theirs.get_seq_length() == packed.LENGTH
        assert ours.layers[0].keys.shape == theirs.layers[0].keys.shape
    without.config.use_cache = False
    assert without(**ids).past_key_values is None


CACHES = [
    name
    for name in ("past_key_values", "cache")
    if name in inspect.signature(transformers.GPT2LMHeadModel.forward).parameters or name == "past_key_values"
]
"""Names of the argument for a cache: transformers 5.24 takes both."""


@pytest.mark.parametrize("argument", CACHES)
@pytest.mark.parametrize("name", [GPT2, BART, LLAMA])
def test_a_call_with_the_cache_of_an_earlier_call(name: str, argument: str) -> None:
    padded, without, report = both(name)
    call = packed.batch(name, "left").given
    keep, target = call["attention_mask"], "decoder_input_ids" if name == BART else "input_ids"
    ids = call["labels"].clamp(4) if name == BART else call["input_ids"]
    results = []
    for first, then in ((padded, padded), (without, without), (padded, without)):
        first.eval(), then.eval()
        source = {"input_ids": call["input_ids"], "attention_mask": keep} if name == BART else {}
        masks = [{} if name == BART else {"attention_mask": keep[:, :length]} for length in (5, ids.shape[1])]
        read = first(**source, **masks[0], **{target: ids[:, :5]}, use_cache=True)
        out = then(**source, **masks[1], **{target: ids[:, 5:], argument: read.past_key_values}, use_cache=True)
        assert out.past_key_values.get_seq_length() == ids.shape[1]
        results.append(out.logits[:, -1])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-4)
    assert set(report.padded_calls.reasons) == {"keys and values are cached (use_cache, past_key_values)"}


@pytest.fixture
def compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled")
def test_a_compiled_model_runs_with_padding() -> None:
    padded, without, _ = both(BERT)
    call = packed.batch(BERT, "right").given
    with torch.no_grad():
        out = torch.compile(without.eval(), backend="eager")(**call).logits
        torch.testing.assert_close(out, padded.eval()(**call).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [BERT, BART, GPT2, "T5ForConditionalGeneration"])
def test_copies_a_second_call_and_undo(name: str) -> None:
    plain, fast, report = packed.pair(name)
    call = packed.batch(name, "right")
    assert not fast(**call.given).logits[~call.tokens].any()
    run = lambda model: model.eval()(**call.given).logits  # noqa: E731
    assert_copied_and_undone(fast, report, state(plain), run, packed=True)
    assert run(fast)[~call.tokens].any()


def test_padding_is_left_out_of_a_model_that_was_accelerated_before() -> None:
    padded, without, _ = both(BERT)
    report = tfast.accelerate(padded, packed=True)
    assert [row.now for row in report.swapped] == ["without padding"]
    call = packed.batch(BERT, "right")
    packed.close(packed.step(padded, call), packed.step(without, call))


def test_the_output_layer_runs_on_tokens() -> None:
    _, model, _ = both(BERT)
    call, seen = packed.batch(BERT, "right"), []
    with pytest.raises(IndexError):  # an error of the caller in the first call decides nothing
        model(**call.given | {"input_ids": call.given["input_ids"] + 1000})

    of = TokenLogits.of

    def watched(logits: Tensor, packing: Packing) -> Tensor:
        seen.append(tuple(logits.shape[:2]))
        return of(logits, packing)

    with mock.patch.object(TokenLogits, "of", watched):
        outs = [model(**call.given) for _ in range(2)]
    assert seen == [(1, int(call.tokens.sum()))] * 2
    for out in outs:
        assert out.logits.shape[:2] == call.tokens.shape and not out.logits[~call.tokens].any()
        assert type(out.logits) is Tensor


def mean_of_logits(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.logsumexp(-1).mean()


def test_a_loss_that_was_replaced_in_the_table_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast, _ = packed.pair(LLAMA)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", mean_of_logits)
    packed.hold(plain, fast, packed.batch(LLAMA, "right"))


def identities(model: nn.Module) -> None:
    for layer in model.bert.encoder.layer:
        layer.output.dropout = nn.Identity()


def weights_as_attributes(model: nn.Module) -> None:
    for path in ("output.dense", "attention.self.query", "output.LayerNorm"):
        module = model.get_submodule(f"bert.encoder.layer.0.{path}")
        weight = module.weight * 1.0
        del module.weight
        module.weight = weight


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("change", [identities, weights_as_attributes])
def test_layers_whose_parts_were_changed(change: Callable[[nn.Module], None], packs: bool) -> None:
    (plain, fast, _), call = pair(packed.make(BERT), packed=packs), packed.batch(BERT, "right")
    for model in (plain, fast):
        change(model)
    torch.testing.assert_close(fast(**call.given).loss, plain(**call.given).loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [BERT, LLAMA, "OPTForCausalLM"])
def test_logits_may_be_written_to_and_are_in_the_graph_of_the_loss(name: str) -> None:
    plain, fast, report = packed.pair(name)
    call = packed.batch(name, "right")
    grads = []
    for model in (fast, plain):
        output = model(**call.given)
        grads.append(torch.autograd.grad(output.loss, output.logits, retain_graph=True)[0][call.tokens])
        output.logits[..., :5] = -1e4
        output.logits /= 2.0
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert not report.padded_calls.reasons
