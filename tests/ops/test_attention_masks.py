"""The C++ attention kernels see the keys that the definition of a mask allows, on random mixtures of all its parts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_kernels import Kernels, in_pages, outcome
from torch import Tensor

from transformer_fast.masks.definition import visible

D = 8
KINDS = [torch.float32, torch.float64]


class Drawn:
    """Random parts of a mask: arguments of the definition, which :meth:`parts` turns into arguments of a kernel."""

    def __init__(self, number: int) -> None:
        self.choice = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        torch.manual_seed(number)

    def one_of(self, *values: Any) -> Any:
        return self.choice.choice(values)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) > self.one_of(0.1, 0.5, 0.9)

    def diagonals(self, Lq: int, Lk: int) -> dict[str, int | None]:
        """Causal and window with any offsets, also ones that leave no key to some queries or to all."""
        causal = self.one_of(None, None, 0, Lk - Lq, -3, self.choice.randint(-Lq - 2, Lk + 2), 2**50)
        window = self.one_of(None, None, 0, -5, Lk - Lq - 20, self.choice.randint(-Lq - 2, Lk + 2), -(2**50))
        return {"causal": causal, "window": window}

    def documents(self, B: int, Lq: int, Lk: int) -> dict[str, Tensor]:
        """Documents in one run each, in rising order or in any, or scattered; some have no key."""
        most, kind = self.one_of(1, 3, 9, 70), self.one_of("rising", "runs", "scattered", "keys scattered")
        names = self.ints(-(2**31), 2**31 - 1, most) if kind == "runs" else torch.arange(most, dtype=torch.int32)

        def ids(L: int, ordered: bool) -> Tensor:
            own = self.ints(0, most, self.one_of(1, B), L)
            return names[(own.sort(1).values if ordered else own).long()]

        return {"query_ids": ids(Lq, kind != "scattered"), "key_ids": ids(Lk, kind in ("rising", "runs"))}

    def parts(self, B: int, H: int, Lq: int, Lk: int) -> dict[str, Any]:
        given: dict[str, Any] = self.diagonals(Lq, Lk)
        if self.one_of(True, False):
            given["lengths"] = self.ints(0, Lk + 1, *self.one_of((B,), (B, Lq)))
        if self.one_of(True, False):
            given |= self.documents(B, Lq, Lk)
        if self.one_of(True, False, False):
            given["keep"] = self.bools(self.one_of(1, B), self.one_of(1, H), self.one_of(1, Lq), self.one_of(1, Lk))
        if self.one_of(True, False, False):
            given["key_keep"] = self.bools(self.one_of(1, B), self.one_of(1, H), 1, Lk)
        return given

    def sequences(self, B: int) -> tuple[list[int], list[int]]:
        """Numbers of queries and keys of each sequence."""
        return tuple([self.one_of(0, 1, 2, 5, 63, 70, 131, 260) for _ in range(B)] for _ in range(2))


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, zero_empty_rows: bool) -> tuple[Tensor, Tensor]:
    """Output and weights of heads in eager PyTorch, from a mask that broadcasts to (B, H, Lq, Lk)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    weights = (q @ k.mT * D**-0.5).masked_fill(~seen, -1e300).softmax(-1)
    if zero_empty_rows:
        weights = weights * seen.any(-1, keepdim=True)
    return weights @ v, weights


def check(found: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor], what: str) -> None:
    """Hold results to eager's in fp64. A key more or less changes them by a thousandth, at the least."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("Lq", [1, 2, 3, 17, 64, 150])
def test_a_padded_batch(Lq: int, kind: torch.dtype, kernels: Kernels) -> None:
    for number in range(60):
        drawn = Drawn(number)
        B, H, Lk = drawn.one_of(1, 2), drawn.one_of(2, 4), drawn.one_of(1, 7, 64, 129, 300)
        parts = drawn.parts(B, H, Lq, Lk)
        call = kernels.call(D, parts, zero_empty_rows=drawn.one_of(True, False))
        seen = visible(Lq, Lk, **parts).expand(B, H, Lq, Lk)
        tensors = kernels.inputs(B, H, drawn.one_of(1, 2), Lq, Lk, D, kind)
        found = kernels.outcome(tensors, call)
        *qkv, grad_out = (t.double() for t in tensors)
        what = f"{number}: {(B, H, Lq, Lk)} {sorted(n for n, part in parts.items() if part is not None)}"
        out, *grads = outcome(lambda *t, c=call, s=seen: plain(*t, s, c.zero_empty_rows)[0], qkv, grad_out)
        weights = plain(*qkv, seen, call.zero_empty_rows)[1]
        names = ("out", "grad_q", "grad_k", "grad_v", "weights")
        for name, expected in zip(names, (out, *grads, weights), strict=True):
            check(found[name], expected, f"{what}, {name}")
        assert torch.equal(found["weights"] > 0, weights > 0), what


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bottom_right", [False, True], ids=["from the start", "from the end"])
def test_a_packed_batch(bottom_right: bool, kind: torch.dtype, kernels: Kernels) -> None:
    for number in range(60):
        drawn = Drawn(number)
        lengths_q, lengths_k = drawn.sequences(3)
        used = [drawn.choice.randint(0, n) if drawn.one_of(True, False) else n for n in lengths_k]
        parts = drawn.diagonals(max(lengths_q), max(lengths_k))
        if drawn.one_of(True, False):
            parts |= {n: t[0] for n, t in drawn.documents(1, sum(lengths_q), sum(lengths_k)).items()}
        call = kernels.packed_call(lengths_q, lengths_k, D, parts, zero_empty_rows=True)
        seqused_k = torch.tensor(used, dtype=torch.int32)
        call = replace(call, packed=replace(call.packed, bottom_right=bottom_right, seqused_k=seqused_k))
        tensors = kernels.packed_inputs(lengths_q, lengths_k, 2, 1, D, kind)
        found = kernels.outcome(tensors, call)
        first_q = first_k = 0
        for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            rows, columns = slice(first_q, first_q + n), slice(first_k, first_k + used[b])
            first_q, first_k = first_q + n, first_k + m
            own = {"query_ids": rows, "key_ids": columns}
            bounds = {name: part[own[name]][None] if name in own else part for name, part in parts.items()}
            seen = visible(n, used[b], **bounds, shift=used[b] - n if bottom_right else 0)
            places = rows, columns, columns, rows
            *qkv, grad_out = (t[at].double().transpose(0, 1)[None] for t, at in zip(tensors, places, strict=True))
            results = outcome(lambda *t, s=seen: plain(*t, s, True)[0], qkv, grad_out)
            for name, at, expected in zip(
                ("out", "grad_q", "grad_k", "grad_v"), (rows, *places), results, strict=False
            ):
                check(found[name][at], expected[0].transpose(0, 1), f"{number}, sequence {b}: {name}")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("Lq", [1, 2, 70])
def test_a_cache_in_pages(Lq: int, kind: torch.dtype, kernels: Kernels) -> None:
    """More queries than a block of the other kernels: here the masks of several blocks are read in turn."""
    for number in range(40):
        drawn = Drawn(number)
        S = drawn.one_of(80, 130, 400)
        lengths = drawn.ints(Lq, S + 1, 2)
        parts = {**drawn.diagonals(Lq, Lq), **(drawn.documents(2, Lq, S) if drawn.one_of(True, False) else {})}
        q, k, v, _ = kernels.inputs(2, 2, 1, Lq, S, D, kind)
        given = dict(parts)
        if "key_ids" in parts:
            given["key_ids"] = torch.nn.functional.pad(parts["key_ids"], (0, -S % 16))
        *pages, table = in_pages((k, v), 16, lengths)
        found = kernels.decode(q, *(t for t in pages), lengths, table, **given)
        seen = visible(Lq, S, lengths=lengths, shift=lengths - Lq, **parts)
        check(found["out"], plain(q.double(), k.double(), v.double(), seen, True)[0], f"{number}: {(Lq, S)}")
