"""accelerate on models of Hugging Face transformers: attention through their interface, inside of one model alone."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_fast as tfast
from transformer_fast.integrations import dispatch

transformers = pytest.importorskip("transformers", minversion="5")

NAME = "transformer_fast"
NOW = f"attn_implementation={NAME}"
ALREADY = "it runs on the fused ops already"
IDS = torch.tensor([[5, 6, 7, 8, 9], [4, 8, 3, 0, 0]])
KEEP = (IDS != 0).long()
TEXT = {"input_ids": IDS, "attention_mask": KEEP}
BOTH = TEXT | {"decoder_input_ids": IDS[:, :4]}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)}
SOUND = {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), "decoder_input_ids": IDS[:, :4]}

SIZES = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
BERT = SIZES | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SEQ2SEQ = SIZES | {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = SIZES | {
    "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 2,
}  # fmt: skip
GPT2 = SIZES | {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32}
GPT_OSS = BERT | {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
BLOOM = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 4}
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
XGLM = SIZES | {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 4, "add_cross_attention": True}
WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}


def two_parts() -> Any:
    configs = transformers.BertConfig(**BERT), transformers.XGLMConfig(**XGLM, is_decoder=True)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    both.decoder_start_token_id, both.pad_token_id = 2, 0
    return both


# how the model is made, its arguments, and the parts on our attention with their classes
Case = tuple[Callable[[], Any], dict[str, Tensor], dict[str, str]]
CASES: dict[str, Case] = {
    "Bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)), TEXT, {"bert": "BertModel"},
    ),
    "Marian": (
        lambda: transformers.MarianMTModel(transformers.MarianConfig(**SEQ2SEQ)), BOTH,
        {"model.encoder": "MarianEncoder", "model.decoder": "MarianDecoder"},
    ),
    "GPT2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), TEXT, {"transformer": "GPT2Model"},
    ),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), BOTH,
        {"encoder": "T5Stack", "decoder": "T5Stack"},
    ),
    "Whisper": (
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)), SOUND,
        {"model.encoder": "WhisperEncoder", "model.decoder": "WhisperDecoder"},
    ),
    "ViT": (lambda: transformers.ViTModel(transformers.ViTConfig(**VISION)), IMAGES, {"": "ViTModel"}),
    "GPT-OSS": (
        lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)), TEXT, {"model": "GptOssModel"},
    ),
    "Bloom": (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM)), TEXT, {}),
    "EncoderDecoder": (
        lambda: transformers.EncoderDecoderModel(two_parts()), BOTH, {"encoder": "BertModel"},
    ),
}  # fmt: skip
DECODERS = ["Marian", "GPT2", "T5", "GPT-OSS", "Bloom", "EncoderDecoder"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = CASES[name][0]().eval()
    for parameter in trained(model):  # the usual 0.02 would leave all scores at zero
        nn.init.normal_(parameter, std=0.3)
    return model


def pair(name: str) -> tuple[Any, Any, tfast.accelerate.Report]:
    """A model, its accelerated copy, and the report."""
    model = make(name)
    fast = copy.deepcopy(model)
    return model, fast, tfast.accelerate(fast)


def outcome(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """The outputs at tokens that are no padding, and all gradients."""
    out = model(**given)[0]
    if "decoder_input_ids" not in given and "attention_mask" in given:
        out = out[given["attention_mask"] == 1]
    grads = torch.autograd.grad(out.square().mean(), trained(model), allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


class Seen(TorchDispatchMode):
    """How often our attention, and torch's, ran forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.torchs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "backward" not in str(func):
            self.ours += "transformer_fast.attention" in str(func)
            self.torchs += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


def seen(model: nn.Module, given: dict[str, Tensor]) -> Seen:
    with Seen() as found, torch.no_grad():
        model(**given)
    return found


def implementations(model: nn.Module) -> list[str]:
    """The implementation of every config that a module holds, and of those inside it."""
    configs = [v for m in model.modules() for v in vars(m).values() if isinstance(v, transformers.PretrainedConfig)]
    for config in configs:
        configs.extend(v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig))
    return [config._attn_implementation for config in configs]


def layers_of(model: nn.Module) -> int:
    return sum("Attention" in type(m).__name__ and hasattr(m, "config") for m in model.modules())


@pytest.mark.parametrize("name", CASES)
def test_every_model(name: str) -> None:
    """Outputs and gradients, whose attention ran, what the report says, a second time, and undo."""
    _, given, parts = CASES[name]
    model, fast, report = pair(name)
    before = implementations(model)
    rows = {row.path: row.was for row in report.swapped if row.now == NOW}
    assert rows == {path: f"{kind} ({'eager' if name == 'GPT-OSS' else 'sdpa'})" for path, kind in parts.items()}
    torch.testing.assert_close(outcome(fast, given), outcome(model, given), atol=1e-4, rtol=1e-3)
    found = seen(fast, given)
    assert bool(found.ours) == bool(parts) and not found.torchs and seen(model, given).ours == 0
    assert implementations(model) == before
    again = tfast.accelerate(fast)
    assert not again.swapped
    assert {row.path: row.was for row in again.already if NAME in row.was} == {
        path: f"{kind} ({NAME})" for path, kind in parts.items()
    }
    again.undo()
    assert seen(fast, given).ours == found.ours
    report.undo()
    assert implementations(fast) == before and seen(fast, given).ours == 0
    assert [type(m) for m in fast.modules()] == [type(m) for m in model.modules()]


def test_what_would_be_refused_is_named_with_the_reason() -> None:
    expected = {"Bloom": ("transformer", "BloomModel"), "EncoderDecoder": ("decoder.model", "XGLMModel")}
    for name, (path, kind) in expected.items():
        _, fast, report = pair(name)
        layer = kind.replace("Model", "Attention")
        (row,) = [row for row in report.left if row.path == path and f"{kind} (" in row.was]
        assert f"its {layer} computes attention or uses masks by itself" in row.why
        assert fast.get_submodule(path).config._attn_implementation != NAME
    assert fast.encoder.config._attn_implementation == fast.config.encoder._attn_implementation == NAME
    assert fast.encoder.config is fast.config.encoder and fast.decoder.config is fast.config.decoder


def test_a_name_that_somebody_chose_stays() -> None:
    model = make("Bert")
    model.config._attn_implementation_internal = "flex_attention"
    (row,) = [row for row in tfast.accelerate(model).left if row.path == "bert"]
    assert row.was == "BertModel (flex_attention)" and 'attn_implementation="flex_attention" was chosen' in row.why
    assert model.config._attn_implementation == "flex_attention"


def test_on_the_meta_device_it_waits() -> None:
    with torch.device("meta"):
        model = CASES["Bert"][0]()
    (row,) = [row for row in tfast.accelerate(model).left if row.path == "bert"]
    assert "meta device" in row.why and set(implementations(model)) == {"sdpa"}


def test_two_models_of_one_config() -> None:
    config = transformers.BertConfig(**BERT)
    one, other = transformers.BertModel(config).eval(), transformers.BertModel(config).eval()
    report = tfast.accelerate(one)
    assert seen(one, TEXT).ours == 2 and seen(other, TEXT).ours == 0
    assert other.config is config and one.config is not config and config._attn_implementation == "sdpa"
    held = [v for m in one.modules() for v in vars(m).values() if isinstance(v, transformers.PretrainedConfig)]
    assert len(held) > 2 and {id(v) for v in held} == {id(one.config)}
    report.undo()
    assert one.config is config and seen(one, TEXT).ours == 0


def test_a_part_of_a_model() -> None:
    """The part computes on ours, under the masks that the rest of the model makes for it."""
    for name, path in (("Bert", "bert.encoder"), ("T5", "decoder"), ("GPT2", "transformer.h.0.attn")):
        _, given, _ = CASES[name]
        model = make(name)
        fast = copy.deepcopy(model)
        part = fast.get_submodule(path)
        report = tfast.accelerate(part)
        assert [row.path for row in report.swapped if row.now == NOW] == [""]
        assert fast.config._attn_implementation == "sdpa" and part.config._attn_implementation == NAME
        assert seen(fast, given).ours == (1 if name == "GPT2" else 2)
        torch.testing.assert_close(outcome(fast, given), outcome(model, given), atol=1e-4, rtol=1e-3)
        tfast.accelerate(fast)
        assert set(implementations(fast)) == {NAME}
        torch.testing.assert_close(outcome(fast, given), outcome(model, given), atol=1e-4, rtol=1e-3)


class Sentences(nn.Module):
    """A module that holds models of transformers, with a config of its own to look into."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.bloom = (make(name) for name in ("Bert", "ViT", "Bloom"))
        self.config = self.text.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        words = (self.text(**given)[0], self.bloom(**given)[0], self.image(pixel_values)[0])
        return torch.stack([part.mean() for part in words])


def test_a_module_that_holds_models_of_transformers() -> None:
    model = Sentences()
    fast = copy.deepcopy(model)
    report = tfast.accelerate(fast)
    assert {row.path for row in report.swapped if row.now == NOW} == {"text.bert", "image"}
    assert fast.config is fast.text.config and "its BloomAttention" in str(report)
    given = TEXT | IMAGES
    torch.testing.assert_close(fast(**given), model(**given))
    assert seen(fast, given).ours == 3
    report.undo()
    assert seen(fast, given).ours == 0


def test_copies_pickles_and_saved_models(tmp_path: Path) -> None:
    for name in ("Bert", "Marian"):
        given = CASES[name][1]
        model, fast, _ = pair(name)
        buffer = io.BytesIO()
        torch.save(fast, buffer)
        buffer.seek(0)
        expected = fast(**given)[0]
        calls = seen(fast, given).ours
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(buffer, weights_only=False)):
            assert torch.equal(twin(**given)[0], expected) and seen(twin, given).ours == calls > 0
            assert twin.config is not fast.config
        fast.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / f"{name}-before")
        written, before = ((tmp_path / folder / "config.json").read_text() for folder in (name, f"{name}-before"))
        assert written == before
        loaded = type(model).from_pretrained(tmp_path / name)
        assert implementations(loaded)[0] == "sdpa" and seen(loaded, given).ours == 0
        torch.testing.assert_close(loaded(**given)[0], model(**given)[0])


@pytest.mark.parametrize("name", DECODERS)
def test_generation(name: str) -> None:
    model, fast, _ = pair(name)
    ids = IDS.flip(1) if name in ("GPT2", "GPT-OSS", "Bloom") else IDS  # padding on the left
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 4, "do_sample": False}
    for options in ({}, {"num_beams": 2}):
        assert torch.equal(fast.generate(**given, **options), model.generate(**given, **options))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["Bert", "Marian", "T5"])
def test_compiled_in_one_graph(name: str) -> None:
    if name != "Bert" and Version(torch.__version__) < Version("2.13"):
        pytest.skip("Dynamo of this PyTorch does not follow the copy of a config that transformers makes")
    torch._dynamo.reset()
    _, given, _ = CASES[name]
    model, fast, _ = pair(name)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given)[0], model(**given)[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Bert", "Marian", "T5"])
def test_gradient_checkpointing_draws_the_same_dropout(name: str, reentrant: bool) -> None:
    _, given, _ = CASES[name]
    _, fast, _ = pair(name)
    fast.train()
    results = []
    for again in (False, True):
        if again:
            fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        results.append(outcome_by_backward(fast, given))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def outcome_by_backward(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """As ``outcome``: reentrant checkpoints know only ``backward``."""
    model.zero_grad()
    out = model(**given, use_cache=False)[0] if "decoder_input_ids" in given else model(**given)[0]
    out.square().mean().backward()
    return [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_modes_and_a_change_of_mind() -> None:
    """The config is the model's own: set_attn_implementation and train work on it, undo takes it away."""
    _, given, _ = CASES["Bert"]
    model, fast, report = pair("Bert")
    fast.train()
    assert not torch.equal(fast(**given)[0], fast(**given)[0])
    fast.eval().set_attn_implementation("eager")
    assert seen(fast, given).ours == 0 and set(implementations(model)) == {"sdpa"}
    fast.set_attn_implementation(NAME)
    assert seen(fast, given).ours == 2
    report.undo()
    assert set(implementations(fast)) == {"sdpa"}


def test_a_bias_of_relative_positions_is_not_made_dense_when_the_name_is_set_later() -> None:
    """T5's layers are copies of their classes once their own dropout was replaced."""
    config = transformers.T5Config(**T5)
    config._attn_implementation = "eager"
    model = transformers.T5Model(config).eval()
    model.encoder.config._attn_implementation_internal = "flex_attention"  # so that accelerate leaves it
    report = tfast.accelerate(model.encoder)
    assert not [row for row in report.swapped if row.now == NOW]
    model.encoder.config._attn_implementation_internal = "eager"
    model.encoder.set_attn_implementation(NAME)
    from transformer_fast.integrations.lazy_bias import LazyBias

    attention = model.encoder.block[0].layer[0].SelfAttention
    assert isinstance(attention.compute_bias(300, 300), LazyBias)


def test_without_transformers_nothing_is_imported() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch, transformer_fast as t; t.accelerate(torch.nn.LayerNorm(4)); "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_on_a_gpu_it_stays_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says that its parameters are on a GPU."""
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    parameter = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter((parameter,)))
    (row,) = [row for row in tfast.accelerate(model).left if row.was == "BertModel (sdpa)"]
    assert row.why == "on a GPU it was not measured against ours" and set(implementations(model)) == {"sdpa"}


def test_a_part_that_stays_is_not_noted_as_one_that_may() -> None:
    """What compiles asks for the class of a config; another part of the same model must not answer for Bloom."""
    both = nn.ModuleList([make("Bloom"), make("Bert")])
    for config in (transformers.BloomConfig, transformers.BertConfig):
        if dispatch._CHECKED in vars(config):
            delattr(config, dispatch._CHECKED)
    tfast.accelerate(both)
    assert not dispatch.is_checked(both[0].config) and dispatch.is_checked(both[1].config)
