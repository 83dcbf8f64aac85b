"""``Padder``: tokens of padded tensors and back, and calls that keep their padding."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transformer_fast.layers.padded_calls import NO_SOURCE, NO_TOKEN, PaddedCalls, StaysPaddedError, recorded
from transformer_fast.layers.padder import Padder, without_padding
from transformer_fast.masks.packing import packing_of
from transformer_fast.tensor_cache import get_or_compute

KEEP = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 1]]).bool()
FULL = torch.ones(3, 4, dtype=torch.bool)
SOURCE = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


def padder(own: Tensor, source: Tensor | None = None) -> Padder:
    return Padder(*(packing_of(keep, *keep.shape) for keep in (own, source) if keep is not None))


def test_tokens_are_taken_out_and_put_back() -> None:
    both = padder(KEEP, SOURCE)
    x, memory = torch.randn(3, 4, 2), torch.randn(3, 3, 5)
    tokens, source = both.remove(x, memory)
    assert torch.equal(tokens, x[KEEP]) and torch.equal(source, memory[SOURCE])
    for result in (tokens, tokens.unsqueeze(0), (tokens, "weights")):
        restored = both.restore(result)
        padded, *others = restored if isinstance(restored, tuple) else (restored,)
        assert torch.equal(padded, x * KEEP[..., None]) and others == (
            ["weights"] if result[1:] == ("weights",) else []
        )
    own, cross = both.masks
    assert own.queries is own.keys is cross.queries is both.own and cross.keys is both.source


@pytest.mark.parametrize("written", [False, True])
def test_the_next_layer_reads_the_tokens_of_the_last_one_unless_they_were_written_to(written: bool) -> None:
    first, x = padder(KEEP), torch.randn(3, 4, 2, requires_grad=True)
    padded = first.restore(first.remove(x)[0] * 3)
    if written:
        padded.add_(1)
    (again,) = first.remove(padded)
    assert torch.equal(again, padded[KEEP]) and (again.grad_fn.name() == "TakeBackward") == (not written)
    assert torch.equal(padder(KEEP).remove(padded)[0], again)
    weights = torch.randn(again.shape)
    (grad,) = torch.autograd.grad(again, x, weights)
    assert torch.equal(grad[KEEP], 3 * weights) and not grad[~KEEP].any()


@pytest.mark.parametrize(
    ("own", "source", "pays"),
    [(KEEP, None, True), (FULL, None, False), (FULL, FULL, False), (FULL, SOURCE, True), (KEEP, FULL, True)],
)
def test_it_pays_where_there_is_padding(own: Tensor, source: Tensor | None, pays: bool) -> None:
    assert padder(own, source).pays == pays


@pytest.mark.parametrize(
    ("own", "source", "fails"),
    [(KEEP, None, False), (SOURCE, None, True), (KEEP, SOURCE, True), (SOURCE, SOURCE, False), (SOURCE, FULL, False)],
)
def test_a_query_without_keys_is_refused(own: Tensor, source: Tensor | None, fails: bool) -> None:
    if fails:
        with pytest.raises(StaysPaddedError, match=NO_SOURCE):
            padder(own, source).check_sources()
    else:
        padder(own, source).check_sources()


def refused() -> Any:
    raise StaysPaddedError("a reason")


@pytest.mark.parametrize(
    ("prepare", "reason", "tokens"),
    [
        (lambda: None, None, []),
        (lambda: (padder(FULL), refused), None, []),
        (lambda: (padder(KEEP), refused), "a reason", [None]),
        (refused, "a reason", [None]),
        (lambda: (padder(KEEP & False), refused), NO_TOKEN, [None]),
        (lambda: (padder(KEEP, SOURCE & False), refused), NO_TOKEN, [None]),
        (lambda: (padder(KEEP), lambda: torch.ones(7, 2)), None, [7]),
    ],
    ids=["nothing", "no padding", "a refusal on tokens", "a refusal before", "no token", "no source", "tokens"],
)
def test_a_call_is_computed_on_tokens_or_says_why_not(
    prepare: Callable[[], Any], reason: str | None, tokens: list[int | None]
) -> None:
    calls, module = PaddedCalls(), nn.Identity()
    with recorded() as passes:
        result = without_padding(module, calls, torch.zeros(3, 4, 2), prepare)
    assert calls.reasons == ({} if reason is None else {reason: 1})
    assert [(each.positions, each.packing and each.packing.total) for each in passes] == [(12, n) for n in tokens]
    assert (result is None) == (tokens != [7])
    assert result is None or torch.equal(result, KEEP[..., None].expand(3, 4, 2).float())


@pytest.mark.parametrize("way", ["torch.save", "weights only", "pickle", "deepcopy"])
def test_files_and_copies_do_not_hold_the_tokens(way: str) -> None:
    padding = padder(KEEP)
    padded = padding.restore(torch.randn(7, 2))
    get_or_compute(padded, ("any",), (), lambda: print)  # a cached result of any class
    file = io.BytesIO()
    torch.save(padded, file)
    file.seek(0)
    if way == "deepcopy":
        other = copy.deepcopy(padded)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(padded))
    else:
        other = torch.load(file, weights_only=way == "weights only")
    assert torch.equal(other, padded) and not any(other.__dict__.values())
    assert torch.equal(padding.remove(other)[0], other[KEEP])
    assert get_or_compute(other, ("any",), (), lambda: 3) == 3
