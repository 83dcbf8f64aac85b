"""After `report.undo()`, accelerate's fused loss leaves no hook on the optimizers, and right logits."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from fused_loss_model import Gpt, assert_same, batch, gradients
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS
from torch.optim.optimizer import register_optimizer_step_pre_hook

import transformer_fast as tfast
from transformer_fast.swap import accelerate as engine
from transformer_fast.swap import lazy_logits
from transformer_fast.swap.lazy_logits import LazyGradient, LazyLogits

pytestmark = pytest.mark.usefixtures("small_calls")


@pytest.fixture
def before() -> Iterator[list[int]]:
    """Hooks of other code, without ours."""
    gc.collect()  # models of other tests
    lazy_logits.leave_optimizers()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    yield list(HOOKS)
    handle.remove()


def accelerated() -> tuple[Gpt, tfast.accelerate.Report]:
    model = Gpt()
    return model, tfast.accelerate(model, fused_loss=True)


def train(model: Gpt) -> None:
    logits, loss = model(*batch())
    assert type(logits) is LazyLogits and not logits.node.is_read()
    loss.backward()
    SGD(model.parameters(), lr=0.1).step()


def test_undo_removes_the_hook(before: list[int]) -> None:
    model, report = accelerated()
    assert list(HOOKS) == before, "not before logits are left out"
    train(model)
    assert len(HOOKS) == len(before) + 1
    train(model)
    assert len(HOOKS) == len(before) + 1
    report.undo()
    assert list(HOOKS) == before
    report = tfast.accelerate(model, fused_loss=True)
    train(model)
    report.undo()
    report.undo()
    assert list(HOOKS) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("trained", [0, 1, 2])
def test_the_last_of_several_models_removes_the_hook(order: tuple[int, ...], trained: int, before: list[int]) -> None:
    models = [accelerated() for _ in range(3)]
    for model, _ in models[trained:]:
        train(model)
    for number, i in enumerate(order):
        models[i][1].undo()
        left = [models[j][0] for j in order[number + 1 :]]
        for model in left:
            train(model)
        assert len(HOOKS) == len(before) + bool(left)
    assert list(HOOKS) == before


def test_a_second_call_does_not_take_the_hook_of_the_first(before: list[int]) -> None:
    model, first = accelerated()
    train(model)
    tfast.accelerate(model, fused_loss=True).undo()
    assert len(HOOKS) == len(before) + 1
    first.undo()
    assert list(HOOKS) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_keeps_the_hook_and_has_its_own(copied: Callable[[Gpt], Gpt], before: list[int]) -> None:
    model, report = accelerated()
    other = copied(model)
    train(model)
    train(other)
    report.undo()
    assert len(HOOKS) == len(before) + 1
    logits, loss = other(*batch())
    expected = copy.deepcopy(logits.detach())
    loss.backward()
    SGD(other.parameters(), lr=5.0).step()
    assert torch.equal(logits.detach(), expected)
    del other
    gc.collect()
    accelerated()[1].undo()
    assert list(HOOKS) == before


def test_an_exception_in_accelerate_leaves_no_hook(before: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = accelerated()
    train(model)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._Walk, "_visit_other", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accelerated()
    assert len(HOOKS) == len(before) + 1, "that of the first model"
    report.undo()
    assert list(HOOKS) == before
    with pytest.raises(KeyboardInterrupt):
        accelerated()
    assert list(HOOKS) == before


@pytest.mark.parametrize("when", ["before the loss", "before backward", "before the step", "after the step"])
def test_logits_and_their_gradient_outlive_undo(when: str, before: list[int]) -> None:
    eager = Gpt().double()
    fast = copy.deepcopy(eager)
    report = tfast.accelerate(fast, fused_loss=True)
    ids, targets = batch()
    found = []
    for model in (eager, fast):

        def undo(now: str, model: Gpt = model) -> None:
            if model is fast and now == when:
                report.undo()

        logits, _ = model(ids)
        undo("before the loss")
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        undo("before backward")
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        loss.backward()
        undo("before the step")
        SGD(model.parameters(), lr=5.0).step()
        undo("after the step")
        if model is fast:
            assert type(logits) is LazyLogits and type(grad) is LazyGradient and list(HOOKS) == before
        found.append([logits.detach(), grad.detach().clone(), *gradients(model)])
    assert_same(found[1], found[0])
    assert list(HOOKS) == before
