"""accelerate on models of transformers: their attention is redirected in this model only."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerated import kinds, pair, seems_on_gpu, seen
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers", minversion="5")
import huggingface_models as models  # noqa: E402
from huggingface_blocks import case, given  # noqa: E402

from transformer_fast.huggingface.interface import OWN_ATTENTION  # noqa: E402

NAME = "transformer_fast"
OURS = {"eager": f"{NAME}_eager", "sdpa": f"{NAME}_sdpa"}
NOW = {kind: f"attn_implementation={name}" for kind, name in OURS.items()}
ENCODER, DECODER = "model.encoder", "model.decoder"
PARTS: dict[str, dict[str, str]] = {  # the parts of a model that get our attention, with their classes
    "BertForMaskedLM": {"bert": "BertModel"},
    "MarianMTModel": {ENCODER: "MarianEncoder", DECODER: "MarianDecoder"},
    "GPT2LMHeadModel": {"transformer": "GPT2Model"},
    "T5ForConditionalGeneration": {"encoder": "T5Stack", "decoder": "T5Stack"},
    "WhisperForConditionalGeneration": {ENCODER: "WhisperEncoder", DECODER: "WhisperDecoder"},
    "ViTForImageClassification": {"vit": "ViTModel"},
    "GptOssForCausalLM": {"model": "GptOssModel"},
    "BloomForCausalLM": {},
    "EncoderDecoderModel+Bert+XGLM": {"encoder": "BertModel"},
}
BERT = "BertForMaskedLM"


def make(name: str, implementation: str | None = None) -> nn.Module:
    return models.scattered(models.make(case(name), implementation), std=0.3)


def assert_same(fast: nn.Module, model: nn.Module, name: str) -> None:
    """Assert that logits and gradients agree."""
    ours, theirs = (models.outcome(m, given(name)) for m in (fast, model))
    if "attention_mask" in given(name) and "decoder_input_ids" not in given(name):
        for found in (ours, theirs):
            found["logits"] = found["logits"][given(name)["attention_mask"] == 1]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def calls_of(model: nn.Module, name: str) -> list[str]:
    """Return the attention implementation that ran in a call, once per layer."""
    with torch.no_grad():
        return seen(lambda: model(**given(name)))


def configs(model: nn.Module) -> list[transformers.PretrainedConfig]:
    """Return every config that a module holds."""
    return [v for m in model.modules() for v in vars(m).values() if isinstance(v, transformers.PretrainedConfig)]


def implementations(model: nn.Module) -> list[str]:
    """Return the implementation of every config that a module holds, and of the configs inside these."""
    held = configs(model)
    held += [v for c in held for v in vars(c).values() if isinstance(v, transformers.PretrainedConfig)]
    return [config._attn_implementation for config in held]


@pytest.mark.parametrize("name", PARTS)
def test_every_model(name: str) -> None:
    """Compare outputs and gradients, the attention that ran, the report, a second call, and undo."""
    model, fast, report = pair(make(name))
    parts, before = PARTS[name], implementations(model)
    first = "eager" if "GptOss" in name else "sdpa"
    rows = {row.path: row.was for row in report.swapped if row.now == NOW[first]}
    assert rows == {path: f"{kind} ({first})" for path, kind in parts.items()}
    assert_same(fast, model, name)
    calls = calls_of(fast, name)
    assert set(calls) == ({"ours"} if parts else set()) and "ours" not in calls_of(model, name)
    assert implementations(model) == before
    again = tfast.accelerate(fast)
    already = {row.path: row.was for row in again.already if NAME in row.was}
    assert not again.swapped and already == {path: f"{kind} ({OURS[first]})" for path, kind in parts.items()}
    again.undo()
    assert calls_of(fast, name) == calls
    report.undo()
    assert implementations(fast) == before and "ours" not in calls_of(fast, name)
    assert kinds(fast) == kinds(model)


@pytest.mark.parametrize(("name", "path", "kind"), [
    ("BloomForCausalLM", "transformer", "Bloom"), ("EncoderDecoderModel+Bert+XGLM", "decoder.model", "XGLM"),
])  # fmt: skip
def test_what_would_be_refused_is_named_with_the_reason(name: str, path: str, kind: str) -> None:
    _, fast, report = pair(make(name))
    (row,) = [row for row in report.left if row.path == path and f"{kind}Model (" in row.was]
    assert row.why == OWN_ATTENTION
    assert fast.get_submodule(path).config._attn_implementation == "eager"
    if hasattr(fast, "encoder"):
        assert fast.encoder.config._attn_implementation == fast.config.encoder._attn_implementation == OURS["sdpa"]
        assert fast.encoder.config is fast.config.encoder and fast.decoder.config is fast.config.decoder


def test_a_model_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention is ours on a GPU too, and the dropout stays torch's."""
    model, fast = make(BERT), make(BERT)
    seems_on_gpu(seems_on_gpu(fast, monkeypatch).bert, monkeypatch)
    report = tfast.accelerate(fast)
    assert {row.path: row.was for row in report.swapped if row.now == NOW["sdpa"]} == {"bert": "BertModel (sdpa)"}
    assert any(row.was == "nn.Dropout" and "not measured on a GPU" in row.why for row in report.left)
    assert calls_of(fast, BERT) == ["ours"] * 2 and calls_of(model, BERT) == ["torch"] * 2


def test_models_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on the meta device, with an attention that the user chose, and on a GPU those that the kernels do not
    take."""
    with torch.device("meta"):
        meta = transformers.BertForMaskedLM(models.config_of(case(BERT)))
    chosen, double = make(BERT), make(BERT)
    chosen.config._attn_implementation_internal = "flex_attention"
    seems_on_gpu(double.bert, monkeypatch, torch.float64)
    wide = models.make(case(BERT), hidden_size=640, num_attention_heads=2)
    seems_on_gpu(wide.bert, monkeypatch)
    for model, was, why in (
        (meta, "sdpa", "meta device"),
        (chosen, "flex_attention", 'attn_implementation="flex_attention" was chosen'),
        (double, "sdpa", "the GPU kernels take float32, float16 and bfloat16"),
        (wide, "sdpa", "its head_dim is 320, and the kernels take up to 256 on a GPU"),
    ):
        (row,) = [row for row in tfast.accelerate(model).left if row.path == "bert"]
        assert row.was == f"BertModel ({was})" and why in row.why and set(implementations(model)) == {was}


def test_two_models_of_one_config() -> None:
    config = models.config_of(case(BERT))
    one, other = transformers.BertForMaskedLM(config).eval(), transformers.BertForMaskedLM(config).eval()
    report = tfast.accelerate(one)
    assert calls_of(one, BERT) == ["ours"] * 2 and calls_of(other, BERT) == ["torch"] * 2
    assert other.config is config and one.config is not config and config._attn_implementation == "sdpa"
    assert len(configs(one)) > 2 and {id(held) for held in configs(one)} == {id(one.config)}
    report.undo()
    assert one.config is config and calls_of(one, BERT) == ["torch"] * 2


@pytest.mark.parametrize(("name", "path", "calls"), [
    (BERT, "bert.encoder", 2), ("T5ForConditionalGeneration", "decoder", 4),
    ("GPT2LMHeadModel", "transformer.h.0.attn", 1),
])  # fmt: skip
def test_a_part_of_a_model(name: str, path: str, calls: int) -> None:
    """The part runs on our attention, with the masks that the rest of the model makes for it."""
    model = make(name)
    fast = copy.deepcopy(model)
    part = fast.get_submodule(path)
    report = tfast.accelerate(part)
    assert [row.path for row in report.swapped if row.now == NOW["sdpa"]] == [""]
    assert fast.config._attn_implementation == "sdpa" and part.config._attn_implementation == OURS["sdpa"]
    assert calls_of(fast, name).count("ours") == calls
    assert_same(fast, model, name)
    tfast.accelerate(fast)
    assert set(implementations(fast)) == {OURS["sdpa"]}
    assert_same(fast, model, name)


class Sentences(nn.Module):
    """Module that holds models of transformers and has its own config."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.bloom, self.image = map(make, (BERT, "BloomForCausalLM", "ViTForImageClassification"))
        self.config = self.text.config

    def forward(self, text: dict[str, Tensor], image: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.text(**text)[0].mean(), self.bloom(**text)[0].mean(), self.image(**image)[0].mean()])


def test_a_module_that_holds_models_of_transformers() -> None:
    model, fast, report = pair(Sentences())
    assert {row.path for row in report.swapped if row.now == NOW["sdpa"]} == {"text.bert", "image.vit"}
    assert fast.config is fast.text.config and OWN_ATTENTION in {row.why for row in report.left}
    arguments = given(BERT), given("ViTForImageClassification")
    torch.testing.assert_close(fast(*arguments), model(*arguments))
    assert seen(lambda: fast(*arguments)) == ["ours"] * 4
    report.undo()
    assert "ours" not in seen(lambda: fast(*arguments))


def test_modes_and_a_change_of_mind() -> None:
    """The config stays the model's own: set_attn_implementation and train change it, undo restores it."""
    model, fast, report = pair(models.make(case(BERT), hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
    fast.train()
    assert not torch.equal(fast(**given(BERT))[0], fast(**given(BERT))[0])
    fast.eval().set_attn_implementation("eager")
    assert not calls_of(fast, BERT) and set(implementations(model)) == {"sdpa"}
    fast.set_attn_implementation(NAME)
    assert calls_of(fast, BERT) == ["ours"] * 2
    report.undo()
    assert set(implementations(fast)) == {"sdpa"}


def test_a_packed_decoder_that_is_not_causal_keeps_the_padding_of_the_source() -> None:
    """Only the source has padding, and the decoder's mask is left out."""
    model = make("MarianMTModel")
    for layer in model.model.decoder.layers:
        layer.self_attn.is_causal = False
    _, fast, report = pair(model, packed=True)
    assert_same(fast, model, "MarianMTModel")
    assert list(report.padded_calls.reasons) == ["a layer of the decoder is not causal"]


def test_code_that_asks_for_sdpa_by_name_always_gets_a_mask() -> None:
    """Gemma 4 drops queries of its last layers, unless the mask of "sdpa" is left out."""
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": kinds}
    model, fast, report = pair(models.scattered(models.make(case("Gemma4ForCausalLM"), **settings), std=0.3))
    assert f"attn_implementation={NAME}" in {row.now for row in report.swapped}
    assert set(implementations(fast)) == {NAME}
    ids = torch.randint(4, 40, (2, 7))
    ours, theirs = (m(input_ids=ids, use_cache=False, logits_to_keep=3).logits for m in (fast, model))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("name", [BERT, "GPT2LMHeadModel", "MarianMTModel", "T5ForConditionalGeneration"])
def test_transforms_of_torch_func(name: str, implementation: str, packed: bool) -> None:
    """Gradients, gradients of gradients, tangents and batches of models are those of the plain model."""
    model = make(name, implementation)
    fast = copy.deepcopy(model)
    tfast.accelerate(fast, packed=packed)
    options = given(name) | ({} if name == BERT else {"use_cache": False})
    results = []
    for each in (fast, model):
        weights = {key: p.detach() for key, p in each.named_parameters()}

        def loss(weights: dict[str, Tensor], each: nn.Module = each) -> Tensor:
            return torch.func.functional_call(each, weights, (), options).logits.square().mean()

        found = [torch.func.grad(loss)(weights)]
        if implementation == "eager":  # torch's own attention on a CPU has no other rules
            found.append(torch.func.jvp(loss, (weights,), (weights,)))
            found.append(
                torch.func.grad(lambda w: sum(g.square().sum() for g in torch.func.grad(loss)(w).values()))(weights)
            )
        several = {key: torch.stack([p, 1.1 * p]) for key, p in weights.items()}
        found.append(torch.func.vmap(loss)(several))
        results.append(found)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-3)
