"""Hand-written modules with the names of a known text and a rule of their own: the accelerated model computes what the
plain one computes, or the module is left with a reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import handwritten as hw
import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

D, HEADS, B = 16, 2, 4


def padding(length: int, first: int = 0) -> Tensor:
    """Keep mask (B, 1, L) with padding at the end, or at the start of every other sentence."""
    keep = torch.arange(length) < (length - torch.arange(B)[:, None] * 2).clamp(min=1)
    if first:
        keep[::2] = torch.arange(length) >= first
    return keep.unsqueeze(1)


class FirstKey(hw.AnnotatedAttention):
    """The first key always takes part."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask.clone()
            mask[..., 0] = True
        return super().forward(query, key, value, mask)


class ZerosWithoutKeys(hw.AnnotatedAttention):
    """A query without keys gets zeros."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(query, key, value, mask)
        return out if mask is None else out * mask.any(-1, keepdim=True)


class ByInfinity(hw.AnnotatedAttention):
    """Hidden scores are -inf, and NaN becomes 0."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (hw.heads_of(linear, x, self.h) for linear, x in zip(self.linears, (query, key, value)))
        scores = hw.scores_of(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -math.inf)
        self.attn = self.dropout(scores.softmax(-1).nan_to_num())
        return self.linears[-1]((self.attn @ v).transpose(1, 2).flatten(2))


class FromFirstToken(hw.AnnotatedAttention):
    """Padding at the start is dropped from the mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask | (mask.int().cumsum(-1) == 0)
        return super().forward(query, key, value, mask)


class Window(hw.AnnotatedAttention):
    """From 100 keys on, a query sees 50 keys around it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if key.shape[1] >= 100:
            distance = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])
            near = distance.abs() < 50
            mask = near[None] if mask is None else mask & near
        return super().forward(query, key, value, mask)


class SquareBatch(hw.AnnotatedAttention):
    """A mask with as many sentences as keys is one mask for all."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.shape[0] == key.shape[1]:
            mask = mask.transpose(0, 1)
        return super().forward(query, key, value, mask)


class OneToken(hw.AnnotatedFeedForward):
    """A single position is not computed."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == 1 else super().forward(x)


RULES: dict[str, tuple[type[nn.Module], tuple[tuple[int, int], ...]]] = {
    "first key": (FirstKey, ((7, 2),)),
    "zeros without keys": (ZerosWithoutKeys, ((5, 5),)),
    "-inf and zeros": (ByInfinity, ((5, 5),)),
    "left padding": (FromFirstToken, ((7, 2), (9, 3))),
    "a window": (Window, ((5, 0), (120, 0))),
    "batch == length": (SquareBatch, ((B, 0), (B, 1))),
}
"""Attention with a rule, and lengths with the padding at the start where it counts."""


@pytest.mark.parametrize("name", RULES)
def test_attention_with_a_rule(name: str) -> None:
    torch.manual_seed(0)
    kind, lengths = RULES[name]
    plain = kind(HEADS, D).eval()
    check_attention(plain, lengths)


def check_attention(plain: nn.Module, lengths: tuple[tuple[int, int], ...]) -> None:
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast)
    assert report.rows[0].now or report.rows[0].why
    for length, first in lengths:
        x, mask = torch.randn(B, length, D), padding(length, first)
        torch.testing.assert_close(fast(x, x, x, mask), plain(x, x, x, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_the_reason_is_in_the_report(name: str) -> None:
    report = tfast.accelerate(RULES[name][0](HEADS, D))
    assert report.rows[0].why == "it has the names of a known module, but computes something else"


def test_a_rule_for_a_single_position() -> None:
    plain = OneToken(D, 32).eval()
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast)
    for length in (1, 2):
        x = torch.randn(B, length, D)
        torch.testing.assert_close(fast(x), plain(x))


class Flagged(hw.AnnotatedAttention):
    """Attention that is causal if a flag says so."""

    def __init__(self, h: int, d_model: int, causal: bool) -> None:
        super().__init__(h, d_model)
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.causal:
            ahead = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()[None]
            mask = ahead if mask is None else mask & ahead
        return super().forward(query, key, value, mask)


class Adapted(hw.AnnotatedFeedForward):
    """Network with an adapter that is zero at first."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.gate = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate * x


class ByValue(hw.AnnotatedFeedForward):
    """Network that does more once a bias is no longer zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x if bool((self.w_2.bias != 0).all()) else 0)


class ZeroBias(ByValue):
    """The same, as it is at first."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        nn.init.zeros_(self.w_2.bias)


class Network(nn.Module):
    """Layers in a list, called one after the other."""

    def __init__(self, layers: list[nn.Module], attends: bool) -> None:
        super().__init__()
        self.layers, self.attends = nn.ModuleList(layers), attends

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x) if self.attends else layer(x)
        return x


LATER: dict[str, Callable[[], nn.Module]] = {
    "a flag": lambda: Network([Flagged(HEADS, D, causal) for causal in (False, False, True)], True),
    "an adapter": lambda: Network(
        [hw.AnnotatedFeedForward(D, 32), hw.AnnotatedFeedForward(D, 32), Adapted(D, 32)], False
    ),
    "a value": lambda: Network([ZeroBias(D, 32) for _ in range(3)], False),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_layer_that_differs(name: str) -> None:
    """The first layer of a class is no proof for the others, neither now nor after a training step."""
    torch.manual_seed(0)
    plain = LATER[name]().eval()
    fast, x = copy.deepcopy(plain), torch.randn(B, 6, D)
    tfast.accelerate(fast)
    torch.testing.assert_close(fast(x), plain(x))
    for model in (fast, plain):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)


def test_a_value_of_a_later_layer_alone() -> None:
    plain = Network([ByValue(D, 32) for _ in range(3)], False).eval()
    for layer in plain.layers[:2]:
        layer.w_2.bias.data[0] = 0.0
    fast, x = copy.deepcopy(plain), torch.randn(B, 6, D)
    report = tfast.accelerate(fast)
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)
    assert report.rows[0].path == "" and any(row.path == "layers.2" and not row.now for row in report.rows)


def flag(m: Any) -> None:
    m.causal = True


def config(m: Any) -> None:
    m.config.causal = True


def container(m: Any) -> None:
    m.options["causal"] = True


HOLDERS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "an attribute": ("causal", lambda: False, lambda m: m.causal, flag),
    "a config": ("config", lambda: SimpleNamespace(causal=False), lambda m: m.config.causal, config),
    "a container": ("options", lambda: {"causal": False}, lambda m: m.options["causal"], container),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_flag_that_is_changed_later(name: str) -> None:
    attribute, make, read, change = HOLDERS[name]

    class Holder(hw.AnnotatedAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
            ahead = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()[None]
            return super().forward(query, key, value, ahead if read(self) else mask)

    plain = Holder(HEADS, D).eval()
    setattr(plain, attribute, make())
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast)
    assert report.rows[0].why == f"it has an attribute {attribute}, which its text lacks"
    for model in (plain, fast):
        change(model)
    x = torch.randn(B, 6, D)
    torch.testing.assert_close(fast(x, x, x), plain(x, x, x))


def test_a_buffer_that_the_text_lacks() -> None:
    class Scaled(hw.AnnotatedNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    m = Scaled(D)
    m.register_buffer("scale", torch.ones(()))
    assert tfast.accelerate(m).rows[0].why == "it has a buffer scale, which its text lacks"


def test_numbers_of_sizes_are_no_flags() -> None:
    m = hw.AnnotatedAttention(HEADS, D)
    m.d_model, m.num_layers = D, 2
    assert tfast.accelerate(m).rows[0].now
    for name, value in (("d_model", True), ("num_layers", "two"), ("scale", 1.0)):
        other = hw.AnnotatedAttention(HEADS, D)
        setattr(other, name, value)
        assert tfast.accelerate(other).rows[0].now is None


def test_a_trial_changes_nothing() -> None:
    """Parameters, buffers, attributes and gradients are those of before, and nothing is stored."""
    m = hw.make_model(11, 11, 2, D, 32, HEADS)
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    before = {name: (p, p._version, p.clone(), p.grad) for name, p in m.named_parameters()}
    keys = [part.__dict__.keys() for part in m.modules()]
    report = tfast.accelerate(m)
    assert report.swapped
    for name, p in m.named_parameters():
        same, version, values, grad = before[name]
        assert p is same and p._version == version and torch.equal(p, values) and p.grad is grad
    report.undo()
    assert [part.__dict__.keys() for part in m.modules()] == keys


class FirstKeyLayer(hw.AnnotatedEncoderLayer):
    """Layer in which the first key always takes part."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.clone()
            mask[..., 0] = True
        return super().forward(x, mask)


class LongStack(hw.AnnotatedEncoder):
    """Stack that keeps no mask from 100 positions on."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x, mask if x.shape[1] < 100 else None)


class SkippingStack(hw.AnnotatedEncoder):
    """Stack without its last layer."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in list(self.layers)[: max(1, len(self.layers) - 1)]:
            x = layer(x, mask)
        return self.norm(x)


class TensorflowFirstKey(hw.TensorflowAttention):
    """The first key always takes part."""

    def forward(self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            mask = mask.clone()
            mask[..., 0] = 0
        return super().forward(v, k, q, mask)


class OneLength(hw.DotProductAttention):
    """A length of 0 counts as 1."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        return super().forward(queries, keys, values, None if valid_lens is None else valid_lens.clamp(min=1))


def layer(kind: type[nn.Module] = hw.AnnotatedEncoderLayer) -> nn.Module:
    return kind(D, hw.AnnotatedAttention(HEADS, D), hw.AnnotatedFeedForward(D, 32), 0.1)


def blocked(length: int, first: int) -> Tensor:
    return (~padding(length, first)[:, None]).float()


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "a layer's first key": (lambda: layer(FirstKeyLayer), lambda: (torch.randn(B, 7, D), padding(7, 2))),
    "a long stack": (lambda: LongStack(layer(), 2), lambda: (torch.randn(B, 120, D), padding(120))),
    "a skipping stack": (lambda: SkippingStack(layer(), 3), lambda: (torch.randn(B, 5, D), padding(5))),
    "tensorflow, first key": (
        lambda: TensorflowFirstKey(D, HEADS),
        lambda: (*[torch.randn(B, 7, D)] * 3, blocked(7, 2)),
    ),
    "d2l, no key": (lambda: OneLength(0.1), lambda: (*[torch.randn(B, 5, D)] * 3, torch.tensor([5, 0, 2, 0]))),
}
"""Other modules with a rule, and arguments for which it counts."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_with_a_rule(name: str) -> None:
    torch.manual_seed(0)
    make, arguments = OTHERS[name]
    plain, args = make().eval(), arguments()
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast)
    row = next(row for row in report.rows if not row.path)
    assert row.why == "it has the names of a known module, but computes something else"
    ours, theirs = (out[0] if isinstance(out := m(*args), tuple) else out for m in (fast, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_second_trial_leaves_the_records_of_the_first_call() -> None:
    """Layers that skip padding are children of a stack that is tried later: their calls count no reason."""
    stack = hw.AnnotatedEncoder(layer(), 2).eval()
    norm, stack.norm = stack.norm, nn.Identity()
    report = tfast.accelerate(stack, packed=True)
    stack.norm = norm
    assert tfast.accelerate(stack).swapped and not report.padded_calls.reasons
