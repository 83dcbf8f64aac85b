"""``accelerate(model, packed=True)`` on models that a user derived from those of transformers, or put into own
modules: the code of the user reads zeros at padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402
from accelerated import pair  # noqa: E402
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
    (plain, fast, report), call = pair(made(kind, like), packed=True), packed.batch(like, "right")
    zeros_at_padding(plain, call.given["attention_mask"].bool())
    packed.hold(plain, fast, call, (True, False, True))
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
    plain, fast, report = pair(made(type("Mine", (getattr(transformers, like),), methods), like), packed=True)
    call = packed.batch(like, "right")
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    packed.hold(plain, fast, call, (True, False, True))
    assert not report.padded_calls.reasons
    assert "these layers skip" in report.explain(call.given)


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
        packed.hold(plain, fast, call, (True, False, True))
        assert not report.padded_calls.reasons and not fast.encoder(**call.given)[0][~call.tokens].any()
        assert "what the code of Mean reads of the stacks inside is 0 at padding" in report.notes
        report.undo()
        packed.hold(plain, fast, call, (True, False, True))
        assert fast.encoder(**call.given)[0][~call.tokens].any()


def test_a_cache_that_a_derived_class_reads_is_there() -> None:
    class Cached(transformers.LlamaForCausalLM):
        def forward(self, **given: Any) -> Any:
            output = super().forward(**given)
            return {"loss": output.loss, "rows": output.past_key_values.layers[0].keys.amax(2)}

    plain, fast, _ = pair(made(Cached, "LlamaForCausalLM", use_cache=True), packed=True)
    call = packed.batch("LlamaForCausalLM", "right")
    packed.hold(plain, fast, call, (True, False, True))


def test_no_call_runs_twice_and_its_error_is_raised() -> None:
    (_, model, report), call, runs = packed.pair("BertForMaskedLM"), packed.batch("BertForMaskedLM", "right"), []

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
