"""Hand-written modules with the names of a known text and a rule of their own: the accelerated model computes what the
plain one computes, and the report says why the module is left."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from accelerated import pair
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.swap.check_form import DIFFERS

D, HEADS, B = 16, 2, 4


def padding(length: int, first: int = 0) -> Tensor:
    """Keep mask (B, 1, L) with padding at the end, or at the start of every other sentence."""
    keep = torch.arange(length) < (length - torch.arange(B)[:, None] * 2).clamp(min=1)
    if first:
        keep[::2] = torch.arange(length) >= first
    return keep.unsqueeze(1)


def like(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """Class with another ``forward``."""
    return type("Own", (base,), {"forward": forward})


def attends(
    mask_of: Callable[..., Tensor | None] = lambda mask, q, k: mask,
    out_of: Callable[..., Tensor] = lambda out, mask: out,
) -> nn.Module:
    """Attention with functions of the mask, the queries and the keys, and of the result and the mask."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        out = hw.AnnotatedAttention.forward(self, query, key, value, mask_of(mask, query, key))
        return out_of(out, mask)

    return like(hw.AnnotatedAttention, forward)(HEADS, D)


def with_first_key(mask: Tensor | None, *_: Tensor) -> Tensor | None:
    return None if mask is None else torch.cat([torch.ones_like(mask[..., :1]), mask[..., 1:]], -1)


def within_50(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if key.shape[1] < 100:
        return mask
    near = ((torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])).abs() < 50)[None]
    return near if mask is None else mask & near


def by_infinity(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Hidden scores are -inf, and NaN becomes 0."""
    q, k, v = (hw.heads_of(linear, x, self.h) for linear, x in zip(self.linears, (query, key, value)))
    scores = hw.scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -math.inf)
    self.attn = self.dropout(scores.softmax(-1).nan_to_num())
    return self.linears[-1]((self.attn @ v).transpose(1, 2).flatten(2))


def skips_the_last(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    for each in list(self.layers)[: max(1, len(self.layers) - 1)]:
        x = each(x, mask)
    return self.norm(x)


def layer(kind: type[nn.Module] = hw.AnnotatedEncoderLayer) -> nn.Module:
    return kind(D, hw.AnnotatedAttention(HEADS, D), hw.AnnotatedFeedForward(D, 32), 0.1)


def attend(length: int, first: int = 0) -> tuple[Tensor, ...]:
    return (*[torch.randn(B, length, D)] * 3, padding(length, first))


def of_layer(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return hw.AnnotatedEncoderLayer.forward(self, x, with_first_key(mask))


def of_long_stack(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return hw.AnnotatedEncoder.forward(self, x, mask if x.shape[1] < 100 else None)


def of_tensorflow(self: Any, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return hw.TensorflowAttention.forward(self, v, k, q, None if mask is None else ~with_first_key(mask == 0) * 1.0)


def of_d2l(self: Any, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
    lengths = None if valid_lens is None else valid_lens.clamp(min=1)
    return hw.DotProductAttention.forward(self, queries, keys, values, lengths)


Make, Arguments = Callable[[], nn.Module], Callable[[], tuple[Any, ...]]
STATES = lambda: (torch.randn(B, 5, D),)  # noqa: E731
RULES: dict[str, tuple[Make, Arguments]] = {
    "the first key takes part": (lambda: attends(with_first_key), lambda: attend(7, 2)),
    "zeros without keys": (
        lambda: attends(out_of=lambda out, mask: out if mask is None else out * mask.any(-1, keepdim=True)),
        lambda: attend(5, 5),
    ),
    "-inf and zeros": (lambda: like(hw.AnnotatedAttention, by_infinity)(HEADS, D), lambda: attend(5, 5)),
    "padding at the start is dropped": (
        lambda: attends(lambda mask, *_: mask if mask is None else mask | (mask.int().cumsum(-1) == 0)),
        lambda: attend(9, 3),
    ),
    "a window from 100 keys on": (lambda: attends(within_50), lambda: attend(120)),
    "as many sentences as keys": (
        lambda: attends(lambda mask, q, k: mask.mT if mask is not None and mask.shape[0] == k.shape[1] else mask),
        lambda: (*[torch.randn(B, B, D)] * 3, torch.eye(B, dtype=torch.bool)[:, None]),
    ),
    "the mask of other libraries": (lambda: hw.InvertedAttention(HEADS, D), lambda: attend(5)),
    "twice the result": (lambda: attends(out_of=lambda out, mask: 2 * out), lambda: attend(5)),
    "a single position": (
        lambda: like(
            hw.AnnotatedFeedForward,
            lambda self, x: x if x.shape[1] == 1 else hw.AnnotatedFeedForward.forward(self, x),
        )(D, 32),
        lambda: (torch.randn(B, 1, D),),
    ),
    "scaled positions": (
        lambda: like(hw.Positions, lambda self, x: self.dropout(x * 2 + self.pe[:, : x.size(1)]))(D, 0.1), STATES,
    ),
    "GELU of what was dropped": (
        lambda: like(hw.AnnotatedFeedForward, lambda self, x: self.w_2(F.gelu(self.dropout(self.w_1(x)))))(D, 12),
        STATES,
    ),
    "the sum is dropped": (
        lambda: like(hw.Sublayer, lambda self, x, sublayer: self.dropout(x + sublayer(self.norm(x))))(D, 0.1),
        lambda: (*STATES(), torch.tanh),
    ),
    "unscaled embeddings": (
        lambda: like(hw.Embeddings, lambda self, x: self.lut(x))(D, 11), lambda: (torch.arange(6).view(2, 3),),
    ),
    "a layer's first key": (
        lambda: layer(like(hw.AnnotatedEncoderLayer, of_layer)), lambda: (torch.randn(B, 7, D), padding(7, 2)),
    ),
    "a long stack": (
        lambda: like(hw.AnnotatedEncoder, of_long_stack)(layer(), 2), lambda: (torch.randn(B, 120, D), padding(120)),
    ),
    "a skipping stack": (
        lambda: like(hw.AnnotatedEncoder, skips_the_last)(layer(), 3), lambda: (torch.randn(B, 5, D), padding(5)),
    ),
    "tensorflow, first key": (
        lambda: like(hw.TensorflowAttention, of_tensorflow)(D, HEADS),
        lambda: (*[torch.randn(B, 7, D)] * 3, (~padding(7, 2)[:, None]).float()),
    ),
    "d2l, no key": (
        lambda: like(hw.DotProductAttention, of_d2l)(0.1),
        lambda: (*[torch.randn(B, 5, D)] * 3, torch.tensor([5, 0, 2, 0])),
    ),
}  # fmt: skip
"""Modules with a rule, and arguments for which it counts."""


@pytest.mark.parametrize("name", RULES)
def test_a_module_with_a_rule(name: str) -> None:
    make, arguments = RULES[name]
    plain, state = make().eval(), torch.get_rng_state()
    _, fast, report = pair(plain)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were used up"
    assert [row.why for row in report.rows if not row.path] == [DIFFERS]
    args = arguments()
    torch.testing.assert_close(fast(*args), plain(*args), atol=1e-5, rtol=1e-5)


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "in place": lambda: torch.empty(3).uniform_(),
    "our attention": lambda: tfast.attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.5),
    "dropout": lambda: F.dropout(torch.ones(3), 0.5),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.5),
}
DOES_NOT_DRAW: dict[str, Callable[[], Any]] = {
    "dropout of all": lambda: F.dropout(torch.ones(3), 1.0),
    "evaluation": lambda: F.dropout(torch.ones(3), 0.5, False),
    "attention without dropout": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3),
}


@pytest.mark.parametrize("mode", ["always", "in training"])
@pytest.mark.parametrize("name", [*DRAWS, *DOES_NOT_DRAW])
def test_a_module_that_draws_is_left(name: str, mode: str) -> None:
    """The random state is that of before, also where a draw changes no result."""

    class Drawing(hw.AnnotatedFeedForward):
        def forward(self, x: Tensor) -> Tensor:
            if self.training or mode == "always":
                {**DRAWS, **DOES_NOT_DRAW}[name]()
            return super().forward(x)

    m, before = Drawing(D, 32), torch.get_rng_state()
    row = tfast.accelerate(m).rows[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert (row.now is None and "it draws random numbers" in row.why) == (name in DRAWS)


class Flagged(hw.AnnotatedAttention):
    """Attention that is causal if a flag says so."""

    def __init__(self, causal: bool) -> None:
        super().__init__(HEADS, D)
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        ahead = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()[None]
        return super().forward(query, key, value, ahead if self.causal else mask)


class Adapted(hw.AnnotatedFeedForward):
    """Network with an adapter that is zero at first."""

    def __init__(self) -> None:
        super().__init__(D, 32)
        self.gate = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate * x


class ByValue(hw.AnnotatedFeedForward):
    """Network that does more once no number of a bias is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x if bool((self.w_2.bias != 0).all()) else 0)


def by_value(zeros: int) -> nn.Module:
    made = ByValue(D, 32)
    made.w_2.bias.data[:zeros] = 0.0
    return made


class Network(nn.Module):
    """Layers in a list, called one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x, x, x) if isinstance(each, hw.AnnotatedAttention) else each(x)
        return x


ONE_VALUE = "a value of the last layer"
LATER: dict[str, Make] = {
    "a flag": lambda: Network(*map(Flagged, (False, False, True))),
    "an adapter": lambda: Network(hw.AnnotatedFeedForward(D, 32), hw.AnnotatedFeedForward(D, 32), Adapted()),
    "a value": lambda: Network(*(by_value(D) for _ in range(3))),
    ONE_VALUE: lambda: Network(*map(by_value, (1, 1, 0))),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_layer_that_differs(name: str) -> None:
    """The first layer of a class is no proof for the others, neither now nor after a training step.

    A rule for one value of a parameter is seen as long as the parameter stays."""
    plain, fast, report = pair(lambda: LATER[name]().eval())
    x = torch.randn(B, 6, D)
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)
    assert any(row.path == "layers.2" and not row.now for row in report.rows)
    if name == ONE_VALUE:
        return
    for model in (fast, plain):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)


def d2l_heads() -> nn.Module:
    """Return heads of d2l, with sizes and the arguments that its base class keeps."""
    made = hw.D2lHeads(D, HEADS, 0.1)
    made(*[torch.randn(B, 5, D)] * 3, None)
    made.hparams = {"num_heads": HEADS, "plot_train_per_epoch": 2}
    return made


def annotated_heads() -> nn.Module:
    return hw.AnnotatedAttention(HEADS, D)


LACKS = "it has an attribute {}, which its text lacks"
OWN: dict[str, tuple[Make, dict[str, Any], str | None]] = {
    "a flag": (annotated_heads, {"causal": False}, LACKS.format("causal")),
    "a config": (annotated_heads, {"config": SimpleNamespace(causal=False)}, LACKS.format("config")),
    "options": (annotated_heads, {"options": {"causal": False}}, LACKS.format("options")),
    "a factor": (annotated_heads, {"scale": 1.0}, LACKS.format("scale")),
    "a flag that is named as a size": (annotated_heads, {"d_model": True}, LACKS.format("d_model")),
    "a word that is named as a size": (annotated_heads, {"num_layers": "two"}, LACKS.format("num_layers")),
    "a child": (annotated_heads, {"own": nn.Linear(1, 1)}, ""),
    "a parameter": (annotated_heads, {"own": nn.Parameter(torch.ones(1))}, ""),
    "a buffer": (annotated_heads, {"own": nn.Buffer(torch.ones(1))}, "it has a buffer own, which its text lacks"),
    "arguments of another text": (annotated_heads, {"hparams": {"d_model": D}}, LACKS.format("hparams")),
    "an argument that the text lacks": (d2l_heads, {"hparams": {"causal": False}}, LACKS.format("hparams")),
    "that argument as an attribute": (d2l_heads, {"causal": False}, LACKS.format("causal")),
    "sizes": (annotated_heads, {"d_model": D, "num_layers": 2}, None),
    "arguments": (d2l_heads, {"plot_train_per_epoch": 2}, None),
}  # fmt: skip
"""Module, what is set on it, and why it is left: "" for any reason, None if it is swapped."""


@pytest.mark.parametrize("name", OWN)
def test_a_module_with_something_of_its_own(name: str) -> None:
    make, own, why = OWN[name]
    m = make()
    for key, value in own.items():
        setattr(m, key, value)
    row = tfast.accelerate(m).rows[0]
    assert (row.now is None) == (why is not None) and (not why or row.why == why), row


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


def test_a_second_trial_leaves_the_records_of_the_first_call() -> None:
    """Layers that skip padding are children of a stack that is tried later: their calls count no reason."""
    stack = hw.AnnotatedEncoder(layer(), 2).eval()
    norm, stack.norm = stack.norm, nn.Identity()
    report = tfast.accelerate(stack, packed=True)
    stack.norm = norm
    assert tfast.accelerate(stack).swapped and not report.padded_calls.reasons


def test_a_lazy_module_is_left_until_its_sizes_are_known() -> None:
    m, x = hw.D2lHeads(D, HEADS, 0.1), torch.randn(B, 5, D)
    (row,) = tfast.accelerate(m).left
    assert (row.path, row.why) == ("", "its sizes are not known before its first call")
    m(x, x, x, None)
    assert tfast.accelerate(copy.deepcopy(m)).rows[0].now
