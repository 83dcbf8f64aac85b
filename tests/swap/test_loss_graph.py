"""accelerate's fused loss in autograd: hooks, gradients of logits, and logits read after the weights changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_loss_model import D, V, assert_same, batch, gradients, pair
from torch import Tensor, nn

from transformer_fast.swap import lazy_logits
from transformer_fast.swap.lazy_logits import LazyGradient, LazyLogits

pytestmark = pytest.mark.usefixtures("small_calls")


def test_hooks_and_gradients_of_logits() -> None:
    """Hooks may be added after the loss was computed."""
    eager, fast = pair()
    ids, targets = batch()
    seen: dict[nn.Module, list[Any]] = {eager: [], fast: []}
    for model in (eager, fast):
        logits, loss = model(ids, targets)
        logits.retain_grad()
        logits.register_hook(lambda g, model=model: seen[model].append(g.sum(-1)))
        logits.register_hook(lambda g: 2 * g)
        loss.backward()
        seen[model] += [logits.grad, *gradients(model)]
        logits, loss = model(ids, targets)
        seen[model] += torch.autograd.grad(loss, logits, retain_graph=True)
        seen[model] += torch.autograd.grad(loss * 3, [logits, model.layer.weight])
        logits, loss = model(ids, targets)
        logits.register_hook(lambda g, model=model: seen[model].append(g.clone()))
        with torch.autograd.set_detect_anomaly(True):
            loss.backward()
    assert any(isinstance(t, LazyGradient) for t in seen[fast])
    for ours, theirs in zip(seen[fast], seen[eager], strict=True):
        assert_same(ours.detach().clone(), theirs.detach())


def test_backward_again_and_gradients_of_gradients() -> None:
    eager, fast = pair()
    fast.wte.__class__ = nn.Embedding  # ours has no second derivative
    ids, targets = batch()
    found: dict[nn.Module, list[Tensor]] = {}
    for model in (eager, fast):
        loss = model(ids, targets, label_smoothing=0.1)[1]
        loss.backward(retain_graph=True)
        first = [g.clone() for g in gradients(model)]
        (2 * loss).backward()
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(ids, targets)[1], parameters, create_graph=True)
        norm = sum(g.square().sum() for g in grads)
        found[model] = [*first, *gradients(model), *grads, *torch.autograd.grad(norm, parameters)]
    assert_same(found[fast], found[eager])


def test_several_gradients_at_once() -> None:
    eager, fast = pair()
    found = []
    ids, targets = batch()
    for model in (eager, fast):
        loss = model(ids, targets)[1]
        several = torch.tensor([1.0, 2.0], dtype=loss.dtype)
        found.append(torch.autograd.grad(loss, model.lm_head.weight, several, is_grads_batched=True, allow_unused=True))
    assert_same(found[1], found[0])


def test_logits_after_the_step_are_those_of_before() -> None:
    """Tutorials compute the accuracy after backward and step."""
    eager, fast = pair(bias=True)
    ids, targets = batch()
    optimizers = [torch.optim.SGD(model.parameters(), lr=5.0) for model in (eager, fast)]
    for _ in range(3):
        outputs = []
        for model, optimizer in zip((eager, fast), optimizers):
            logits, loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(logits)
        assert not outputs[1].node.is_read()
        assert_same(outputs[1].detach(), outputs[0].detach())
        assert not torch.allclose(outputs[1], fast(ids)[0])


def test_the_gradient_of_logits_after_the_step_is_that_of_before() -> None:
    eager, fast = pair()
    ids, targets = batch()
    found = []
    for model in (eager, fast):
        logits, loss = model(ids, targets)
        grads = torch.autograd.grad(loss, [logits, *model.parameters()])
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        for p, g in zip(model.parameters(), grads[1:], strict=True):
            p.grad = g
        optimizer.step()
        found.append(grads[0])
    assert type(found[1]) is LazyGradient
    assert_same(found[1].clone(), found[0])


@pytest.mark.parametrize(
    "way", ["in place", "data", "data and a step", "hidden", "data of hidden", "freed", "data of the bias"]
)
def test_logits_after_another_change_say_so(way: str) -> None:
    _, fast = pair(bias=True)
    _, targets = batch()
    x = torch.randn(5, D, dtype=torch.float64)
    logits = fast.lm_head(x)
    assert type(logits) is LazyLogits
    with torch.no_grad():
        if way == "in place":
            fast.lm_head.weight.mul_(0.5)
        elif way == "data of hidden":
            x.data[2] += 1.0
        elif way == "data of the bias":
            fast.lm_head.bias.data[V // 2] += 1.0
        elif way.startswith("data"):
            fast.lm_head.weight.data.mul_(0.5)
            if way == "data and a step":
                torch.optim.SGD(fast.parameters(), lr=0.1).step()
        elif way == "freed":
            fast.lm_head.weight.untyped_storage().resize_(0)
        else:
            x.add_(1.0)
    with pytest.raises(RuntimeError, match=r"these logits are computed when they are read.*logits\.detach\(\)"):
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match="these logits are computed when they are read"):
        F.cross_entropy(logits, targets.view(-1)[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", [0, 1, 1234, 2999])
def test_a_row_of_a_large_weight_that_changed_says_so(row: int, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(3000, 64, dtype=dtype))
    logits = lazy_logits.linear(torch.randn(5, 64, dtype=dtype), weight, None)
    weight.data[row] += 5
    with pytest.raises(RuntimeError, match="these logits are computed when they are read"):
        logits.argmax(-1)


def test_a_parameter_with_other_memory_changes_nothing() -> None:
    eager, fast = pair()
    ids, _ = batch()
    logits, expected = fast(ids)[0], eager(ids)[0].detach()
    fast.lm_head.weight.data = torch.zeros(V, D, dtype=torch.float64)
    assert torch.equal(logits.detach(), expected)


def test_backward_after_a_change_of_weights_is_eager_s_error() -> None:
    for model in pair():
        loss = model(*batch())[1]
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_nothing_stays_alive() -> None:
    _, fast = pair()
    ids, targets = batch()
    gc.collect()
    before = set(lazy_logits._alive)  # objects of other tests

    def alive() -> int:
        return len(set(lazy_logits._alive) - before)

    gc.disable()
    try:
        logits, loss = fast(ids, targets)
        assert alive() == 1
        del logits
        loss.backward()
        assert not alive(), "a loss that was used keeps the logits"
        logits, loss = fast(ids, targets)
        logits.sum()
        loss.backward()
        del logits
        assert not alive()
        fast(ids, targets)
        assert not alive()
    finally:
        gc.enable()


def test_what_is_written_to_detached_logits_counts_as_a_change() -> None:
    for model in pair():
        logits = model(batch()[0])[0]
        loss = logits.logsumexp(-1).sum()
        logits.detach().mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
