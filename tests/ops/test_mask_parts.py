"""Parts of a mask as the kernels read them, and masks of some queries, against the definition, on random masks."""

from __future__ import annotations

import operator
import random
from functools import reduce

import pytest
import torch
from torch import Tensor

from transformer_fast import AttentionMask
from transformer_fast.explain import tile_classes
from transformer_fast.masks.kernel_parts import kernel_parts
from transformer_fast.masks.parts import of_queries
from transformer_fast.ops.attention_checks import kernel_mask


class Drawn:
    """Random masks of tiny sizes."""

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


CPU = torch.device("cpu")


@pytest.mark.parametrize("part", range(4))
def test_what_the_kernels_read_is_the_definition(part: int) -> None:
    """End keys per query, and a keep mask, of intervals and unions."""
    for number in range(part, 10_000, 4):
        drawn = Drawn(number)
        mask, shape = drawn.mask(), (drawn.B, drawn.H, drawn.Lq, drawn.Lk)
        own = AttentionMask(first_keys=mask.first_keys, end_keys=mask.end_keys, unions=mask.unions)
        end, keep = kernel_parts(mask, drawn.Lq, drawn.Lk, CPU)
        seen = torch.ones(1, 1, 1, drawn.Lk, dtype=torch.bool)
        if end is not None:
            assert end.dtype == torch.int64 and end.dim() == 2
            seen = seen & (torch.arange(drawn.Lk) < end[:, None, :, None])
        if keep is not None:
            assert keep.dtype == torch.bool and all(n in (1, limit) for n, limit in zip(keep.shape, shape, strict=True))
            seen = seen & keep
        assert torch.equal(seen.expand(shape), own.visible(drawn.Lq, drawn.Lk, None).expand(shape))


def test_the_mask_of_some_queries() -> None:
    for number in range(3_000):
        drawn = Drawn(number)
        mask, B, H, Lq, Lk = drawn.mask(), drawn.B, drawn.H, drawn.Lq, drawn.Lk
        if drawn.chance(0.5):
            mask &= AttentionMask.bias(torch.randn(drawn.choice.choice([1, B]), 1, Lq, Lk, generator=drawn.generator))
        mask &= AttentionMask.alibi(torch.rand(H, generator=drawn.generator), drawn.choice.randint(-3, 3))
        first = drawn.choice.randint(0, Lq)
        end = drawn.choice.randint(first, Lq)
        some, shape = of_queries(mask, first, end), (B, H, end - first, Lk)
        expected = mask.dense(Lq, Lk).expand(B, H, Lq, Lk)[:, :, first:end]
        assert torch.equal(some.dense(end - first, Lk).expand(shape), expected)
        added = mask.added(Lq, Lk).expand(B, H, Lq, Lk)[:, :, first:end]
        assert torch.equal(some.added(end - first, Lk).expand(shape), added)


def test_tile_classes_are_the_definition() -> None:
    for number in range(500):
        drawn = Drawn(number)
        B, Lq, Lk = (max(n, 1) for n in (drawn.B, drawn.Lq, drawn.Lk))
        drawn.B, drawn.Lq, drawn.Lk = B, Lq, Lk
        mask = drawn.mask()
        tile = drawn.choice.randint(1, 4), drawn.choice.randint(1, 4)
        allowed = mask.visible(Lq, Lk, None).expand(B, -1, Lq, Lk)
        classes = tile_classes(mask, B, Lq, Lk, tile)
        assert classes.shape == (*allowed.shape[:2], -(-Lq // tile[0]), -(-Lk // tile[1]))
        for row, line in enumerate(allowed.split(tile[0], 2)):
            for column, pairs in enumerate(line.split(tile[1], 3)):
                kind = pairs.flatten(2).any(2).int() + (pairs.flatten(2).all(2) & (pairs.shape[3] == tile[1]))
                assert torch.equal(classes[:, :, row, column].int(), kind.int())


def test_on_a_cpu_the_lengths_are_read_in_every_call() -> None:
    q, prefix = torch.zeros(1, 1, 4, 8), torch.tensor([3])
    mask = AttentionMask.prefix(prefix)
    assert kernel_mask(mask, q, q)[1].tolist() == [[3, 3, 3, 4]]
    prefix.numpy()[0] = 2  # no write that PyTorch counts
    assert kernel_mask(mask, q, q)[1].tolist() == [[2, 2, 3, 4]]


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
