"""``accelerate(model, packed=True)``: gradients of what a model returns, and hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import accelerated
import packed_models as packed

import transformer_fast as tfast
from transformer_fast.huggingface.logits import PaddedGradient
from transformer_fast.swap import output_layer

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = [
    "BertForMaskedLM", "LlamaForCausalLM", "Gemma2ForCausalLM", "BartForConditionalGeneration",
    "T5ForConditionalGeneration", "BertForTokenClassification", "BertForSequenceClassification", "DistilBertModel",
]  # fmt: skip
"""Their logits are the output of a linear layer, or that with a bias, scaled or limited."""


def pair(name: str) -> tuple[nn.Module, nn.Module, packed.Batch, tfast.accelerate.Report]:
    """Return a plain model and one without padding."""
    plain, fast, report = packed.pair(name)
    return plain.train(), fast.train(), packed.batch(name, "right"), report


def loss_of(output: Any, call: packed.Batch) -> Tensor:
    return output.loss if "loss" in output else output[0][call.tokens].square().mean()


def returned(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output that have a gradient, by name."""
    found = {}
    for name, value in output.items():
        for place, t in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(t, Tensor) and t.requires_grad and name != "loss":
                found[f"{name}.{place}"] = t
    return found


def close(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(t.abs().max()) for t in theirs.values() if t is not None and t.numel())
    packed.close(ours, theirs, atol=1e-5 * max(1.0, scale))


def by_retain_grad(model: nn.Module, call: packed.Batch, options: dict[str, Any]) -> dict[str, Tensor | None]:
    output = model(**call.given, **options)
    parts = returned(output)
    for t in parts.values():
        t.retain_grad()
    loss_of(output, call).backward()
    assert all(type(t.grad) in (Tensor, type(None)) for t in parts.values())
    return {name: t.grad for name, t in parts.items()}


def by_autograd_grad(model: nn.Module, call: packed.Batch, options: dict[str, Any]) -> dict[str, Tensor | None]:
    output = model(**call.given, **options)
    parts = returned(output)
    weights = dict(model.named_parameters())
    both = torch.autograd.grad(loss_of(output, call), [*parts.values(), *weights.values()], allow_unused=True)
    return dict(zip([*parts, *weights], both, strict=True))


def by_hook(model: nn.Module, call: packed.Batch, options: dict[str, Any]) -> dict[str, Tensor | None]:
    """A reversal of gradients at every tensor."""
    model.zero_grad()
    output = model(**call.given, **options)
    for t in returned(output).values():
        t.register_hook(lambda gradient: -2 * gradient)
    loss_of(output, call).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def by_a_second_derivative(model: nn.Module, call: packed.Batch, options: dict[str, Any]) -> dict[str, Tensor | None]:
    model.zero_grad()
    output = model(**call.given, **options)
    parts = list(returned(output).values())[:1]
    (gradient,) = torch.autograd.grad(loss_of(output, call), parts, create_graph=True, allow_unused=True)
    (gradient.square().sum() + loss_of(output, call)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def by_two_losses(model: nn.Module, call: packed.Batch, options: dict[str, Any]) -> dict[str, Tensor | None]:
    model.zero_grad()
    output = model(**call.given, **options)
    loss = loss_of(output, call)
    for t in returned(output).values():
        if t.shape[:2] == call.tokens.shape:
            loss = loss + t[call.tokens].square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


WAYS: dict[str, Callable[..., dict[str, Tensor | None]]] = {
    "retain_grad": by_retain_grad, "autograd.grad": by_autograd_grad, "a hook": by_hook,
    "a second derivative": by_a_second_derivative, "two losses": by_two_losses,
}  # fmt: skip


@pytest.mark.parametrize("hidden", [False, True], ids=["", "hidden states"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_returns_has_the_gradients_of_the_plain_model(name: str, way: str, hidden: bool) -> None:
    plain, fast, call, report = pair(name)
    options = {"output_hidden_states": True} if hidden else {}
    expected = WAYS[way](plain, call, options)
    close(WAYS[way](fast, call, options), expected)
    assert any(value is not None for value in expected.values())
    assert bool(report.padded_calls.reasons) == hidden


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "BartForConditionalGeneration"])
def test_the_gradient_of_logits_is_padded_only_where_something_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fast, call, _ = pair(name)
    made: list[PaddedGradient] = []
    new = PaddedGradient.__new__
    monkeypatch.setattr(
        PaddedGradient, "__new__", staticmethod(lambda *args: made.append(kept := new(*args)) or kept), raising=False
    )
    fast(**call.given).loss.backward()
    assert len(made) == 1 and not made[0].node.is_read()
    output = fast(**call.given)
    output.logits.retain_grad()
    output.loss.backward()
    assert len(made) == 2 and made[1].node.is_read()
    assert not output.logits.grad[~call.tokens].any() and output.logits.grad[call.tokens].any()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "BartForConditionalGeneration"])
def test_a_fused_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "WORTH_IT", 0)
    plain, fast, report = accelerated.pair(packed.make(name).train(), packed=True, fused_loss=True)
    call, found = packed.batch(name, "right"), []
    for model in (fast, plain, fast, plain):
        model.zero_grad()
        output = model(**call.given)
        lazy = type(output.logits) is not Tensor and not output.logits.node.is_read()
        output.logits.retain_grad()
        output.loss.backward()
        assert lazy == (model is fast)
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        logits = output.logits[call.tokens]
        found.append(gradients | {"loss": output.loss, "logits": logits, "of logits": output.logits.grad + 0})
    close(found[0], found[1])
    close(found[2], found[3])
    assert not report.padded_calls.reasons


def test_a_batch_of_gradients() -> None:
    grads = []
    for model in pair("BertForMaskedLM")[:2]:
        call = packed.batch("BertForMaskedLM", "right")
        output = model(**call.given)
        weight = model.bert.encoder.layer[0].output.dense.bias
        wanted = torch.tensor([1.0, -2.0])
        grads.append(torch.autograd.grad(output.loss, weight, wanted, is_grads_batched=True)[0])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
