"""``tfast.register`` with ``tokens=True``: what keeps its padding, other signatures, and both ways at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from registered_texts import D, Layer, LengthFirstLayer, Stack
from test_packed_stacks import lengths
from test_register_tokens import KEEP, X, _registrations, call_with, registered  # noqa: F401
from torch import Tensor, nn

import transformer_fast as tfast

pytestmark = pytest.mark.usefixtures("proven_once")


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
    report = tfast.accelerate(Stack(Derived), packed=True)
    assert report.notes == [
        "packed: padding stays in layers (3 Derived): "
        "tfast.register(Derived, mask=..., tokens=True, check=...) lets them skip padding"
    ]


def test_more_than_hidden_states_and_a_mask_keeps_the_padding() -> None:
    class Positions(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, shift: float = 0.0) -> Any:
            return super().forward(x, mask) + shift * torch.arange(x.shape[1])[None, :, None]

    plain = Stack(Positions)
    model = copy.deepcopy(plain)
    with registered(Positions, "blocked", lambda keep: ~keep):
        report = tfast.accelerate(model, packed=True)
    torch.testing.assert_close(model(X, ~KEEP, shift=1.0)[KEEP], plain(X, ~KEEP, shift=1.0)[KEEP])
    (reason,) = report.padded_calls.reasons
    assert reason == "its layers are given shift, which is more than hidden states and a mask"


def test_a_mask_that_is_given_by_name_only() -> None:
    class Named(Layer):
        def forward(self, x: Tensor, *, keep: Tensor) -> Any:
            return super().forward(x, ~keep)

    sample = Named(), {"x": X, "keep": KEEP}
    with tfast.register(Named, mask="keep", mask_means="keep", tokens=True, check=sample):
        plain = Named()
        model = nn.ModuleList([copy.deepcopy(plain)])
        tfast.accelerate(model, packed=True)
    found = model[0](x=X, keep=KEEP)
    torch.testing.assert_close(found[KEEP], plain(X, keep=KEEP)[KEEP])
    assert not found[~KEEP].any()


def test_one_layer_is_the_model() -> None:
    plain = Layer()
    model = copy.deepcopy(plain)
    report = tfast.accelerate(model, packed=True)
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
    plain = Stack(Both)
    model = copy.deepcopy(plain)
    sample = Both(), (X, ~KEEP)
    with tfast.register(Both, FastBoth, check=sample), registered(Both, "blocked", lambda keep: ~keep):
        report = tfast.accelerate(model, packed=True)
    for each in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
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
        model = Stack(Named)
        plain = copy.deepcopy(model)
        tfast.accelerate(model, packed=True)
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
