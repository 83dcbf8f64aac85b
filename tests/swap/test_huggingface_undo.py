"""After report.undo(), transformers and torch are as before accelerate, and so is the model."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer

import transformer_fast as tfast
from transformer_fast.swap import lazy_logits

transformers = pytest.importorskip("transformers", minversion="5")
import huggingface_models as models  # noqa: E402

NAMES = [
    "BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM",
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM",
    "OPTForCausalLM", "GPTNeoXForCausalLM", "Qwen2ForCausalLM", "BloomForCausalLM", "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration", "BartForConditionalGeneration",
    "MarianMTModel", "WhisperForConditionalGeneration", "ViTForImageClassification",
]  # fmt: skip
PACKAGES = ("transformers.m", "transformers.configuration_utils", "torch.nn.", "torch.optim.")
OWN_CACHES = {"__abstractmethods__", "_abc_impl", "_can_set_attn_implementation_cached_value", "__slotnames__"}
"""What Python and transformers write on a class themselves."""

PLACES = {
    ("transformers.modeling_utils", "PreTrainedModel", "__init__"), ("transformers.masking_utils", "sdpa_mask", ""),
    ("torch.nn.modules.normalization", "LayerNorm", "forward"), ("torch.optim.optimizer", "Optimizer", "step"),
}  # fmt: skip
"""One of each kind that is looked at."""


def given_to(name: str) -> dict[str, Tensor]:
    given = models.inputs(models.named(name), "right")
    if "pixel_values" in given:
        return given | {"labels": torch.tensor([0, 1, 0])}
    return given | {"labels": given.get("decoder_input_ids", given.get("input_ids"))}


def everything() -> dict[tuple[str, str, str], Any]:
    """Return functions and classes of the loaded files, the attributes of the classes, and the hooks of optimizers."""
    found: dict[tuple[str, str, str], Any] = {}
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        found |= {("torch.optim.optimizer", name, str(key)): v for key, v in getattr(optimizer, name).items()}
    for file, module in list(sys.modules.items()):
        if not file.startswith(PACKAGES):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType | type):
                found[file, name, ""] = value
            if inspect.isclass(value) and value.__module__ == file:
                found |= {(file, name, key): v for key, v in vars(value).items() if key not in OWN_CACHES}
    return found


def state(model: nn.Module) -> list[Any]:
    """Return the class and the attributes of each module, without tensors."""
    plain = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return [(type(m), attributes, set(vars(m))) for m, attributes in zip(model.modules(), plain)]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(name: str) -> None:
    model = models.make(models.named(name)).train()
    model(**given_to(name)).loss.backward()
    lazy_logits.leave_optimizers()  # the hook of a model that was not undone and is gone
    before, was = everything(), state(model)
    report = tfast.accelerate(model, fused_loss=True, packed=True)
    model(**given_to(name)).loss.backward()
    report.undo()
    after = everything()
    assert before.keys() >= PLACES
    assert [key for key, value in before.items() if after.get(key) is not value] == []
    classes = {key[:2] for key in before if key[2]}
    new = after.keys() - before.keys()
    assert [key for key in new if key[:2] in classes or key[0] == "torch.optim.optimizer"] == []
    assert state(model) == was


def test_a_layer_with_relative_positions_is_copied_and_pickled() -> None:
    model = models.make(models.named("T5ForConditionalGeneration")).eval()
    tfast.accelerate(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention, own = (m.encoder.block[0].layer[0].SelfAttention for m in (again, model))
        assert type(attention) is type(own) and type(own) is not type(own).__mro__[2]
        with torch.no_grad():
            attention.relative_attention_bias.weight.zero_()
        x = torch.randn(1, 300, model.config.d_model)
        bias, other = attention(x)[1], own(x)[1]
        assert not bias.any() and other.any()


def test_a_config_that_asks_for_weights_is_saved(tmp_path: Path) -> None:
    """transformers saves such a config for "eager" alone."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, **sizes, attn_implementation="eager", output_attentions=True)
    model = transformers.BertModel(config).eval()
    report = tfast.accelerate(model)
    assert report.swapped and "config.output_attentions is set" in str(report)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (2, 5))
    (ours,) = model(ids).attentions
    report.undo()
    torch.testing.assert_close(ours, model(ids).attentions[0])
