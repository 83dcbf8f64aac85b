"""accelerate's fused loss in models of transformers: losses and gradients are those of the eager models."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.swap import output_layer
from transformer_fast.swap.lazy_logits import LazyLogits

transformers = pytest.importorskip("transformers")
import huggingface_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_calls")
V = models.VOCABULARY
MODELS: dict[str, dict[str, Any]] = {  # settings of their own
    "MarianMTModel": {}, "BartForConditionalGeneration": {}, "GPT2LMHeadModel": {}, "LlamaForCausalLM": {},
    "BertForMaskedLM": {}, "RobertaForMaskedLM": {}, "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "T5ForConditionalGeneration untied": {"decoder_start_token_id": 0, "tie_word_embeddings": False},
    "WhisperForConditionalGeneration": {"suppress_tokens": None, "begin_suppress_tokens": None},
}  # fmt: skip
Both = tuple[Any, Any, Callable[[], dict[str, Tensor]]]


def accelerated(eager: nn.Module) -> nn.Module:
    """Return a copy with the fused loss only; the rest of the model stays the same."""
    fast = copy.deepcopy(eager)
    assert [row.now for row in tfast.accelerate(fast, fused_loss=True).swapped].count("fused loss") == 1
    for module, original in zip(fast.modules(), eager.modules(), strict=True):
        if type(module) is not output_layer.OutputLayer:
            module.__class__ = original.__class__
        if hasattr(original, "config"):  # attention is chosen there
            module.config = original.config
    return fast


@functools.cache
def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Return an eager model in training mode and an accelerated copy; both are made once."""
    eager = models.make(models.named(name.split()[0]), **MODELS[name]).double().train()
    for buffer_name, buffer in eager.named_buffers():
        if buffer_name == "final_logits_bias":
            buffer.copy_(torch.linspace(-1, 1, V))
    return eager, accelerated(eager)


def both(name: str) -> Both:
    """Return copies of both models, and a function that makes new batches."""
    case, seeds = models.named(name.split()[0]), itertools.count()

    def batch() -> dict[str, Tensor]:
        given = models.typed(models.inputs(case, "none", seed=next(seeds)), torch.float64)
        labels = given.pop("decoder_input_ids", given.get("input_ids")).clone()
        if case.kind == "masked":
            labels[:, torch.arange(labels.shape[1]) % 5 != 2] = -100
        labels[0, 4:] = -100
        return given | {"labels": labels}

    eager, fast = pair(name)
    return copy.deepcopy(eager), copy.deepcopy(fast), batch


@pytest.fixture(params=MODELS)
def each(request: pytest.FixtureRequest) -> Both:
    """Parametrize a test with every model."""
    return both(request.param)


@pytest.fixture
def gpt2() -> Both:
    """Fixture of GPT-2 only."""
    return both("GPT2LMHeadModel")


def compare(eager: nn.Module, fast: nn.Module) -> None:
    """Assert equal gradients. Models of one stack convert their logits to float32 before the loss, even in float64."""
    tolerances = {"rtol": 1e-9, "atol": 1e-13} if eager.config.is_encoder_decoder else {"rtol": 1e-5, "atol": 1e-7}
    actual, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (fast, eager))
    assert sum(g is not None for g in expected.values()) > 5
    torch.testing.assert_close(actual, expected, **tolerances)


def test_gradients_over_two_batches(each: Both, fused: list[Any]) -> None:
    eager, fast, batch = each
    for _ in range(2):
        given = batch()
        expected, actual = eager(**given), fast(**given)
        assert type(actual.logits) is LazyLogits and not actual.logits.node.is_read()
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
        (expected.loss / 2).backward()
        (actual.loss / 2).backward()
        assert not actual.logits.node.is_read()
        torch.testing.assert_close(actual.logits.detach(), expected.logits.detach(), rtol=1e-9, atol=1e-12)
    assert len(fused) == 2
    compare(eager, fast)


def test_evaluation_and_generation(each: Both, fused: list[Any]) -> None:
    eager, fast, batch = each
    given = batch()
    with torch.no_grad():
        assert type(fast(**given).logits) is Tensor
    theirs, ours = (model.eval()(**given) for model in (eager, fast))
    assert type(ours.logits) is Tensor
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=0)
    if eager.can_generate():
        fast.train()  # generate() computes without gradients in training too
        name = next(name for name in given if name.startswith("input"))
        assert torch.equal(*(m.generate(given[name], max_new_tokens=4, do_sample=False) for m in (eager, fast)))
    assert not fused


class Adapter(nn.Module):
    """Low-rank adapter around the head."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (nn.Linear(*size, bias=False).double() for size in ((models.WIDTH, 2), (2, V)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("accelerate_first", [False, True])
def test_a_head_with_an_adapter_is_left_to_it(gpt2: Both, accelerate_first: bool, fused: list[Any]) -> None:
    eager, _, batch = gpt2
    fast = copy.deepcopy(eager)
    if accelerate_first:
        tfast.accelerate(fast, fused_loss=True)
    eager.lm_head, fast.lm_head = Adapter(eager.lm_head), Adapter(fast.lm_head)
    fast.lm_head.load_state_dict(eager.lm_head.state_dict())
    if not accelerate_first:
        assert "fused loss" not in {row.now for row in tfast.accelerate(fast, fused_loss=True).rows}
    given = batch()
    for model in (eager, fast):
        model(**given).loss.backward()
    compare(eager, fast)
    assert not fused


def test_gradient_checkpointing(gpt2: Both, fused: list[Any]) -> None:
    """transformers checkpoints the layers; the head is outside, so its loss stays fused."""
    eager, fast, batch = gpt2
    given = batch()
    for model in (eager, fast):
        model.gradient_checkpointing_enable()
        model(**given).loss.backward()
    assert len(fused) == 1
    compare(eager, fast)
