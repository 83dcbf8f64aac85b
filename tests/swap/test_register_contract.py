"""Promises of a registered layer: a call that shows otherwise keeps its padding, or raises an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerated import pair
from registered_texts import KEEP, LENGTH, D, Layer, Stack, X, registered
from torch import Tensor, nn

import transformer_fast as tfast


@pytest.fixture(scope="module", autouse=True)
def _registration() -> Iterator[None]:
    with registered(Layer, "blocked", lambda keep: ~keep):
        yield


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def unfused(layer: Any) -> None:
    layer.attention = nn.MultiheadAttention(D, 2, batch_first=True)


def compiled(layer: Any) -> None:
    layer.heads = torch.compile(layer.heads, backend="eager")


CHANGES = {
    "a part": (lambda layer: setattr(layer, "norm_of_ff", Mean()), "a module inside a Layer was replaced"),
    "unfused attention": (unfused, "0 attentions inside it run on the kernels, and 1 in its check"),
    "a compiled method": (compiled, "0 attentions inside it run on the kernels, and 1 in its check"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_later_keeps_the_padding(sides: Any, name: str) -> None:
    plain, model, report = sides
    change, reason = CHANGES[name]
    for each in (plain, model):
        change(each.layers[0])
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    assert any(reason in found for found in report.padded_calls.reasons), report.padded_calls.reasons


class Later(Layer):
    """A flag of one layer changes its attention."""

    causal, by_hand = False, False

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        if self.by_hand:
            scores = (x @ x.mT).masked_fill(mask[:, None], float("-inf"))
            return scores.softmax(-1) @ x
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.attention(x, x, x, key_padding_mask=mask, attn_mask=ahead)[0]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("causal", "has a mask that is not padding alone"), ("by_hand", "0 attentions inside it run on the kernels")],
)
def test_a_flag_of_a_later_layer_that_changes_attention_keeps_the_padding(flag: str, reason: str) -> None:
    plain = Stack(Later)
    setattr(plain.layers[2], flag, True)
    with registered(Later, "blocked", lambda keep: ~keep):
        _, model, report = pair(plain, packed=True)
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    (found,) = report.padded_calls.reasons
    assert reason in found


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


def test_a_head_behind_the_list_gets_padded_tensors(sides: Any) -> None:
    """The documented contract: shapes of the plain model, equal at tokens, and 0 at padding."""
    plain, model, _ = sides
    head = nn.LSTM(D, D, batch_first=True)
    found, expected = model(X, ~KEEP), plain(X, ~KEEP)
    assert found.shape == expected.shape
    at_tokens = expected * KEEP[..., None]
    torch.testing.assert_close(head(found)[0], head(at_tokens)[0])


def test_layers_shared_with_another_model() -> None:
    """A teacher with the same layers sees the same: equal at tokens, and 0 at padding."""
    student, plain = Stack(Layer), Stack(Layer)
    plain.load_state_dict(student.state_dict())
    teacher = Stack(Layer)
    teacher.layers = student.layers
    report = tfast.accelerate(student, packed=True)
    found = teacher(X, ~KEEP)
    torch.testing.assert_close(found[KEEP], plain(X, ~KEEP)[KEEP])
    assert not found[~KEEP].any()
    report.undo()
    torch.testing.assert_close(teacher(X, ~KEEP), plain(X, ~KEEP))


def test_more_than_hidden_states_and_a_mask_keeps_the_padding() -> None:
    class Positions(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, shift: float = 0.0) -> Any:
            return super().forward(x, mask) + shift * torch.arange(x.shape[1])[None, :, None]

    with registered(Positions, "blocked", lambda keep: ~keep):
        plain, model, report = pair(lambda: Stack(Positions), packed=True)
    torch.testing.assert_close(model(X, ~KEEP, shift=1.0)[KEEP], plain(X, ~KEEP, shift=1.0)[KEEP])
    (reason,) = report.padded_calls.reasons
    assert reason == "its layers are given shift, which is more than hidden states and a mask"
