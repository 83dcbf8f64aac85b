"""Attention by usual names whose formula depends on sizes, on memory, or on how large the scores are."""

from __future__ import annotations

import math
from typing import Any

import handwritten_heads as written
import handwritten_vision as vision
import pytest
import torch
from accelerated import pair, whose
from form_arguments import B, D, L, S, keep, x
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.patterns.base import pattern_of

HEADS, LONG = 2, 40


class Plain(nn.Module):
    """Attention that a subclass changes in one place."""

    fill = -math.inf

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, context, mask)

    def attend(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        given = x if context is None else context
        q, k, v = (
            linear(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, t in ((self.to_q, x), (self.to_k, given), (self.to_v, given))
        )
        scores = self.changed(q @ k.mT / math.sqrt(D // self.heads))
        if mask is not None:
            scores = scores.masked_fill(~self.four(mask, scores), self.fill)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def changed(self, scores: Tensor) -> Tensor:
        return scores

    def four(self, mask: Tensor, scores: Tensor) -> Tensor:
        return mask[:, None, None] if mask.dim() == 2 else mask.unsqueeze(1)


class Window(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        far = (torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])).abs() > 8
        return scores.masked_fill(far, -math.inf)


class LargestScores(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        least = scores.topk(min(8, scores.shape[-1]), -1).values[..., -1:]
        return scores.masked_fill(scores < least, -math.inf)


class Logarithmic(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        return scores * max(1.0, math.log(scores.shape[-1], 8))


class OneSequence(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        return 2.0 * scores if len(scores) == 1 else scores


class OneQuery(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        return 2.0 * scores if scores.shape[-2] == 1 else scores


class Capped(Plain):
    def changed(self, scores: Tensor) -> Tensor:
        return scores.clamp(-50.0, 50.0)


class Truncated(Plain):
    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x[:, -6:], context, mask)


def of_size(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, D)


RULES = {
    Window: (B, LONG), LargestScores: (B, LONG), Logarithmic: (B, LONG), Truncated: (B, LONG), OneSequence: (1, L),
    OneQuery: (B, 1), Capped: (B, L),
}  # fmt: skip


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_rule_by_size_is_another_formula(kind: type[Plain]) -> None:
    plain, m, _ = pair(kind().eval())
    inputs = of_size(*RULES[kind]) * (30.0 if kind is Capped else 1.0)
    torch.testing.assert_close(m(inputs), plain(inputs), rtol=0, atol=0)
    assert pattern_of(m) is None


class LargeGrid(vision.QkvGrid):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.shape[1] * x.shape[2] > 8 else 1.0)


class OneGroup(vision.QkvGroups):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.shape[1] == 1 else 1.0)


class OneWindow(vision.WindowAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x * (2.0 if len(x) == 1 else 1.0), mask)


class LongBert(written.BertSelf):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(hidden_states * (2.0 if hidden_states.shape[1] > 8 else 1.0), attention_mask)


@pytest.mark.parametrize(
    "m", [LargeGrid(D, 2), OneGroup(D, 2), OneWindow(D, (2, 3), 2), LongBert(D, 2)], ids=lambda m: type(m).__name__
)
def test_a_rule_by_size_in_other_layouts(m: nn.Module) -> None:
    """Over a grid, in groups, with a bias by distance, and with a mask that is required."""
    tfast.accelerate(m)
    assert pattern_of(m) is None


def test_without_a_rule_every_size_is_fused() -> None:
    plain, m, _ = pair(Plain().eval())
    for batch, length in {(B, L), *RULES.values()}:
        inputs, context = of_size(batch, length), of_size(batch, S)
        for args in ((inputs,), (inputs, context), (inputs, None, keep(batch, 1, length)),
                     (inputs, context, keep(batch, 1, S))):  # fmt: skip
            torch.testing.assert_close(m(*args), plain(*args), atol=2e-5, rtol=2e-5)
            assert whose(lambda args=args: m(*args)) == {"ours"}


class Ignores(Plain):
    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, context, mask if context is None else None)


class Inverts(Plain):
    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, context, mask if context is None or mask is None else ~mask)


class FarMask(Plain):
    def four(self, mask: Tensor, scores: Tensor) -> Tensor:
        return super().four(mask, scores) | (torch.arange(scores.shape[-1]) > 8)


class LetsThrough(Plain):
    fill = -50.0


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", [Ignores, Inverts, FarMask, LetsThrough], ids=lambda kind: kind.__name__)
def test_a_mask_with_another_rule_is_not_read(kind: type[Plain], dims: int) -> None:
    """With memory, with long inputs, and with scores beyond the number that stands for a blocked one."""
    plain, m, _ = pair(kind().eval())
    inputs, context = of_size(B, L) * 30.0, of_size(B, LONG) * 30.0
    mask = torch.arange(LONG).expand(B, -1) == 0
    mask = mask if dims == 2 else mask[:, None]
    torch.testing.assert_close(m(inputs, context, mask), plain(inputs, context, mask), rtol=0, atol=0)
    assert whose(lambda: m(inputs)) == {"ours"}


def test_minus_ten_thousand_blocks() -> None:
    class Blocks(Plain):
        fill = -1e4

    assert {kind for kind, *_ in reading_of(Blocks())} == {("bool", 2), ("bool", 3)}


def reading_of(m: nn.Module) -> Any:
    tfast.accelerate(m)
    return pattern_of(m).reading.masks  # type: ignore[union-attr]


@pytest.mark.parametrize("batches", [(1, B), (B, 1)])
def test_one_sequence_on_one_side_is_broadcast(batches: tuple[int, int]) -> None:
    plain, m, _ = pair(Plain().eval())
    args = of_size(batches[0], L), of_size(batches[1], S)
    torch.testing.assert_close(m(*args), plain(*args), rtol=0, atol=0)


class ByShape(Plain):
    """A mask is (Lq, Lk) where that is its shape, else (B, Lk)."""

    def four(self, mask: Tensor, scores: Tensor) -> Tensor:
        return mask if mask.dim() == 2 and mask.shape == scores.shape[-2:] else super().four(mask, scores)


class ByShapeOfBatch(Plain):
    def four(self, mask: Tensor, scores: Tensor) -> Tensor:
        per_query = mask.dim() == 2 and len(mask) != len(scores)
        return mask if per_query else super().four(mask, scores)


@pytest.mark.parametrize("kind", [Plain, ByShape, ByShapeOfBatch], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", [(B, L), (L, L), (B, B), (1, L)], ids=str)
def test_two_dimensions_of_a_mask(kind: type[Plain], shape: tuple[int, int]) -> None:
    plain, m, _ = pair(kind().eval())
    inputs, mask = x(shape[1]), keep(*shape)
    try:
        expected = plain(inputs, None, mask)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            m(inputs, None, mask)
        return
    torch.testing.assert_close(m(inputs, None, mask), expected, atol=2e-5, rtol=2e-5)


def test_a_mask_that_fits_two_meanings_runs_the_module_s_own_code() -> None:
    _, m, _ = pair(Plain().eval())
    assert whose(lambda: m(x(B), None, keep(B, B))) == set() and whose(lambda: m(x(), None, keep(B, L))) == {"ours"}
