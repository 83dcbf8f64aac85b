"""``accelerate(model, packed=True)`` on transformers: calls and changes for which a batch keeps its padding, with
the reason. The numbers are those of the plain model with the same change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.models.bert import modeling_bert as bert  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

from transformer_fast.huggingface import supported  # noqa: E402
from transformer_fast.layers.padded_calls import padded_calls  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not supported.has_version(), reason="the table has other versions of transformers"),
    pytest.mark.filterwarnings("ignore"),
]
BERT, TAGGER, LLAMA = "BertForMaskedLM", "BertForTokenClassification", "LlamaForCausalLM"
BART, T5, GPT2 = "BartForConditionalGeneration", "T5ForConditionalGeneration", "GPT2LMHeadModel"
Change = Callable[[nn.Module], Any]
More = Callable[[packed.Batch], dict[str, Any]]


class Mixing(nn.Module):
    """A module that stands in the place of another one and reads all positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(mixed(hidden), *args, **kwargs)


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def put(path: str, make: Callable[[nn.Module], nn.Module] = Mixing) -> Change:
    return lambda model: model.set_submodule(path, make(model.get_submodule(path)))


def patched(path: str) -> Change:
    """Replace the forward of one module."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda x, *args, **kwargs: forward(mixed(x), *args, **kwargs)

    return change


def of_a_class(path: str) -> Change:
    """Give a module a class derived from its own."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        base = type(module)
        module.__class__ = type("Own", (base,), {
            "forward": lambda self, x, *args, **kwargs: base.forward(self, mixed(x), *args, **kwargs)
        })  # fmt: skip

    return change


def hooked(path: str) -> Change:
    return lambda model: model.get_submodule(path).register_forward_pre_hook(
        lambda module, args: (mixed(args[0]), *args[1:])
    )


def own_loss(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())


def chunks(model: nn.Module) -> None:
    model.config.chunk_size_feed_forward = 3
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = 3


def compiled_blocks(model: nn.Module) -> None:
    for block in (*model.encoder.block, *model.decoder.block):
        block.compile(backend="eager")


def four_dimensions(call: packed.Batch) -> dict[str, Any]:
    keep = call.given["attention_mask"].bool()
    return {"attention_mask": torch.zeros(3, 1, 1, packed.LENGTH).masked_fill(~keep[:, None, None], -1e9)}


def nothing(model: nn.Module) -> None:
    pass


def convolution(old: nn.Module) -> nn.Module:
    return nn.Sequential(nn.AvgPool1d(3, 1, 1), nn.Conv1d(9, 9, 1), old)


WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 6}
OWN_LOSS = "the loss is not transformers' own; it may read padding"
LABELS = "the loss reads padding: labels at padding, or after it, are not all -100"
CAUSAL = "is_causal says what its tokens see"
UNKNOWN, HOOK = "a {} inside is not known; it may read padding", "a {} has a hook, which may read padding"
MIXING = UNKNOWN.format("Mixing")

ARGUMENTS: dict[str, tuple[str, More, str]] = {
    "weights": (BERT, lambda call: {"output_attentions": True}, "attention weights are requested (output_attentions)"),
    "hidden states": (
        BERT, lambda call: {"output_hidden_states": True},
        "hidden states of the layers are requested (output_hidden_states)",
    ),
    "a cache": (GPT2, lambda call: {"use_cache": True}, "keys and values are cached (use_cache, past_key_values)"),
    "a mask of four dimensions": (BERT, four_dimensions, "its mask is a tensor, not padding or look-ahead"),
    "labels at padding": (BERT, lambda call: {"labels": call.given["input_ids"]}, LABELS),
    "labels after padding": (GPT2, lambda call: {"labels": call.given["input_ids"]}, LABELS),
    "an answer in a text": (
        "BertForQuestionAnswering",
        lambda call: {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([2, 1, 3])},
        "the loss of BertForQuestionAnswering reads all positions, padding included",
    ),
    "is_causal": (LLAMA, lambda call: {"is_causal": False}, CAUSAL),
    "is_causal of BART": (BART, lambda call: {"is_causal": False}, CAUSAL),
    "is_causal of T5": (T5, lambda call: {"is_causal": False}, CAUSAL),
}  # fmt: skip
"""Model, arguments of a call, and the reason."""

SETTINGS: dict[str, tuple[str, dict[str, Any], Change, str]] = {
    "is_causal": (LLAMA, {}, lambda m: setattr(m.config, "is_causal", False), CAUSAL),
    "positions of the length": (LLAMA, ROPE, nothing, "its rotary positions depend on the length of the batch"),
    "another window": (
        "Qwen2ForCausalLM", WINDOWS, lambda m: setattr(m.config, "sliding_window", 2),
        "the sliding window of its config was changed",
    ),
    "chunks": (BERT, {}, chunks, "its feed-forward network computes chunks (chunk_size_feed_forward)"),
    "compiled blocks": (T5, {}, compiled_blocks, "its layers are compiled, and pass on a position bias"),
    "gradient checkpoints with a bias between positions": (
        "T5EncoderModel", {}, lambda m: m.gradient_checkpointing_enable(),
        "its gradient checkpointing passes on a position bias",
    ),
}  # fmt: skip
"""Model, settings, a change of the config or of its layers, and the reason."""

CHANGED: dict[str, tuple[str, Change, str]] = {
    "a loss that is not shifted": (LLAMA, lambda m: setattr(m, "loss_type", "ForMaskedLM"), OWN_LOSS),
    "a loss of a head of tags": (
        "LlamaForTokenClassification", lambda m: setattr(m, "loss_function", own_loss), OWN_LOSS,
    ),
    "a loss": (LLAMA, lambda m: setattr(m, "loss_function", own_loss), OWN_LOSS),
    "a classifier": (TAGGER, put("classifier"), MIXING),
    "a convolution": (TAGGER, put("classifier", convolution), UNKNOWN.format("AvgPool1d")),
    "a pooler": ("BertForSequenceClassification", put("bert.pooler"), MIXING),
    "a last norm": (LLAMA, put("model.norm"), MIXING),
    "an output layer": (LLAMA, put("lm_head"), MIXING),
    "the class of an output layer": (LLAMA, of_a_class("lm_head"), UNKNOWN.format("Own")),
    "the forward of an output layer": (
        BERT, patched("cls.predictions.transform"), UNKNOWN.format("BertPredictionHeadTransform"),
    ),
    "an encoder": (BERT, put("bert.encoder"), MIXING),
    "a layer": (BERT, put("bert.encoder.layer.1"), MIXING),
    "the class of a layer": (BERT, of_a_class("bert.encoder.layer.1"), UNKNOWN.format("Own")),
    "an attention": (BERT, put("bert.encoder.layer.1.attention.self"), MIXING),
    "the class of a network": (LLAMA, of_a_class("model.layers.0.mlp"), UNKNOWN.format("Own")),
    "a forward inside a layer": (T5, patched("encoder.block.0.layer.1"), UNKNOWN.format("T5LayerFF")),
    "a hook in front of a layer": (BERT, hooked("bert.encoder.layer.1"), HOOK.format("BertLayer")),
    "a hook in front of the head": (BERT, hooked("cls"), HOOK.format("BertOnlyMLMHead")),
    "a hook inside a layer": (BART, hooked("model.encoder.layers.0.fc1"), HOOK.format("Linear")),
}  # fmt: skip
"""Model, what somebody replaces after ``accelerate``, and the reason."""


CALLS = {what: (name, {}, nothing, more, reason) for what, (name, more, reason) in ARGUMENTS.items()} | {
    f"{what}, a setting": (name, settings, change, lambda call: {}, reason)
    for what, (name, settings, change, reason) in SETTINGS.items()
}


@pytest.mark.parametrize("what", CALLS)
def test_an_argument_or_a_setting(what: str) -> None:
    name, settings, change, more, reason = CALLS[what]
    plain, fast, report = packed.pair(name, **settings)
    call = packed.batch(name, "right")
    call.given.update(more(call))
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    packed.hold(plain, fast, call)
    assert set(report.padded_calls.reasons) == {reason}
    assert reason in " ".join(str(report).split())


@pytest.mark.parametrize("copied", [False, True], ids=["", "of a copy"])
@pytest.mark.parametrize("what", CHANGED)
def test_a_module_that_is_replaced_after_accelerate(what: str, copied: bool) -> None:
    name, change, reason = CHANGED[what]
    plain, fast, _ = packed.pair(name)
    fast, call = pickle.loads(pickle.dumps(fast)) if copied else fast, packed.batch(name, "right")
    packed.hold(plain, fast, call, (True,))
    calls = padded_calls(fast)
    assert calls is not None and not calls.reasons
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    packed.hold(plain, fast, call, (True, False, True))
    assert set(calls.reasons) == {reason}


def test_a_layer_that_was_changed_is_looked_at_in_each_call() -> None:
    plain, fast, report = packed.pair(BERT)
    call = packed.batch(BERT, "right")
    for model in (plain, fast):
        torch.manual_seed(1)
        put("bert.encoder.layer.1.output.dense", lambda old: nn.Sequential(old, nn.Linear(32, 32)))(model)
    packed.hold(plain, fast, call)
    assert not report.padded_calls.reasons
    for model in (plain, fast):
        put("bert.encoder.layer.0.output.dense")(model)
    packed.hold(plain, fast, call)
    assert list(report.padded_calls.reasons) == [MIXING]


def test_a_hook_sees_the_rows_of_the_plain_model_as_long_as_it_is_there() -> None:
    plain, fast, report = packed.pair(BERT)
    call, shapes = packed.batch(BERT, "right"), []
    hook = fast.bert.encoder.layer[1].intermediate.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    packed.hold(plain, fast, call, (True,))
    hook.remove()
    packed.hold(plain, fast, call)
    assert shapes == [(3, 9, 40)] and report.padded_calls.reasons == {HOOK.format("BertIntermediate"): 1}


@pytest.mark.parametrize("kind", [bert.BertIntermediate, bert.BertOnlyMLMHead, bert.BertModel])
def test_a_class_of_transformers_that_is_patched(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    (plain, fast, report), call, forward = packed.pair(BERT), packed.batch(BERT, "right"), kind.forward
    packed.hold(plain, fast, call)
    assert not report.padded_calls.reasons

    def mixing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = forward(self, *args, **kwargs)
        hidden = made if isinstance(made, Tensor) else made[0]
        hidden.data.sub_(hidden.data.mean(1, keepdim=True))
        return made

    monkeypatch.setattr(kind, "forward", mixing)
    packed.hold(plain, fast, call)
    assert report.padded_calls.reasons


def test_a_mask_function_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast, report = packed.pair(LLAMA)

    def bidirectional(**given: Any) -> Any:
        return masking_utils.create_bidirectional_mask(given["config"], given["inputs_embeds"], given["attention_mask"])

    monkeypatch.setattr(llama, "create_causal_mask", bidirectional)
    packed.hold(plain, fast, packed.batch(LLAMA, "right"), use_cache=False)
    assert list(report.padded_calls.reasons) == ["a function that makes its masks was replaced"]


def test_an_empty_row_of_an_encoder_that_is_called_alone() -> None:
    plain, fast, report = packed.pair(BART)
    given = packed.batch(BART, "a whole row").given
    ids, mask = given["input_ids"], given["attention_mask"]
    decoder, found = torch.tensor([[1, 5, 6]] * 3), []
    for model in (fast.eval(), plain.eval()):
        states = model.get_encoder()(input_ids=ids, attention_mask=mask)
        found.append(model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=decoder).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert list(report.padded_calls.reasons) == ["a row of the encoder has no token"]


def test_a_mask_that_is_added_to_the_scores() -> None:
    plain, fast, report = packed.pair(BERT)
    hidden = torch.randn(1, packed.LENGTH, plain.config.hidden_size)
    mask = (torch.arange(packed.LENGTH) > 5).float()[None] * -1e9
    ours, theirs = (model.bert.encoder(hidden, attention_mask=mask)[0] for model in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert list(report.padded_calls.reasons) == ["its mask is a tensor, not padding or look-ahead"]


def test_a_reason_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    (_, fast, _), given = packed.pair(BERT), packed.batch(BERT, "right").given
    for _ in range(2):
        fast(**given, output_attentions=True)
        fast(**given)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "transformer_fast"]
    reason = "attention weights are requested (output_attentions)"
    assert said == [("WARNING", f"packed=True: a batch runs with its padding: {reason}")]
