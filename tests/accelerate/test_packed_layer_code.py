"""Code of a layer that computes something else on tokens, in training, in another size, or after a change: the layer
keeps its padding, and equals the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast

D = 16
X = torch.randn(6, 6, D, generator=torch.Generator().manual_seed(0))
PAD = torch.arange(6) >= torch.tensor([6, 3, 2, 6, 4, 5])[:, None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def block(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]

    def end(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.end(self.block(x, mask))


class Stack(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor, mask: Tensor, **others: Any) -> Tensor:
        for layer in self.layers:
            result = layer(x, mask, **others)
            x = result[0] if isinstance(result, tuple) else result
        return x


def mixed(x: Tensor) -> Tensor:
    """Read all positions of a row."""
    return x - x.mean(1, keepdim=True)


class Reentrant(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.block, x, mask, use_reentrant=True)


class NotReentrant(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.block, x, mask, use_reentrant=False)


class OfTraining(Layer):
    def end(self, x: Tensor) -> Tensor:
        return mixed(x) if self.training else x


class BatchNorm(Layer):
    def end(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.mT, torch.zeros(D), torch.ones(D), training=self.training).mT


class InstanceNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(D, track_running_stats=True)

    def end(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class RunningMean(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(D))

    def end(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean((0, 1)), 0.1)
        return x - self.seen


class Depth(Layer):
    """Stochastic depth: a row is left out."""

    def end(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) > 0.5) if self.training else x


class Dilated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 2, dilation=16)

    def end(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.mT, (16, 0))).mT


class LargeBatch(Layer):
    def end(self, x: Tensor) -> Tensor:
        return 2 * x if x.shape[0] >= 5 else x


class Nested(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x = self.block(x, mask)
        return x, (x, x)


class Keeps(Layer):
    def end(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Gate(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def end(self, x: Tensor) -> Tensor:
        return x + self.gate * mixed(x)


class Switch(Layer):
    mixes = False

    def forward(self, x: Tensor, mask: Tensor, mix: bool = False) -> Tensor:
        x = self.end(self.block(x, mask))
        return mixed(x) if mix or self.mixes else x


class Other(Switch):
    """Class whose method a test replaces."""


CODE = (Reentrant, NotReentrant, OfTraining, BatchNorm, InstanceNorm, RunningMean, Depth, Dilated, LargeBatch, Nested,
        Keeps, Gate)  # fmt: skip


def compared(plain: nn.Module, model: nn.Module, **others: Any) -> Tensor:
    """Compare outputs at tokens and gradients with those of the plain model; return the output."""
    found = []
    for each in (plain, model):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        out = each(x, PAD, **others)
        out[~PAD].square().sum().backward()
        found.append((out.detach()[~PAD], x.grad[~PAD], *(p.grad for p in each.parameters())))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    return out


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", CODE, ids=lambda kind: kind.__name__)
def test_code_that_reads_more_than_tokens_keeps_the_padding(kind: type[Layer], training: bool) -> None:
    plain = Stack(kind).train(training)
    model = copy.deepcopy(plain)
    state = copy.deepcopy(model.state_dict())
    tfast.accelerate(model, packed=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    if kind is Gate:
        for each in (plain, model):
            [layer.gate.fill_(1.0) for layer in each.layers]
    assert compared(plain, model)[PAD].any()


def set_attribute(layer: Any) -> None:
    layer.mixes = True


def set_method(layer: Any) -> None:
    layer.end = mixed


def compile_method(layer: Any) -> None:
    layer.block = torch.compile(layer.block, backend="eager")


def set_child(layer: Any) -> None:
    layer.attention = nn.MultiheadAttention(D, 2, batch_first=True)
    nn.init.ones_(layer.attention.in_proj_weight)


@pytest.mark.parametrize("change", [set_attribute, set_method, compile_method, set_child], ids=lambda f: f.__name__)
def test_a_change_after_accelerate_keeps_the_padding(change: Callable[[Any], None]) -> None:
    plain = Stack(Switch)
    model = copy.deepcopy(plain)
    tfast.accelerate(model, packed=True)
    assert not compared(plain, model)[PAD].any()
    plain.zero_grad(), model.zero_grad()
    for layer in (*plain.layers, *model.layers):
        change(layer)
    if change is set_child:
        model.load_state_dict(plain.state_dict())
    assert compared(plain, model)[PAD].any()


def test_a_method_that_is_replaced_on_the_class_keeps_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Stack(Other)
    model = copy.deepcopy(plain)
    tfast.accelerate(model, packed=True)
    monkeypatch.setattr(Other, "end", lambda self, x: mixed(x))
    assert compared(plain, model)[PAD].any()


def test_an_argument_that_the_trial_had_not_keeps_the_padding() -> None:
    plain = Stack(Switch)
    model = copy.deepcopy(plain)
    tfast.accelerate(model, packed=True)
    assert compared(plain, model, mix=True)[PAD].any()
    plain.zero_grad(), model.zero_grad()
    assert not compared(plain, model, mix=False)[PAD].any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_layer_has_no_padding(reentrant: bool) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, mask, use_reentrant=reentrant)
            return x

    plain = Checkpointed(Layer)
    model = copy.deepcopy(plain)
    tfast.accelerate(model, packed=True)
    assert not compared(plain, model)[PAD].any()
