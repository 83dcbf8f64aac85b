"""``accelerate(model, packed=True)`` on models that a user derived or changed: each call equals the plain model."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from transformers.models.bart.modeling_bart import BartEncoder  # noqa: E402
from transformers.models.bert import modeling_bert as bert  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Stack  # noqa: E402

import transformer_fast as tfast  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
Change = Callable[[nn.Module], None]


class BiLSTM(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(config.hidden_size, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.lstm(hidden)[0])


class Convolution(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(config.hidden_size, 2, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.mT).mT.contiguous()


def tagger(head: type[nn.Module]) -> type[nn.Module]:
    class Tagger(transformers.BertPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert = transformers.BertModel(config, add_pooling_layer=False)
            self.classifier = head(config)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.classifier(self.bert(input_ids, attention_mask).last_hidden_state)
            loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten() % 2)
            return {"loss": loss, "logits": logits}

    return Tagger


def derived(base: str, change: Callable[[Any, dict[str, Any]], Any], method: str = "forward") -> type[nn.Module]:
    """Class derived from one of transformers, whose forward, or another method, changes the output."""
    kind = type("Derived", (getattr(transformers, base),), {})

    def changed(self: nn.Module, **given: Any) -> Any:
        return change(getattr(super(kind, self), method)(**given), given)

    setattr(kind, method, changed)
    return kind


def own_loss(output: Any, given: dict[str, Any]) -> Any:
    labels = given["labels"]
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.clamp(min=0).flatten())
    return {"loss": loss, "logits": output.logits}


def splade(output: Any, given: dict[str, Any]) -> Any:
    rows = (1 + output.logits.relu()).log().amax(1)
    return {"loss": rows.square().mean() + output.loss, "rows": rows}


def reward(output: Any, given: dict[str, Any]) -> Any:
    last = output.logits[torch.arange(3), given["attention_mask"].sum(1) - 1, :1]
    return {"loss": last.square().mean(), "rows": last, "mean": output.logits.mean(1)}


def pooled(output: Any, given: dict[str, Any]) -> Any:
    rows = output[0].amax(1)
    return {"loss": rows.square().mean(), "rows": rows}


DERIVED: dict[str, tuple[str, type[nn.Module], str]] = {
    "a BiLSTM": ("BertForMaskedLM", tagger(BiLSTM), "ForTokenClassification"),
    "a convolution": ("BertForMaskedLM", tagger(Convolution), "ForTokenClassification"),
    "a loss of BERT": ("BertForMaskedLM", derived("BertForMaskedLM", own_loss), "ForMaskedLM"),
    "SPLADE": ("BertForMaskedLM", derived("BertForMaskedLM", splade), "ForMaskedLM"),
    "a call": ("BertForMaskedLM", derived("BertForMaskedLM", splade, "__call__"), "ForMaskedLM"),
    "a loss of Llama": ("LlamaForCausalLM", derived("LlamaForCausalLM", own_loss), "ForCausalLM"),
    "a reward": ("LlamaForCausalLM", derived("LlamaForCausalLM", reward), "ForCausalLM"),
    "a loss of BART": (
        "BartForConditionalGeneration", derived("BartForConditionalGeneration", own_loss), "ForConditionalGeneration",
    ),
    "pooling of T5": ("T5EncoderModel", derived("T5EncoderModel", pooled), "ForSequenceClassification"),
    "pooling of BERT": ("BertModel", derived("BertModel", pooled), "ForSequenceClassification"),
}  # fmt: skip
"""Name of a class whose config and batch serve, the class, and an ending that transformers gives such classes."""


def made(kind: type[nn.Module], like: str, *, use_cache: bool = False) -> nn.Module:
    """Return a tiny model of a class, with large weights and without dropout."""
    torch.manual_seed(0)
    config = packed.make(like).config
    config.use_cache = use_cache  # a class of a user leaves the cache to the config
    return packed.with_large_weights(kind(config))


def hold(plain: nn.Module, fast: nn.Module, call: packed.Batch) -> None:
    for training in (True, False, True):
        packed.close(*(packed.step(model.train(training), call) for model in (fast, plain)))


def zeros_at_padding(model: nn.Module, tokens: Tensor) -> None:
    """Set the outputs of the stacks of a plain model to 0 at padding."""

    def zeros(module: nn.Module, args: Any, output: Any) -> Any:
        if output[0].shape[:2] == tokens.shape:
            output["last_hidden_state"] = output[0] * tokens[..., None]
        return output

    for module in list(model.modules()):
        if isinstance(module, (bert.BertEncoder, transformers.LlamaModel, T5Stack, BartEncoder)):
            module.register_forward_hook(zeros)


@pytest.mark.parametrize("named", ["as the user likes", "as transformers does"])
@pytest.mark.parametrize("what", DERIVED)
def test_code_around_a_stack_reads_zeros_at_padding(what: str, named: str) -> None:
    like, kind, ending = DERIVED[what]
    kind = type(kind.__name__ + (ending if "transformers" in named else ""), (kind,), {})
    plain, call = made(kind, like), packed.batch(like, "right")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    zeros_at_padding(plain, call.given["attention_mask"].bool())
    hold(plain, fast, call)
    assert not report.padded_calls.reasons
    (note,) = (note for note in report.notes if "at padding" in note)
    assert note == f"what the code of {kind.__name__} reads of the stacks inside is 0 at padding"


def nothing(model: nn.Module) -> None:
    pass


SAFE: dict[str, tuple[str, dict[str, Any], Change]] = {
    "a class with a new name": ("BertForMaskedLM", {}, nothing),
    "a class with more methods": (
        "LlamaForCausalLM", {"training_step": nothing, "_init_weights": lambda self, module: None}, nothing,
    ),
    "a class with a constructor": (
        "BartForConditionalGeneration",
        {"__init__": lambda self, config: transformers.BartForConditionalGeneration.__init__(self, config)},
        nothing,
    ),
    "a head of linear layers": (
        "BertForTokenClassification",
        {},
        lambda m: setattr(m, "classifier", nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAFE)
def test_a_class_that_leaves_padding_alone_skips_it(what: str) -> None:
    like, methods, change = SAFE[what]
    plain, call = made(type("Mine", (getattr(transformers, like),), methods), like), packed.batch(like, "right")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    hold(plain, fast, call)
    assert not report.padded_calls.reasons
    assert "these layers skip" in report.explain(call.given)


class Mixing(nn.Module):
    """A module that stands in the place of another one and reads all positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(hidden - hidden.mean(1, keepdim=True), *args, **kwargs)


def put(path: str, make: Callable[[nn.Module], nn.Module] = Mixing) -> Change:
    return lambda model: model.set_submodule(path, make(model.get_submodule(path)))


def patched(path: str) -> Change:
    """Replace the forward of one module."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda x, *args, **kwargs: forward(x - x.mean(1, keepdim=True), *args, **kwargs)

    return change


def of_a_class(path: str) -> Change:
    """Give a module a class derived from its own."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        base = type(module)

        class Own(base):
            def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
                return super().forward(x - x.mean(1, keepdim=True), *args, **kwargs)

        module.__class__ = Own

    return change


def hooked(path: str) -> Change:
    return lambda model: (
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args: (args[0] - args[0].mean(1, keepdim=True), *args[1:])
        )
        and None
    )


def loss_of(model: nn.Module) -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())

    model.loss_function = loss


CHANGED: dict[str, tuple[str, Change]] = {
    "a classifier": ("BertForTokenClassification", put("classifier")),
    "a convolution": (
        "BertForTokenClassification",
        put("classifier", lambda old: nn.Sequential(Convolution(types.SimpleNamespace(hidden_size=32)))),
    ),
    "a convolution of torch": (
        "BertForTokenClassification",
        put("classifier", lambda old: nn.Sequential(nn.AvgPool1d(3, 1, 1), nn.Conv1d(9, 9, 1), old)),
    ),
    "a pooler": ("BertForSequenceClassification", put("bert.pooler")),
    "a last norm": ("LlamaForCausalLM", put("model.norm")),
    "an output layer": ("LlamaForCausalLM", put("lm_head")),
    "the class of an output layer": ("LlamaForCausalLM", of_a_class("lm_head")),
    "the forward of an output layer": ("BertForMaskedLM", patched("cls.predictions.transform")),
    "an encoder": ("BertForMaskedLM", put("bert.encoder")),
    "a loss": ("LlamaForCausalLM", loss_of),
    "a layer": ("BertForMaskedLM", put("bert.encoder.layer.1")),
    "the class of a layer": ("BertForMaskedLM", of_a_class("bert.encoder.layer.1")),
    "an attention": ("BertForMaskedLM", put("bert.encoder.layer.1.attention.self")),
    "the class of an attention": ("LlamaForCausalLM", of_a_class("model.layers.0.mlp")),
    "a forward inside a layer": ("T5ForConditionalGeneration", patched("encoder.block.0.layer.1")),
    "a hook in front of a layer": ("BertForMaskedLM", hooked("bert.encoder.layer.1")),
    "a hook in front of the head": ("BertForMaskedLM", hooked("cls")),
    "a hook inside a layer": ("BartForConditionalGeneration", hooked("model.encoder.layers.0.fc1")),
}  # fmt: skip


@pytest.mark.parametrize("copied", [False, True], ids=["", "of a copy"])
@pytest.mark.parametrize("what", CHANGED)
def test_a_module_that_is_replaced_after_accelerate_is_seen(what: str, copied: bool) -> None:
    name, change = CHANGED[what]
    settings = {"decoder_start_token_id": 1} if name.startswith("T5") else {}
    plain, call = packed.make(name, **settings), packed.batch(name, "right")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    fast = pickle.loads(pickle.dumps(fast)) if copied else fast
    hold(plain, fast, call)
    report.padded_calls.reasons.clear()
    fast.__dict__["_without_padding"] = report.padded_calls
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    hold(plain, fast, call)
    assert report.padded_calls.reasons


def test_a_layer_that_was_changed_is_looked_at_in_each_call() -> None:
    plain, call = packed.make("BertForMaskedLM"), packed.batch("BertForMaskedLM", "right")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    for model in (plain, fast):
        torch.manual_seed(1)
        put("bert.encoder.layer.1.output.dense", lambda old: nn.Sequential(old, nn.Linear(32, 32)))(model)
    hold(plain, fast, call)
    assert not report.padded_calls.reasons
    for model in (plain, fast):
        put("bert.encoder.layer.0.output.dense")(model)
    hold(plain, fast, call)
    assert list(report.padded_calls.reasons) == ["a Mixing inside is not known; it may read padding"]


def test_a_class_of_transformers_that_is_patched_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = packed.batch("BertForMaskedLM", "right")
    for kind in (bert.BertIntermediate, bert.BertOnlyMLMHead, bert.BertModel):
        plain = packed.make("BertForMaskedLM")
        fast = copy.deepcopy(plain)
        report = tfast.accelerate(fast, packed=True)
        hold(plain, fast, call)
        assert not report.padded_calls.reasons
        forward = kind.forward

        def mixing(self: nn.Module, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            made = forward(self, *args, **kwargs)
            hidden = made if isinstance(made, Tensor) else made[0]
            hidden.data.sub_(hidden.data.mean(1, keepdim=True))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", mixing)
            hold(plain, fast, call)
        assert report.padded_calls.reasons


def test_a_model_inside_of_another_module_is_packed() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = packed.make("DistilBertModel")

        def forward(self, **given: Tensor) -> dict[str, Tensor]:
            hidden, keep = self.encoder(**given).last_hidden_state, given["attention_mask"]
            return {"rows": (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)}

    plain, call = Mean(), packed.batch("DistilBertModel", "right")
    for wrap in (nn.ModuleList, nn.Sequential, lambda models: models[0]):
        fast = copy.deepcopy(plain)
        root = wrap([fast]) if wrap is not nn.Sequential else nn.Sequential(fast)
        report = tfast.accelerate(root, packed=True)
        hold(plain, fast, call)
        assert not report.padded_calls.reasons and not fast.encoder(**call.given)[0][~call.tokens].any()
        assert "what the code of Mean reads of the stacks inside is 0 at padding" in report.notes
        report.undo()
        hold(plain, fast, call)
        assert fast.encoder(**call.given)[0][~call.tokens].any()


def test_a_cache_that_a_derived_class_reads_is_there() -> None:
    class Cached(transformers.LlamaForCausalLM):
        def forward(self, **given: Any) -> Any:
            output = super().forward(**given)
            return {"loss": output.loss, "rows": output.past_key_values.layers[0].keys.amax(2)}

    plain, call = made(Cached, "LlamaForCausalLM", use_cache=True), packed.batch("LlamaForCausalLM", "right")
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast, packed=True)
    hold(plain, fast, call)


def test_no_call_runs_twice_and_its_error_is_raised() -> None:
    call, runs = packed.batch("BertForMaskedLM", "right"), []
    model = packed.make("BertForMaskedLM")
    report = tfast.accelerate(model, packed=True)

    def count(*_: Any) -> None:
        runs.append(1)

    count.__module__ = "torch.distributed.count"  # its hooks read no padding
    model.bert.embeddings.register_forward_hook(count)
    for _ in range(2):
        with pytest.raises(IndexError, match="Target 5000"):
            model(**call.given | {"labels": call.given["labels"].masked_fill(call.tokens, 5000)})
        assert len(runs) == 1
        runs.clear()
        model(**call.given)
        runs.clear()
    assert not report.padded_calls.reasons
