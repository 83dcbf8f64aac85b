"""On a CPU a batch is encoded in parts, each as wide as its longest source; outputs equal those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_transformer import answers, tiny, tokens_of
from torch import Tensor, nn

from transformer_fast import Transformer
from transformer_fast.generation import decoding
from transformer_fast.generation.forms import form_of
from transformer_fast.models import Encoder

WIDTH = 40


class Renamed(Encoder):
    """Encoder of a user's own class."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the shapes of the encoders' inputs."""
    shapes: list[tuple[int, int]] = []
    forward = Encoder.forward
    monkeypatch.setattr(
        Encoder, "forward", lambda self, src, mask: shapes.append(src.shape) or forward(self, src, mask)
    )
    return shapes


def sources(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return ids (B, WIDTH), and a keep mask (B, 1, WIDTH) of these lengths."""
    src = torch.randint(2, 30, (len(lengths), WIDTH), generator=torch.Generator().manual_seed(3))
    return src, (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).unsqueeze(1)


def encoded(model: Transformer, src: Tensor, mask: Tensor | None) -> Tensor:
    with torch.inference_mode():
        return decoding._encode(form_of(model), src, mask)


@pytest.mark.parametrize("order", ["longest first", "shortest first", "mixed"])
def test_parts_are_as_wide_as_their_longest_source(seen: list[tuple[int, int]], order: str) -> None:
    lengths = sorted((i % WIDTH + 1 for i in range(120)), reverse=True)
    if order != "longest first":
        lengths = lengths[::-1] if order == "shortest first" else [*lengths[::2], *lengths[1::2]]
    src, mask = sources(lengths)
    model = tiny()
    memory = encoded(model, src, mask)
    parts, whole = list(seen), model.encoder(src, mask).detach()
    read = mask.squeeze(1)
    torch.testing.assert_close(memory[read], whole[read], rtol=1e-5, atol=1e-5)
    assert memory.shape == whole.shape and len(parts) > 1
    assert sum(rows for rows, _ in parts) == len(lengths)
    at = 0
    for rows, width in parts:
        assert rows == 1 or rows * width <= decoding.ENCODED_TOKENS
        assert width == max(lengths[at : at + rows])
        assert not memory[at : at + rows, width:].any()
        at += rows


def swap_layer(model: Transformer) -> None:
    model.encoder.layers[0] = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True).eval()
    model.encoder.layers[0].forward = lambda x, mask: x  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "another class": lambda model: setattr(model.encoder, "__class__", Renamed),
    "a hook": lambda model: model.encoder.register_forward_hook(lambda *_: None),
    "another layer": swap_layer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_encoder_is_given_the_whole_width(seen: list[tuple[int, int]], change: str) -> None:
    model = tiny()
    CHANGES[change](model)
    encoded(model, *sources([5, 4, 3]))
    assert seen == [(3, WIDTH)]


def test_what_is_more_than_lengths_is_given_whole(seen: list[tuple[int, int]]) -> None:
    model, (src, mask) = tiny(), sources([5, 4, 3])
    holes = mask.clone()
    holes[0, 0, 1] = False
    for given in (None, holes, mask & (torch.arange(3) > 0)[:, None, None]):
        encoded(model, src, given)
    assert seen == [(3, WIDTH)] * 3


def test_a_sentence_of_nothing_but_padding_has_the_answer_it_has_alone() -> None:
    model = tiny(1)
    src, _ = sources([0, 6, 9])
    together = answers(model, (src, torch.tensor([0, 6, 9])), beam=3, max_length=12)
    alone = answers(model, (src[:1], torch.tensor([0])), beam=3, max_length=12)
    assert tokens_of(together[:1]) == tokens_of(alone)
