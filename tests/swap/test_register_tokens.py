"""``tfast.register(kind, mask=..., tokens=True, check=...)``: with ``packed=True`` the layers run on tokens, equal at
every token. What a call cannot run on tokens keeps its padding, and the report says why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerated import assert_copied_and_undone, copies, pair, state
from registered_texts import ATTENTIONS, KEEP, LAYERS, D, Layer, LengthFirstLayer, Stack, X, registered
from test_packed_stacks import hold, lengths, outcome
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.layers.padded_calls import NO_SOURCE
from transformer_fast.swap import token_layer
from transformer_fast.swap.swapped import FAST
from transformer_fast.swap.token_layer import TOKENS

GAPS = KEEP.clone()
GAPS[2, 3] = False
HIDDEN_FIRST = KEEP.clone()
HIDDEN_FIRST[:, 0] = False


@pytest.fixture(scope="module", autouse=True)
def _registrations() -> Iterator[None]:
    """Register all layers and the attention inside them once."""
    with contextlib.ExitStack() as stack:
        for kind, (fast, inputs) in ATTENTIONS.items():
            stack.enter_context(tfast.register(kind, fast, check=(kind(0.1), inputs(3, 5))))
        for kind, means, as_mask in {kind: (kind, means, mask) for kind, means, mask in LAYERS.values()}.values():
            stack.enter_context(registered(kind, means, as_mask))
        yield
    assert not FAST and not TOKENS


def call_with(mask: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(X.to(next(model.parameters()).dtype), mask)


@pytest.mark.parametrize("keep", [KEEP, GAPS, HIDDEN_FIRST], ids=["right", "gaps", "first key hidden"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_the_padded_ones_at_tokens(name: str, keep: Tensor) -> None:
    kind, _, as_mask = LAYERS[name]
    plain, model, report = pair(lambda: Stack(kind), packed=True)
    found = [outcome(each, call_with(as_mask(keep)), keep) for each in (model, plain)]
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        assert not model(X, as_mask(keep))[~keep].any(), "the padding was computed"
    assert not report.padded_calls.reasons
    row = f"3 {kind.__name__}", "without padding (registered)"
    assert [(r.was, r.now) for r in report.rows if r.path == "layers"] == [row]


@pytest.mark.parametrize("name", ["nn.MultiheadAttention, length first", "JoeyNMT"])
def test_the_batch_size_is_the_length(name: str) -> None:
    kind, _, as_mask = LAYERS[name]
    keep, x = KEEP[:, :4].clone(), X[:, :4]
    keep[1, 0] = False
    plain, model, report = pair(lambda: Stack(kind), packed=True)
    torch.testing.assert_close(model(x, as_mask(keep))[keep], plain(x, as_mask(keep))[keep], atol=1e-5, rtol=1e-4)
    assert not report.padded_calls.reasons


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


def test_layers_that_are_no_list() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.second(self.first(x, mask), mask)

    plain, model, report = pair(Loop, packed=True)
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    assert [row.path for row in report.rows if row.was == "2 Layer"] == [""]


def test_a_packing_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, packing_of = [], token_layer.packing_of
    model = Stack(Layer)
    tfast.accelerate(model, packed=True)
    monkeypatch.setattr(token_layer, "packing_of", lambda *args: made.append(1) or packing_of(*args))
    mask = ~KEEP
    model(X, mask)
    assert len(made) == 1
    mask.numpy()[3, 5] = False  # a write that torch does not count
    keep = ~mask
    plain = Stack(Layer)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(X, mask)[keep], plain(X, mask)[keep])
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


def test_a_call_with_another_mask_keeps_its_padding(sides: Any) -> None:
    plain, model, report = sides
    scores = torch.zeros(KEEP.shape).masked_fill(~KEEP, float("-inf"))
    scores[0, 0] = 0.5
    empty = ~KEEP
    empty[1] = True
    for mask, reason in ((scores, "holds scores"), (empty, NO_SOURCE)):
        keep = mask == 0
        torch.testing.assert_close(model(X, mask)[keep], plain(X, mask)[keep])
        assert any(reason in found for found in report.padded_calls.reasons), report.padded_calls.reasons


def test_a_hook_inside_sees_the_padding(sides: Any) -> None:
    plain, model, report = sides
    found = []
    model.layers[1].norm.register_forward_hook(lambda module, args, out: found.append(out.shape))
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    assert found == [X.shape] and any("has a hook" in reason for reason in report.padded_calls.reasons)


def test_the_authors_errors_stay_theirs() -> None:
    class Picky(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            if x.isinf().any():
                raise ValueError("infinity among the inputs")
            return super().forward(x, mask)

    with registered(Picky, "blocked", lambda keep: ~keep):
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

    model = nn.ModuleDict({"layers": Stack(Derived), "others": Stack(Layer)})
    report = tfast.accelerate(model, packed=True)
    rows = {row.path: (row.was, row.now or row.why) for row in report.rows if row.was[0].isdigit()}
    assert rows == {
        "layers.layers": (
            "3 Derived",
            "tfast.register(Derived, mask=..., tokens=True, check=...) lets them skip padding",
        ),
        "others.layers": ("3 Layer", "without padding (registered)"),
    }
    assert model["layers"](X, ~KEEP)[~KEEP].any() and not model["others"](X, ~KEEP)[~KEEP].any()


def test_a_mask_that_is_given_by_name_only() -> None:
    class Named(Layer):
        def forward(self, x: Tensor, *, keep: Tensor) -> Any:
            return super().forward(x, ~keep)

    sample = Named(), {"x": X, "keep": KEEP}
    with tfast.register(Named, mask="keep", mask_means="keep", tokens=True, check=sample):
        plain, model, _ = pair(lambda: nn.ModuleList([Named()]), packed=True)
    found = model[0](x=X, keep=KEEP)
    torch.testing.assert_close(found[KEEP], plain[0](X, keep=KEEP)[KEEP])
    assert not found[~KEEP].any()


def test_one_layer_is_the_model() -> None:
    plain, model, report = pair(Layer, packed=True)
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    assert not model(X, ~KEEP)[~KEEP].any() and not report.notes
    assert [row.now for row in report.rows if row.was == "1 Layer"] == ["without padding (registered)"]


def test_a_layer_whose_forward_was_replaced_is_left() -> None:
    model = Stack(Layer)
    model.layers[0].forward = lambda x, mask: x
    report = tfast.accelerate(model, packed=True)
    assert [row.why for row in report.rows if row.path == "layers"] == ["its forward was replaced"]
    assert model(X, ~KEEP)[~KEEP].any()


class Both(Layer):
    pass


class FastBoth(Both):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        self.fast = True
        return super().forward(x, mask)


def test_a_class_that_is_registered_in_both_ways() -> None:
    sample = Both(), (X, ~KEEP)
    with tfast.register(Both, FastBoth, check=sample), registered(Both, "blocked", lambda keep: ~keep):
        plain, model, report = pair(lambda: Stack(Both), packed=True)
    for each in (model, *copies(model)):
        torch.testing.assert_close(each(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
        assert not each(X, ~KEEP)[~KEEP].any() and each.layers[0].fast
    report.undo()
    assert type(model.layers[0]) is Both


def test_a_function_of_batch_and_length_makes_the_inputs() -> None:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        keep = lengths(torch.arange(batch) % length + 1, length)
        return {"x": torch.randn(length, batch, D), "key_padding_mask": ~keep}

    class Named(LengthFirstLayer):
        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Any:
            return super().forward(x, key_padding_mask)

    with tfast.register(Named, mask="key_padding_mask", tokens=True, batch_first=False, check=(Named(0.1), inputs)):
        plain, model, _ = pair(lambda: Stack(Named), packed=True)
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
