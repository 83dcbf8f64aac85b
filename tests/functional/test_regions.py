"""Blocks and what autograd computes again: gradients belong to the forward that was computed, whoever computed it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.function_mode import counted_calls

P = 0.4
WEIGHTS = torch.randn(2, 4, 9, 16)


def layer(x: Tensor) -> Tensor:
    """Attention and dropout, each with random bits, and a norm."""
    y = F.scaled_dot_product_attention(x, x, x, dropout_p=P, is_causal=True)
    return F.layer_norm(F.dropout(y, P) + x, (16,))


Layer = Callable[[Tensor], Tensor]


def outcome(call: Layer, backward_inside: bool = False) -> list[Tensor]:
    """Return the result of a call and its gradient, from one seed."""
    x = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(1)
    out = call(x)
    if backward_inside:
        with tfast.functional():
            (out * WEIGHTS).sum().backward()
    else:
        (out * WEIGHTS).sum().backward()
    return [out.detach(), x.grad]


fast = tfast.functional()(layer)
TWICE = {("scaled_dot_product_attention", True): 2, ("dropout", True): 2}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a_checkpoint_in_a_block_is_torch_s(reentrant: bool, inside: bool) -> None:
    """The second computation has no block, so the first one must not have one."""
    with counted_calls() as calls:
        found = outcome(tfast.functional()(lambda x: checkpoint(layer, x, use_reentrant=reentrant)), inside)
    assert not calls
    assert all(map(torch.equal, found, outcome(layer)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False], ids=["a block around", "no block around"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a_block_in_a_checkpoint_is_ours_both_times(reentrant: bool, around: bool, inside: bool) -> None:
    def call(x: Tensor) -> Tensor:
        return checkpoint(fast, x, use_reentrant=reentrant)

    with counted_calls() as calls:
        found = outcome(tfast.functional()(call) if around else call, inside)
    assert calls.items() >= TWICE.items() and all(ours for _, ours in calls)
    assert all(map(torch.equal, found, outcome(fast)))


def test_the_contexts_of_a_checkpoint() -> None:
    def call(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=lambda: (tfast.functional(), tfast.functional()))

    with counted_calls() as calls:
        found = outcome(call)
    assert calls.items() >= TWICE.items() and all(ours for _, ours in calls)
    assert all(map(torch.equal, found, outcome(fast)))


def test_a_checkpoint_inside_a_checkpoint() -> None:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) + checkpoint(fast, x, use_reentrant=False)

    def call(x: Tensor) -> Tensor:
        return checkpoint(tfast.functional()(inner), x, use_reentrant=False)

    assert all(map(torch.equal, outcome(call), outcome(lambda x: layer(x) + fast(x))))


class Twice(torch.autograd.Function):
    """Function that computes again by itself, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = layer(x)
        torch.set_rng_state(now)
        return torch.autograd.grad(out, x, grad)[0]


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a_function_of_autograd(inside: bool) -> None:
    found = outcome(tfast.functional()(Twice.apply), inside)
    assert all(map(torch.equal, found, outcome(layer)))


def test_hooks_of_saved_tensors() -> None:
    """Hooks around a block change nothing; those that are set inside may be a checkpoint's."""
    with torch.autograd.graph.save_on_cpu(), counted_calls() as calls:
        found = outcome(fast)
    assert all(ours for _, ours in calls) and all(map(torch.equal, found, outcome(fast)))
    with tfast.functional(), torch.autograd.graph.save_on_cpu(), counted_calls() as calls:
        found = outcome(layer)
    assert not calls and all(map(torch.equal, found, outcome(layer)))


def test_a_backward_pass_in_another_thread() -> None:
    results = []

    def run() -> None:
        results.append(outcome(fast))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert all(map(torch.equal, results[0], outcome(fast)))


def test_checkpoint_without_gradients() -> None:
    """Nothing is computed again, so it is ours."""
    x = torch.randn(2, 4, 9, 16)
    with torch.no_grad(), tfast.functional(), counted_calls() as calls:
        checkpoint(layer, x, use_reentrant=False)
    assert calls and all(ours for _, ours in calls)
