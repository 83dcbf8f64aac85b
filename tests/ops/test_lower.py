"""Intervals and bits of a mask against its definition, on random masks."""

from __future__ import annotations

import operator
import random
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import AttentionMask
from transformer_fast.masks.definition import visible
from transformer_fast.masks.lower import Lowered, allowed, lower
from transformer_fast.masks.tile_share import tile_classes
from transformer_fast.ops.attention_checks import kernel_mask


class Drawn:
    """A random mask of tiny sizes: a mask, the shift of its positions, and what the definition says."""

    def __init__(self, number: int) -> None:
        self.choice = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.B, self.H = self.size(3), 2
        self.Lq, self.Lk = self.size(6), self.size(7)

    def size(self, most: int) -> int:
        return 0 if self.chance(0.05) else self.choice.randint(1, most)

    def chance(self, p: float) -> bool:
        return self.choice.random() < p

    def offset(self) -> int:
        return self.choice.choice([self.choice.randint(-9, 9), 10**9, -(10**9)] if self.chance(0.1) else [0, -2, 3])

    def bools(self, *shape: int) -> Tensor:
        """A random mask, or one run of keys per row."""
        if self.chance(0.5):
            return torch.rand(shape, generator=self.generator) > 0.4
        j = torch.arange(shape[-1])
        first, end = (self.ints(0, shape[-1] + 1, *shape[:-1], 1) for _ in range(2))
        return (j >= first) & (j < end)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def ids(self, batch: int, length: int) -> Tensor:
        ids = self.ints(0, 3, batch, length)
        return ids.sort(1).values if self.chance(0.5) else ids

    def mask(self, depth: int = 0) -> AttentionMask:
        B, H, Lq, Lk, mask = self.B, self.H, self.Lq, self.Lk, AttentionMask()
        one_of = self.choice.choice
        if self.chance(0.25):
            keep = self.bools(one_of([1, B]), one_of([1, H]), Lq, one_of([1, Lk]))
            mask &= AttentionMask(keep_mask=keep)
        if self.chance(0.25):
            mask &= AttentionMask(key_keep_mask=self.bools(one_of([1, B]), one_of([1, H]), 1, one_of([1, Lk])))
        if self.chance(0.4):
            dtype = one_of([torch.int32, torch.int64, torch.uint8])
            mask &= AttentionMask.lengths(self.ints(0, Lk + 1, *one_of([(B,), (1,), (B, Lq), (B, 1)])).to(dtype))
        if self.chance(0.4):
            mask &= AttentionMask.causal(self.offset())
        if self.chance(0.4):
            mask &= AttentionMask(window_offset=self.offset())
        for _ in range(one_of([0, 0, 0, 1, 2])):
            mask &= AttentionMask.prefix(self.ints(-1, Lk + 3, one_of([1, B])), self.offset())
        if self.chance(0.3):
            shapes = [(Lq,), (1,), (B, Lq), (1, Lq), (B, 1), (B, H, Lq), (1, H, 1)]
            bounds = (self.ints(-2, Lk + 3, *one_of(shapes)) if self.chance(0.7) else None for _ in range(2))
            mask &= AttentionMask.intervals(*bounds)
        if depth < 2 and self.chance(0.3):
            mask &= reduce(operator.or_, (self.mask(depth + 1) for _ in range(self.choice.randint(2, 3))))
        if self.chance(0.3):
            mask &= AttentionMask.documents(self.ids(one_of([1, B]), Lq), self.ids(one_of([1, B]), Lk))
        return mask

    def shift(self) -> int | Tensor:
        return self.choice.choice([0, 0, self.Lk - self.Lq, self.ints(-7, 8, self.B)])


def check(found: Lowered, expected: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Check intervals and bits."""
    assert torch.equal(found.dense().expand(shape), expected.expand(shape))
    assert found.begin.dtype == found.end.dtype == torch.int32 and found.begin.shape == found.end.shape
    assert all(n in (1, limit) for n, limit in zip(found.begin.shape, shape, strict=False))
    assert found.begin.shape[2] == shape[2]
    assert bool(((found.begin >= 0) & (found.begin <= found.end) & (found.end <= shape[3])).all())


@pytest.mark.parametrize("part", range(4))
def test_intervals_and_bits_are_the_definition(part: int) -> None:
    for number in range(part, 10_000, 4):
        drawn = Drawn(number)
        mask, shift = drawn.mask(), drawn.shift()
        shape = drawn.B, drawn.H, drawn.Lq, drawn.Lk
        expected = mask.visible(drawn.Lq, drawn.Lk, None, shift)
        found = lower(mask, drawn.Lq, drawn.Lk, shift=shift, exact=number % 2 == 0)
        check(found, expected, shape)
        seen = allowed(mask, drawn.Lq, drawn.Lk, None, shift=shift)
        assert torch.equal((torch.tensor(True) if seen is None else seen).expand(shape), expected.expand(shape))


def test_what_is_an_interval() -> None:
    """Bits are kept for scattered parts alone, and without a read for every part that may be scattered."""
    scattered, run = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1]])
    keeps = AttentionMask.keep(scattered.bool()), AttentionMask.keep(run.bool())
    documents = AttentionMask.documents(scattered), AttentionMask.documents(run)
    square = AttentionMask.keep(torch.ones(4, 4).tril().bool()), AttentionMask.keep(torch.eye(4).flip(0).bool())
    by_arithmetic = AttentionMask.lengths(torch.tensor([3])) & AttentionMask.window(2) & AttentionMask.causal()
    by_arithmetic &= AttentionMask.prefix(torch.tensor([2])) & AttentionMask.keep(torch.ones(4, 1).bool())
    for mask, exact, bits in [
        *((mask, True, True) for mask in (keeps[0], documents[0], keeps[0] & documents[1], keeps[1] & documents[0])),
        *((mask, True, False) for mask in (keeps[1], documents[1], *square, keeps[1] & documents[1], by_arithmetic)),
        *((mask, False, True) for mask in (*keeps, *documents, *square)),
        (AttentionMask.lengths(torch.tensor([3])) & AttentionMask.window(2), False, False),
        (AttentionMask(), False, False),
    ]:
        assert (lower(mask, 4, 4, exact=exact).bits is not None) == bits, (mask, exact)
    hull = lower(keeps[1], 4, 4)
    assert hull.begin.tolist() == [[[2] * 4]] and hull.end.tolist() == [[[4] * 4]]  # narrowed without a read


def test_tile_classes_are_the_definition() -> None:
    for number in range(500):
        drawn = Drawn(number)
        mask, (B, Lq, Lk) = drawn.mask(), (max(n, 1) for n in (drawn.B, drawn.Lq, drawn.Lk))
        drawn.B, drawn.Lq, drawn.Lk = B, Lq, Lk
        mask = drawn.mask()
        tile = drawn.choice.randint(1, 4), drawn.choice.randint(1, 4)
        ids = dict(zip(("query_ids", "key_ids"), mask.document_ids or (), strict=False))
        parts: dict[str, Any] = {"keep": mask.keep_mask, "key_keep": mask.key_keep_mask, "lengths": mask.key_lengths}
        parts |= {"causal": mask.causal_offset, "window": mask.window_offset, **ids}
        allowed = visible(Lq, Lk, **parts).expand(B, -1, Lq, Lk)
        classes = tile_classes(B, Lq, Lk, tile, **parts)
        assert classes.shape == (*allowed.shape[:2], -(-Lq // tile[0]), -(-Lk // tile[1]))
        for row, line in enumerate(allowed.split(tile[0], 2)):
            for column, pairs in enumerate(line.split(tile[1], 3)):
                kind = pairs.flatten(2).any(2).int() + (pairs.flatten(2).all(2) & (pairs.shape[3] == tile[1]))
                assert torch.equal(classes[:, :, row, column].int(), kind.int())


def test_off_a_cpu_the_result_is_kept_until_a_tensor_is_written_to() -> None:
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    mask = AttentionMask.lengths(lengths) & AttentionMask.keep(torch.ones(5, dtype=torch.bool, device="meta"))
    first = lower(mask, 4, 5)
    assert first.begin.device.type == "meta" and first.begin.shape == (2, 1, 4)
    assert lower(mask, 4, 5) is first
    assert lower(mask & AttentionMask.causal(), 4, 5) is not first and lower(mask, 3, 5) is not first
    lengths += 1
    assert lower(mask, 4, 5) is not first
    on_cpu = AttentionMask.lengths(torch.tensor([3]))
    assert lower(on_cpu, 1, 4).end.item() == 3
    on_cpu.key_lengths.numpy()[0] = 2  # no write that PyTorch counts
    assert lower(on_cpu, 1, 4).end.item() == 2


def test_the_lengths_of_a_prefix_are_made_once_off_a_cpu() -> None:
    q, k = torch.empty(2, 1, 4, 8, device="meta"), torch.empty(2, 1, 5, 8, device="meta")
    prefix = torch.zeros(2, dtype=torch.int64, device="meta")
    mask = AttentionMask.prefix(prefix)
    keep, first = kernel_mask(mask, q, k)
    assert keep is None and first is not None and (first.shape, first.dtype) == ((2, 4), torch.int32)
    assert kernel_mask(AttentionMask.prefix(prefix), q, k)[1] is first
    for other in (AttentionMask.prefix(prefix, 1), mask & AttentionMask.lengths(prefix), mask & mask):
        assert kernel_mask(other, q, k)[1] is not first
    prefix += 1
    assert kernel_mask(mask, q, k)[1] is not first
