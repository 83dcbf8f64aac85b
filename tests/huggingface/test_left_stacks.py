"""Calls and changes that a stack without padding does not know: they keep the padding, or are computed alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.loss import loss_utils  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

from transformer_fast.huggingface import supported  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not supported.has_version(), reason="the table has other versions of transformers"),
    pytest.mark.filterwarnings("ignore"),
]
BERT, LLAMA, BART, T5 = (
    "BertForMaskedLM",
    "LlamaForCausalLM",
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
)
Change = Callable[[nn.Module], Any]


def pair(name: str, change: Change | None = None, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Return a model, the accelerated copy, both changed after that, and the report."""
    plain = packed.make(name, **settings)
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    for model in (plain, fast):
        if change is not None:
            change(model)
    return plain, fast, report


def hold(plain: nn.Module, fast: nn.Module, call: packed.Batch, **more: Any) -> None:
    for training in (True, False):
        packed.close(*(packed.step(model.train(training), call, **more) for model in (fast, plain)))


def not_causal(model: nn.Module) -> None:
    model.config.is_causal = False


def smaller_window(model: nn.Module) -> None:
    model.config.sliding_window = 2


def mean_of_logits(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return logits.logsumexp(-1).mean()


def chunks(model: nn.Module) -> None:
    model.config.chunk_size_feed_forward = 3
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = 3


def compiled_blocks(model: nn.Module) -> None:
    for block in (*model.encoder.block, *model.decoder.block):
        block.compile(backend="eager")


def mean_of_squares(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.square().mean()


WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 6}
OWN_LOSS = "the loss is not transformers' own; it may read padding"
LEFT: dict[str, tuple[str, dict[str, Any], Change | None, str]] = {
    "is_causal of the config": (LLAMA, {}, not_causal, "is_causal says what its tokens see"),
    "positions of the length": (LLAMA, ROPE, None, "its rotary positions depend on the length of the batch"),
    "another window": ("Qwen2ForCausalLM", WINDOWS, smaller_window, "the sliding window of its config was changed"),
    "chunks": (BERT, {}, chunks, "its feed-forward network computes chunks (chunk_size_feed_forward)"),
    "a loss that is not shifted": (LLAMA, {}, lambda m: setattr(m, "loss_type", "ForMaskedLM"), OWN_LOSS),
    "a loss of a head of tags": (
        "LlamaForTokenClassification", {}, lambda m: setattr(m, "loss_function", mean_of_squares), OWN_LOSS,
    ),
    "compiled blocks": (
        T5, {"decoder_start_token_id": 1}, compiled_blocks, "its layers are compiled, and pass on a position bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_the_table_does_not_know_keeps_the_padding(what: str) -> None:
    name, settings, change, reason = LEFT[what]
    plain, fast, report = pair(name, change, **settings)
    hold(plain, fast, packed.batch(name, "right"))
    assert list(report.padded_calls.reasons) == [reason]


@pytest.mark.parametrize("name", [LLAMA, BART, T5])
def test_is_causal_as_an_argument(name: str) -> None:
    plain, fast, report = pair(name, **({"decoder_start_token_id": 1} if name == T5 else {}))
    hold(plain, fast, packed.batch(name, "right"), is_causal=False)
    assert "is_causal says what its tokens see" in report.padded_calls.reasons


def test_a_mask_function_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast, report = pair(LLAMA)

    def bidirectional(**given: Any) -> Any:
        return masking_utils.create_bidirectional_mask(given["config"], given["inputs_embeds"], given["attention_mask"])

    monkeypatch.setattr(llama, "create_causal_mask", bidirectional)
    hold(plain, fast, packed.batch(LLAMA, "right"), use_cache=False)
    assert list(report.padded_calls.reasons) == ["a function that makes its masks was replaced"]


def test_a_loss_that_was_replaced_in_the_table_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast, _ = pair(LLAMA)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", mean_of_logits)
    hold(plain, fast, packed.batch(LLAMA, "right"))


def test_an_empty_row_of_an_encoder_that_is_called_alone() -> None:
    plain, fast, report = pair(BART)
    given = packed.batch(BART, "a whole row").given
    ids, mask = given["input_ids"], given["attention_mask"]
    decoder = torch.tensor([[1, 5, 6]] * 3)
    found = []
    for model in (fast.eval(), plain.eval()):
        states = model.get_encoder()(input_ids=ids, attention_mask=mask)
        found.append(model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=decoder).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert list(report.padded_calls.reasons) == ["a row of the encoder has no token"]


@pytest.mark.parametrize("name", ["BertForPreTraining", "GPT2DoubleHeadsModel"])
def test_labels_at_padding_of_heads_with_two_losses(name: str) -> None:
    plain, fast, _ = pair(name)
    call = packed.batch(BERT, "right")
    call.given["labels"] = call.given["input_ids"]
    more = (
        {"next_sentence_label": torch.tensor([0, 1, 0])}
        if "Bert" in name
        else {"mc_token_ids": torch.tensor([8, 2, 4])}
    )
    given = call.given | more
    torch.testing.assert_close(fast(**given).loss, plain(**given).loss, rtol=1e-4, atol=1e-5)


def test_a_mask_of_other_numbers() -> None:
    """OPT counts positions by the values of the mask."""
    plain, fast, report = pair("OPTForCausalLM")
    call = packed.batch("OPTForCausalLM", "left")
    call.given["attention_mask"] *= 2
    assert not report.padded_calls.reasons
    keep = call.given["attention_mask"] > 0
    with torch.no_grad():
        ours, theirs = (model(**call.given).logits[keep] for model in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_added_to_the_scores() -> None:
    plain, fast, report = pair(BERT)
    hidden = torch.randn(1, packed.LENGTH, plain.config.hidden_size)
    mask = (torch.arange(packed.LENGTH) > 5).float()[None] * -1e9
    ours, theirs = (model.bert.encoder(hidden, attention_mask=mask)[0] for model in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert list(report.padded_calls.reasons) == ["its mask is a tensor, not padding or look-ahead"]


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
def test_layers_whose_parts_were_changed(change: Change, packs: bool) -> None:
    plain, call = packed.make(BERT), packed.batch(BERT, "right")
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast, packed=packs)
    for model in (plain, fast):
        change(model)
    torch.testing.assert_close(fast(**call.given).loss, plain(**call.given).loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [torch.tensor([0, 1]), torch.tensor([0]), 2])
def test_logits_of_some_positions(keep: Tensor | int) -> None:
    plain, fast, _ = pair(LLAMA)
    given = {key: value for key, value in packed.batch(LLAMA, "left").given.items() if key != "labels"}
    ours, theirs = (model(**given, use_cache=False, logits_to_keep=keep).logits for model in (fast, plain))
    places = given["attention_mask"].bool()[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
    torch.testing.assert_close(ours[places], theirs[places], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [BERT, LLAMA, "OPTForCausalLM"])
def test_logits_may_be_written_to_and_are_in_the_graph_of_the_loss(name: str) -> None:
    plain, fast, report = pair(name)
    call = packed.batch(name, "right")
    grads = []
    for model in (fast, plain):
        output = model(**call.given)
        grads.append(torch.autograd.grad(output.loss, output.logits, retain_graph=True)[0][call.tokens])
        output.logits[..., :5] = -1e4
        output.logits /= 2.0
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert not report.padded_calls.reasons
