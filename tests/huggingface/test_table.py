"""The table of classes of transformers: which classes are swapped, and which are left."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import accelerated
import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.huggingface import Fast, blocks, fast_class, supported, table, whole_layers

transformers = pytest.importorskip("transformers")
import huggingface_models as models  # noqa: E402
from huggingface_blocks import BART, BERT, GPT2, T5, case, given  # noqa: E402
from huggingface_texts import TEXTS, hash_of, text_of  # noqa: E402
from transformers.models.bert import modeling_bert as bert  # noqa: E402

pytestmark = pytest.mark.skipif(not supported.has_version(), reason="the table has other versions of transformers")
NEWEST = supported.version().split(".")[:2] == list(map(str, max(supported.VERSIONS)))


def base(name: str) -> type[Fast]:
    return getattr(blocks, name, None) or getattr(whole_layers, name)


def class_of(path: str) -> type[nn.Module] | None:
    place, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(place), name, None)
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("fast", sorted(TEXTS))
def test_the_classes_have_the_code_that_their_fast_class_computes(fast: str) -> None:
    paths = [path for path, name in supported.CLASSES.items() if name == fast]
    missing = [path for path in paths if class_of(path) is None]
    assert len(paths) > len(missing) and not (missing and NEWEST)
    for path in paths:
        if (kind := class_of(path)) is not None:
            assert hash_of(kind) in TEXTS[fast], f"{path} has another text:\n{text_of(kind)}"
            assert issubclass(fast_class(kind), base(fast)), path


def test_the_parts_of_layers_that_are_one_function_have_one_code() -> None:
    layers = [kind for path, name in supported.CLASSES.items() if name == "BertLayer" and (kind := class_of(path))]
    for part in ("Attention", "SelfAttention"):
        texts = {
            text_of(vars(sys.modules[kind.__module__])[kind.__name__.removesuffix("Layer") + part]) for kind in layers
        }
        assert len(layers) >= 8 and len(texts) == 1


def test_every_fast_class_is_in_the_table() -> None:
    assert set(supported.CLASSES.values()) == set(TEXTS)
    assert all(issubclass(base(name), Fast) for name in TEXTS)


def test_one_class_is_made_for_each_class() -> None:
    made = fast_class(bert.BertOutput)
    assert made is fast_class(bert.BertOutput) and made.__bases__ == (blocks.DropoutAddNorm, bert.BertOutput)
    assert made.__name__ == "BertOutput" and pickle.loads(pickle.dumps(made)) is made
    assert fast_class(made) is None and fast_class(nn.Linear) is None and fast_class(bert.BertModel) is None


class Scaled(bert.BertOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states, input_tensor)


class BertOutput(nn.Module):
    """A user's class with the name, the children and the arguments of BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) - input_tensor)


BertOutput.__module__ = "transformers.models.bert.modeling_bert"


@pytest.mark.parametrize("kind", [Scaled, BertOutput])
def test_a_user_s_class_is_left(kind: type[nn.Module]) -> None:
    module = kind(transformers.BertConfig(hidden_size=8, intermediate_size=8)) if kind is Scaled else kind()
    plain, fast, report = accelerated.pair(module.eval())
    assert type(fast) is kind and [row.was for row in report.left] == [kind.__name__]
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(fast(x, y), plain(x, y))


def _negated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def negated(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return -forward(self, *args, **kwargs)

    return negated


@pytest.mark.parametrize("patch", [_negated, lambda _: lambda self, x, y: x - y, lambda _: bert.BertPooler.forward])
def test_a_class_with_another_forward_is_left(patch: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fast_class(bert.BertOutput)
    monkeypatch.setattr(bert.BertOutput, "forward", patch(bert.BertOutput.forward))
    assert fast_class(bert.BertOutput) is None
    _, model, report = accelerated.pair(models.make(case(BERT), "eager"))
    assert {type(m) for m in model.modules() if isinstance(m, bert.BertOutput)} == {bert.BertOutput}
    assert "BertOutput" in {row.was for row in report.left} and "BertSelfOutput" in {row.was for row in report.swapped}


def test_a_forward_that_is_replaced_after_accelerate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, _ = accelerated.pair(models.make(case(BERT), "eager"))
    monkeypatch.setattr(bert.BertOutput, "forward", _negated(bert.BertOutput.forward))
    torch.testing.assert_close(model(**given(BERT)).logits, plain(**given(BERT)).logits, rtol=1e-4, atol=1e-4)


def test_a_class_that_a_module_no_longer_holds_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = bert.BertOutput
    monkeypatch.setattr(bert, "BertOutput", Scaled)
    assert fast_class(kind) is None


@pytest.mark.parametrize("version", ["5.22.9", "5.99.0.dev0", "4.53.0", "6"])
def test_other_versions_are_left_and_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, version)
    plain, model, report = accelerated.pair(models.make(case(BERT)))
    assert not any(isinstance(m, Fast) for m in model.modules())
    assert [row.was for row in report.attention if row.now] == ["BertSelfAttention"] * models.LAYERS
    (line,) = [note for note in report.notes if "transformers" in note]
    assert line.startswith(f"transformers {version}: ") and 'attn_implementation="transformer_fast"' in line
    assert line.replace(version, "X") in str(report).replace("\n  ", " ").replace(version, "X")
    torch.testing.assert_close(model(**given(BERT)).logits, plain(**given(BERT)).logits, rtol=1e-4, atol=1e-4)


def test_a_model_of_torch_alone_has_no_note_about_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "5.99.0")
    assert not tfast.accelerate(nn.Sequential(nn.LayerNorm(8))).notes


def test_a_pickle_of_another_version_has_transformers_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = accelerated.pair(models.make(case(BERT), "eager"))
    data = pickle.dumps(model.bert.encoder.layer[0].output)
    set_version(monkeypatch, "5.99.0")
    assert type(pickle.loads(data)) is bert.BertOutput
    with pytest.raises(AttributeError, match="no_such_class"):
        table.no_such_class  # noqa: B018


@pytest.mark.parametrize("name", [BERT, BART, T5, "LlamaForCausalLM"])
def test_copies_a_second_call_and_undo(name: str) -> None:
    plain, model, report = accelerated.pair(models.make(case(name), "eager"))
    run = lambda m: m(**given(name)).logits  # noqa: E731
    assert any(isinstance(m, Fast) for m in model.modules())
    accelerated.assert_copied_and_undone(model, report, accelerated.state(plain), run)
    assert torch.equal(run(model), run(plain))


def test_a_method_that_was_held_before_undo_is_transformers_own_afterwards() -> None:
    plain, module, report = accelerated.pair(models.make(case(BERT), "eager").bert.encoder.layer[0].output)
    held, x, y = module.forward, torch.randn(2, 3, 40), torch.randn(2, 3, models.WIDTH)
    report.undo()
    assert torch.equal(held(x, y), plain(x, y))


def test_live_attributes_count() -> None:
    plain, model, _ = accelerated.pair(models.make(case(T5), "eager"))
    for m in (plain, model):
        norm = m.encoder.block[0].layer[0].layer_norm
        norm.variance_epsilon, norm.weight = 0.5, nn.Parameter(torch.full_like(norm.weight, 3.0))
    torch.testing.assert_close(model(**given(T5)).logits, plain(**given(T5)).logits, rtol=1e-4, atol=1e-4)


def test_a_weight_of_another_dtype_has_transformers_result() -> None:
    norm = sys.modules["transformers"].models.llama.modeling_llama.LlamaRMSNorm
    for inner, outer in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        plain, fast, report = accelerated.pair(norm(8).to(outer))
        x = torch.randn(2, 3, 8).to(inner)
        assert report.swapped and torch.equal(fast(x), plain(x)) and fast(x).dtype == plain(x).dtype


@pytest.mark.parametrize("make", [
    lambda: transformers.pytorch_utils.Conv1D(16, 8),  # too small
    lambda: _with_weight(models.make(case("LlamaForCausalLM")).model.norm, torch.ones(2, models.WIDTH)),
])  # fmt: skip
def test_a_module_that_the_ops_do_not_serve_is_left(make: Callable[[], nn.Module]) -> None:
    _, fast, report = accelerated.pair(make())
    assert not isinstance(fast, Fast) and len(report.left) == 1 and report.left[0].why != "it keeps its own forward"


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)


def test_an_activation_is_left_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = models.make(case(BERT)).bert.encoder.layer[0].intermediate
    fast = fast_class(type(layer))
    assert fast.obstacle(layer) == ""
    assert fast.obstacle(accelerated.seems_on_gpu(layer, monkeypatch)) == "int8 weights are for a CPU"


def _with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight)
    return module


def test_gpt2_has_no_fast_class_but_that_of_its_linear_layers() -> None:
    assert {type(m).__name__ for m in models.make(case(GPT2)).modules() if fast_class(type(m))} == {"Conv1D"}
