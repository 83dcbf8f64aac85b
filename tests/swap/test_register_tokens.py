"""``tfast.register(kind, mask=..., tokens=True, check=...)``: with ``packed=True`` the layers run on tokens, equal at
every token and 0 at padding. What a call cannot run on tokens keeps its padding, and the report says why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerated import assert_copied_and_undone, copies, pair, state
from registered_texts import ATTENTIONS, KEEP, LAYERS, LENGTH, D, Layer, LengthFirstLayer, Stack, X, registered
from test_packed_stacks import hold, lengths, outcome
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.layers.padded_calls import NO_SOURCE
from transformer_fast.swap import token_layer
from transformer_fast.swap.swapped import FAST
from transformer_fast.swap.token_layer import TOKENS

GAPS, HIDDEN_FIRST, SQUARE = KEEP.clone(), KEEP.clone(), KEEP[:, :4].clone()
GAPS[2, 3], HIDDEN_FIRST[:, 0], SQUARE[1, 0] = False, False, False


class ByName(Layer):
    def forward(self, x: Tensor, *, keep: Tensor) -> Any:
        return super().forward(x, ~keep)


class Named(LengthFirstLayer):
    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Any:
        return super().forward(x, key_padding_mask)


def named_inputs(batch: int, length: int) -> dict[str, Tensor]:
    keep = lengths(torch.arange(batch) % length + 1, length)
    return {"x": torch.randn(length, batch, D), "key_padding_mask": ~keep}


class Later(Layer):
    """A flag of one layer changes its attention; another argument shifts its result by position."""

    causal, by_hand = False, False

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        if self.by_hand:
            return (x @ x.mT).masked_fill(mask[:, None], float("-inf")).softmax(-1) @ x
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.attention(x, x, x, key_padding_mask=mask, attn_mask=ahead)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None, *, shift: float = 0.0) -> Any:
        return super().forward(x, mask) + shift * torch.arange(x.shape[1])[None, :, None]


class Picky(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if x.isinf().any():
            raise ValueError("infinity among the inputs")
        return super().forward(x, mask)


class Both(Layer):
    pass


class FastBoth(Both):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        self.fast = True
        return super().forward(x, mask)


@pytest.fixture(scope="module", autouse=True)
def _registrations() -> Iterator[None]:
    """Register all layers and the attention inside them once."""
    with contextlib.ExitStack() as stack:
        for kind, (fast, inputs) in ATTENTIONS.items():
            stack.enter_context(tfast.register(kind, fast, check=(kind(0.1), inputs(3, 5))))
        kinds = {kind: (kind, means, mask) for kind, means, mask in LAYERS.values()}
        kinds |= {kind: (kind, "blocked", lambda keep: ~keep) for kind in (Later, Picky, Both)}
        for row in kinds.values():
            stack.enter_context(registered(*row))
        by_name = ByName(), {"x": X, "keep": KEEP}
        stack.enter_context(tfast.register(ByName, mask="keep", mask_means="keep", tokens=True, check=by_name))
        options = {"mask": "key_padding_mask", "tokens": True, "batch_first": False}
        stack.enter_context(tfast.register(Named, **options, check=(Named(0.1), named_inputs)))
        stack.enter_context(tfast.register(Both, FastBoth, check=(Both(), (X, ~KEEP))))
        yield
    assert not FAST and not TOKENS


def call_with(mask: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(X[:, : mask.shape[-1]].to(next(model.parameters()).dtype), mask)


@pytest.mark.parametrize("keep", [KEEP, GAPS, HIDDEN_FIRST, SQUARE], ids=["right", "gaps", "first key", "B == L"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_the_padded_ones_at_tokens(name: str, keep: Tensor) -> None:
    kind, _, as_mask = LAYERS[name]
    plain, model, report = pair(lambda: Stack(kind), packed=True)
    found = [outcome(each, call_with(as_mask(keep)), keep) for each in (model, plain)]
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        assert not call_with(as_mask(keep))(model)[~keep].any(), "the padding was computed"
    assert not report.padded_calls.reasons
    row = f"3 {kind.__name__}", "without padding (registered)"
    assert [(r.was, r.now) for r in report.rows if r.path == "layers"] == [row]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.first(x, mask), mask)


SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], tuple[str, str]]] = {
    "no list": (TwoLayers, lambda m: m(X, ~KEEP), ("", "2 Layer")),
    "one layer": (Layer, lambda m: m(X, ~KEEP), ("", "1 Layer")),
    "a mask by name": (lambda: nn.ModuleList([ByName()]), lambda m: m[0](x=X, keep=KEEP), ("", "1 ByName")),
    "a function made the inputs": (lambda: Stack(Named), lambda m: m(X, ~KEEP), ("layers", "3 Named")),
}  # fmt: skip
"""Model, its call, and the path and name of its layers."""


@pytest.mark.parametrize("name", SHAPES)
def test_layers_that_are_held_or_called_otherwise(name: str) -> None:
    make, call, row = SHAPES[name]
    plain, model, report = pair(make, packed=True)
    torch.testing.assert_close(call(model)[KEEP], call(plain)[KEEP])
    assert not call(model)[~KEEP].any() and not report.notes and not report.padded_calls.reasons
    rows = {(each.path, each.was): each.now for each in report.rows}
    assert rows[row] == "without padding (registered)", rows


def test_layers_of_torch_in_a_loop_of_the_author() -> None:
    class Loop(Stack):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=mask)
            return x

    for batch_first in (True, False):
        make = functools.partial(nn.TransformerEncoderLayer, D, 2, 24, 0.0, batch_first=batch_first)
        turned = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
        call = lambda m, turned=turned: turned(m(turned(X.to(next(m.parameters()).dtype)), ~KEEP))  # noqa: E731
        hold(Loop(make), call, KEEP)


def test_a_packing_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch, sides: Any) -> None:
    plain, model, _ = sides
    made, packing_of, mask = [], token_layer.packing_of, ~KEEP
    monkeypatch.setattr(token_layer, "packing_of", lambda *args: made.append(1) or packing_of(*args))
    model(X, mask)
    assert len(made) == 1
    mask.numpy()[3, 5] = False  # a write that torch does not count
    torch.testing.assert_close(model(X, mask)[~mask], plain(X, mask)[~mask])
    assert len(made) == 2


@pytest.mark.parametrize("name", ["nn.MultiheadAttention", "torch's function", "ESPnet", "fairseq"])
def test_dropout_is_drawn_for_tokens_and_repeats_with_its_seed(name: str) -> None:
    kind, _, as_mask = LAYERS[name]
    model = Stack(lambda: kind(0.5))
    report = tfast.accelerate(model, packed=True)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(outcome(model, call_with(as_mask(KEEP)), KEEP))
    assert all(map(torch.equal, found[0], found[1])) and not torch.equal(found[0][0], found[2][0])
    assert not report.padded_calls.reasons


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def scores() -> Tensor:
    mask = torch.zeros(KEEP.shape).masked_fill(~KEEP, float("-inf"))
    mask[0, 0] = 0.5
    return mask


UNFUSED = "0 attentions inside it run on the kernels, and 1 in its check"
PADDED: dict[str, tuple[type[Layer], Callable[[Any], Any], Tensor, dict[str, Any], str]] = {
    "a part": (Layer, lambda m: setattr(m[0], "norm_of_ff", Mean()), ~KEEP, {}, "a module inside a Layer was replaced"),
    "unfused attention": (
        Layer, lambda m: setattr(m[0], "attention", nn.MultiheadAttention(D, 2, batch_first=True)), ~KEEP, {}, UNFUSED,
    ),
    "a compiled method": (
        Layer, lambda m: setattr(m[0], "heads", torch.compile(m[0].heads, backend="eager")), ~KEEP, {}, UNFUSED,
    ),
    "a hook": (
        Layer, lambda m: m[0].norm.register_forward_hook(lambda _, args, out: out + out.mean(1, keepdim=True)),
        ~KEEP, {}, "has a hook",
    ),
    "scores": (Layer, lambda m: None, scores(), {}, "holds scores"),
    "no token": (
        Layer, lambda m: None, ~KEEP | (torch.arange(4) == 1)[:, None], {}, NO_SOURCE,
    ),
    "a causal layer": (
        Later, lambda m: setattr(m[2], "causal", True), ~KEEP, {}, "has a mask that is not padding alone",
    ),
    "a layer by hand": (
        Later, lambda m: setattr(m[2], "by_hand", True), ~KEEP, {}, "0 attentions inside it run on the kernels",
    ),
    "more arguments": (
        Later, lambda m: None, ~KEEP, {"shift": 1.0},
        "its layers are given shift, which is more than hidden states and a mask",
    ),
}  # fmt: skip
"""Class of the layers, what is changed in them, mask, further arguments, and the reason of the padding."""


@pytest.mark.parametrize("name", PADDED)
def test_a_call_that_keeps_its_padding(name: str) -> None:
    kind, change, mask, more, reason = PADDED[name]
    plain, model, report = pair(lambda: Stack(kind), packed=True)
    for each in (plain, model):
        change(each.layers)
    model.load_state_dict(plain.state_dict())
    keep = mask == 0
    torch.testing.assert_close(model(X, mask, **more)[keep], plain(X, mask, **more)[keep])
    assert report.padded_calls.reasons and all(reason in found for found in report.padded_calls.reasons)


def test_layers_with_other_masks_raise_an_error(sides: Any) -> None:
    """The second mask keeps positions at which the first layer returns 0."""
    plain, model, _ = sides
    first, second, _ = model.layers
    x = first(X, ~KEEP)
    for mask in (~torch.ones_like(KEEP), None):
        with pytest.raises(RuntimeError, match="the masks of these layers differ"):
            second(x, mask)
    fewer = KEEP & (torch.arange(LENGTH) < torch.tensor([4, 2, 3, 4])[:, None])
    padded = plain.layers[0](X, ~KEEP)
    for keep in (fewer, KEEP.clone()):
        torch.testing.assert_close(second(x, ~keep)[keep], plain.layers[1](padded, ~keep)[keep])


def test_layers_shared_with_another_model() -> None:
    """A teacher with the same layers sees the same: equal at tokens, and 0 at padding."""
    plain, student, report = pair(lambda: Stack(Layer), packed=True)
    teacher = Stack(Layer)
    teacher.layers = student.layers
    found = teacher(X, ~KEEP)
    torch.testing.assert_close(found[KEEP], plain(X, ~KEEP)[KEEP])
    assert not found[~KEEP].any()
    report.undo()
    torch.testing.assert_close(teacher(X, ~KEEP), plain(X, ~KEEP))


def test_the_authors_errors_stay_theirs() -> None:
    model = Stack(Picky)
    report = tfast.accelerate(model, packed=True)
    with pytest.raises(ValueError, match="infinity among the inputs"):
        model(X.masked_fill(KEEP[..., None], float("inf")), ~KEEP)
    assert not model(X, ~KEEP)[~KEEP].any() and len(report.padded_calls.reasons) == 1


def test_copies_a_second_call_and_undo(sides: Any) -> None:
    plain, model, report = sides
    assert model.state_dict().keys() == plain.state_dict().keys() and not model(X, ~KEEP)[~KEEP].any()
    assert "padding is skipped in layers" in str(report).splitlines()[0]
    assert_copied_and_undone(model, report, state(plain), lambda m: m(X, ~KEEP), packed=True)
    assert torch.equal(model(X, ~KEEP), plain(X, ~KEEP))


def test_a_compiled_model_runs_with_its_padding(sides: Any) -> None:
    plain, model, _ = sides
    fast = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_layer_has_no_padding(reentrant: bool) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, mask, use_reentrant=reentrant)
            return x

    plain, model, report = pair(lambda: Checkpointed(Layer), packed=True)
    x = X.clone().requires_grad_()
    found = [outcome(each, lambda m: m(x, ~KEEP), KEEP) for each in (model, plain)]
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)
    assert not report.padded_calls.reasons


@pytest.mark.parametrize("name", ["nn.MultiheadAttention", "torch's function", "ESPnet", "RecBole"])
def test_bfloat16(name: str) -> None:
    kind, _, as_mask = LAYERS[name]
    plain, model, report = pair(lambda: Stack(kind).bfloat16(), packed=True)
    mask = as_mask(KEEP)
    mask = mask.bfloat16() if mask.is_floating_point() else mask
    found = [call_with(mask)(each)[KEEP] for each in (model, plain)]
    torch.testing.assert_close(*found, atol=0.1, rtol=0.1)
    assert not report.padded_calls.reasons


def test_what_is_not_registered_keeps_its_padding() -> None:
    class Derived(Layer):
        pass

    model = nn.ModuleDict({"layers": Stack(Derived), "others": Stack(Layer), "replaced": Stack(Layer)})
    model["replaced"].layers[0].forward = functools.partial(model["replaced"].layers[0].forward)
    report = tfast.accelerate(model, packed=True)
    said = "tfast.register(Derived, mask=..., tokens=True, check=...) lets them skip padding"
    assert {row.path: (row.was, row.now or row.why) for row in report.rows if row.was[0].isdigit()} == {
        "layers.layers": ("3 Derived", said), "others.layers": ("3 Layer", "without padding (registered)"),
        "replaced.layers": ("3 Layer", "its forward was replaced"),
    }  # fmt: skip
    computed = {name: bool(stack(X, ~KEEP)[~KEEP].any()) for name, stack in model.items()}
    assert computed == {"layers": True, "others": False, "replaced": True}


def test_a_class_that_is_registered_in_both_ways() -> None:
    plain, model, report = pair(lambda: Stack(Both), packed=True)
    for each in (model, *copies(model)):
        torch.testing.assert_close(each(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
        assert not each(X, ~KEEP)[~KEEP].any() and each.layers[0].fast
    report.undo()
    assert type(model.layers[0]) is Both
