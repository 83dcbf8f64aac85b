"""The relative positions of T5 and its kind without padding: the numbers are those of the plain model."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")
import huggingface_models as models  # noqa: E402

from transformer_fast.huggingface import supported  # noqa: E402
from transformer_fast.huggingface.tokens import Boundaries  # noqa: E402

pytestmark = pytest.mark.skipif(not supported.has_version(), reason="the table has other versions of transformers")

LENGTH = 60
ATTENTION = "SelfAttention"
Change = Callable[[nn.Module], Any]


def build(name: str = "T5ForConditionalGeneration", **more: Any) -> nn.Module:
    settings = {"relative_attention_max_distance": 40, "decoder_start_token_id": 2} | more
    return models.scattered(models.make(models.named(name), **settings))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(4, 40, (2, LENGTH), generator=generator), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 40:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def step(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    """Loss and gradients."""
    torch.manual_seed(0)  # the router of experts draws
    loss = model.train()(**batch(), **more).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(actual: Any, expected: Any) -> None:
    """Compare tensors by name or by place."""
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    assert len(actual) == len(expected)
    for key, value in pairs:
        torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-4 * float(value.abs().max()) + 1e-7)


def compare(plain: nn.Module, change: Change, packed: bool = True) -> nn.Module:
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast, packed=packed)
    results = []
    for model in (fast, plain):
        change(model)
        results.append(step(model))
    close(*results)
    return fast


def first_layers(model: nn.Module) -> Iterator[nn.Module]:
    for stack in (model.encoder, model.decoder):
        yield stack.block[0].layer[0].SelfAttention


@pytest.mark.parametrize("name", ["T5", "MT5"])
def test_layers_read_a_table_of_distances(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    attend = Boundaries.attend

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(args[4])
        return attend(self, *args, **options)

    monkeypatch.setattr(Boundaries, "attend", watched)
    compare(build(f"{name}ForConditionalGeneration"), lambda model: None)
    assert len(seen) == 6 and [bias.distance_biases != () for bias in seen] == [True, True, True, False, True, False]


class Bent(nn.Embedding):
    """A table whose author computes more than a look-up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh() * 2


def hooked(model: nn.Module) -> None:
    for layer in first_layers(model):
        layer.relative_attention_bias.register_forward_hook(lambda module, args, out: out * 1.5)


def replaced(model: nn.Module) -> None:
    for layer in first_layers(model):
        table = Bent(*layer.relative_attention_bias.weight.shape)
        table.weight = layer.relative_attention_bias.weight
        layer.relative_attention_bias = table


def adapted(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["relative_attention_bias", "q"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def another_method(model: nn.Module) -> None:
    for layer in first_layers(model):
        method = layer.compute_bias
        layer.compute_bias = lambda *args, method=method, **more: method(*args, **more) * 0.5


def fewer_buckets(model: nn.Module) -> None:
    for layer in first_layers(model):
        layer.relative_attention_num_buckets = 16


def near(model: nn.Module) -> None:
    for layer in first_layers(model):
        layer.relative_attention_max_distance = 20


def with_options_of_a_table(model: nn.Module) -> None:
    for layer, options in zip(first_layers(model), ({"max_norm": 0.5}, {"padding_idx": 1})):
        vars(layer.relative_attention_bias).update(options)


def a_layer_of_another_model(model: nn.Module) -> None:
    other = build()
    model.encoder.block[1] = other.encoder.block[1]


CHANGES = {
    change.__name__: change
    for change in (
        hooked,
        replaced,
        adapted,
        another_method,
        fewer_buckets,
        near,
        with_options_of_a_table,
        a_layer_of_another_model,
    )
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_them_after_accelerate_counts(change: str, packed: bool) -> None:
    compare(build(), CHANGES[change], packed)


def test_a_method_of_the_class_that_is_replaced_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.t5.modeling_t5.T5Attention
    method = kind.compute_bias

    def change(model: nn.Module) -> None:
        monkeypatch.setattr(kind, "compute_bias", lambda self, *args, **more: method(self, *args, **more) * 0.5)

    for packed in (False, True):
        compare(build(), change, packed)
        monkeypatch.undo()


def test_a_table_whose_memory_is_elsewhere_between_the_layers() -> None:
    """Sharding and offloading free the parameters of a layer after its forward."""
    plain = build().eval()
    fast, results = copy.deepcopy(plain), []
    report = tfast.accelerate(fast, packed=True)

    def free(module: nn.Module, args: Any, out: Any) -> None:
        module.layer[0].SelfAttention.relative_attention_bias.weight.data.fill_(torch.nan)

    free.__module__ = "torch.distributed.fsdp"

    for model in (fast, plain):
        for stack in (model.encoder, model.decoder):
            stack.block[0].register_forward_hook(free)
        with torch.no_grad():
            results.append([model(**batch(), use_cache=False).logits[batch()["attention_mask"] == 1]])
    close(*results)
    assert not report.padded_calls.reasons


def test_a_distance_for_which_there_is_no_table() -> None:
    """A greatest distance below the number of exact buckets has no effect on short sentences."""
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
    plain = build(relative_attention_max_distance=3)
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast, packed=True)
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids}
    close(*([model(**given).logits] for model in (fast, plain)))


def test_a_hook_of_pytorch_on_all_modules_is_no_obstacle() -> None:
    model = build().eval()
    report = tfast.accelerate(model, packed=True)
    with torch.no_grad(), FlopCounterMode(display=False):
        model(**batch(), use_cache=False)
    assert not report.padded_calls.reasons


def twice(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(self: nn.Module, x: Tensor) -> Tensor:
        return method(self, x) * 2

    return changed


def test_a_method_that_is_replaced_in_other_fast_classes() -> None:
    """A method that the fast class computes itself runs where somebody replaced it."""
    layers = {
        "BertForMaskedLM": ("BertLayer", "feed_forward_chunk"), "DistilBertForMaskedLM": ("FFN", "ff_chunk"),
        "Llama4ForCausalLM": ("Llama4TextRMSNorm", "_norm"),
    }  # fmt: skip
    for name, (kind, method) in layers.items():
        plain = models.make(models.named(name), "sdpa")
        for packed in (False, True):
            results = []
            for model in (copy.deepcopy(plain), copy.deepcopy(plain)):
                if not results:
                    tfast.accelerate(model, packed=packed)
                for module in model.modules():
                    if type(module).__name__ == kind:
                        double = types.MethodType(twice(getattr(type(module), method)), module)
                        setattr(module, method, double)
                given = models.inputs(models.named(name), "right")
                keep = given.get("attention_mask", torch.ones_like(given["input_ids"])) == 1
                results.append(model.eval()(**given).logits[keep])
            close(*([logits] for logits in results))
