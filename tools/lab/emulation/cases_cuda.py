"""The calls that `nox -s lab` runs on the compiled CUDA kernels of csrc/cuda, held to the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from transformer_fast.reference import embedding as reference
from transformer_fast.testing import assert_as_exact_as_eager, poisoned_memory

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABULARY, POSITIONS = 9, 12
IDS: dict[str, Callable[[], Tensor]] = {
    "distinct": lambda: torch.arange(VOCABULARY).flip(0).view(3, 3),
    "hot": lambda: torch.full((3, 60), 7),
    "skewed": lambda: (torch.rand(6, 70) ** 4 * VOCABULARY).long(),
    "outside": lambda: torch.tensor([[0, -1, 3], [VOCABULARY, 2**40, 4]]),
}


def cuda_cases() -> Iterator[tuple[str, Callable[[SimpleNamespace], None], bool]]:
    """(name, check, whether the result has the same bits in every order of warps): a check is given the operators of
    csrc/cuda, and raises AssertionError."""
    for dtype, d in itertools.product(DTYPES, (1, 20, 64, 264)):
        for table in ("none", "fp32", "its own", "transposed"):
            yield f"embedding {dtype} {d} columns, table {table}", partial(check_embed, DTYPES[dtype], d, table), True
        yield f"positions {dtype} {d} columns", partial(check_positions, DTYPES[dtype], d), True
    for dtype, d, kind in itertools.product(DTYPES, (3, 40, 264), IDS):
        for how in ("sorted", "atomic"):
            check = partial(check_gradient, DTYPES[dtype], d, kind, how == "sorted")
            yield f"embedding gradient {dtype} {d} columns, {kind} ids, {how}", check, how == "sorted"
    for vocabulary in (2**15, 2**17):
        yield f"embedding gradient of {vocabulary} ids", partial(check_vocabulary, vocabulary), True
    for length, d in ((1, 1), (40, 7), (33, 64)):
        yield f"positional table {length}x{d}", partial(check_table, length, d), True


def check_embed(dtype: torch.dtype, d: int, table: str, ops: SimpleNamespace) -> None:
    """With dropout and without, offsets and other widths of ids, and a weight that is not aligned to 16 bytes."""
    ids, seed = torch.randint(0, VOCABULARY, (3, 5)), torch.tensor([-0x123456789ABCDEF])
    encoding = {
        "none": lambda: None,
        "fp32": lambda: torch.randn(POSITIONS, d),
        "its own": lambda: torch.randn(POSITIONS, d).to(dtype),
        "transposed": lambda: torch.randn(d, POSITIONS).t(),
    }[table]()
    offsets = torch.tensor([0, 5, 2]) if table == "fp32" else None
    for p, aligned in ((0.0, True), (0.3, True), (0.0, False)):
        storage = torch.randn(VOCABULARY * d + 1).to(dtype)
        weight = storage[:-1].view(VOCABULARY, d) if aligned else storage[1:].view(VOCABULARY, d)
        given = ids if aligned else ids.int()
        with poisoned_memory():
            out = ops.embed(given, weight, encoding, 3.0, 2, offsets, None, p, seed if p else None, True)
        offset = 2 if offsets is None else offsets + 2
        eager, exact = (
            reference.embed(
                ids, weight.to(to), None if encoding is None else encoding.to(torch.promote_types(to, encoding.dtype)),
                scale=3.0, offset=offset, dropout_p=p, seed=seed,
            )
            for to in (dtype, torch.float64)
        )  # fmt: skip
        assert_as_exact_as_eager(out, eager, exact, what=f"p {p}")
        assert p == 0 or torch.equal(out == 0, exact == 0), "other weights are dropped"


def check_positions(dtype: torch.dtype, d: int, ops: SimpleNamespace) -> None:
    x, table, seed = torch.randn(2, 6, d).to(dtype), torch.randn(POSITIONS, d), torch.tensor([5])
    with poisoned_memory():
        out = ops.add_positional(x, table, 1, None, 0.3, seed)
    eager, exact = (
        reference.add_positional(x.to(to), table.to(torch.promote_types(to, table.dtype)), 1, 0.3, seed)
        for to in (dtype, torch.float64)
    )
    assert_as_exact_as_eager(out, eager, exact)


def check_gradient(dtype: torch.dtype, d: int, kind: str, deterministic: bool, ops: SimpleNamespace) -> None:
    ids, seed, padding = IDS[kind](), torch.tensor([77]), 4
    grad = torch.randn(*ids.shape, d).to(dtype)
    with poisoned_memory():
        actual = ops.embed_backward(grad, ids, VOCABULARY, 1.5, padding, 0.2, seed, deterministic)
    eager, exact = (_gradient(ids, grad.to(to), padding, seed) for to in (dtype, torch.float64))
    assert_as_exact_as_eager(actual, eager, exact, ulps=4 * ids.numel() ** 0.5)


def _gradient(ids: Tensor, grad: Tensor, padding: int, seed: Tensor) -> Tensor:
    """By autograd through the reference; an id outside the vocabulary has none."""
    weight = torch.zeros(VOCABULARY, grad.shape[-1], dtype=grad.dtype, requires_grad=True)
    outside = (ids < 0) | (ids >= VOCABULARY)
    known = ids.masked_fill(outside, 0)
    out = reference.embed(known, weight, scale=1.5, padding_idx=padding, dropout_p=0.2, seed=seed)
    (found,) = torch.autograd.grad(out, weight, grad.masked_fill(outside[..., None], 0.0))
    return found


def check_vocabulary(vocabulary: int, ops: SimpleNamespace) -> None:
    """Ids are sorted as the narrowest integers that hold them: sums of small integers are exact."""
    ids = torch.cat([torch.randint(0, vocabulary, (90,)), torch.full((9,), vocabulary - 1)])
    grad = torch.randint(-8, 9, (99, 4)).float()
    with poisoned_memory():
        actual = ops.embed_backward(grad, ids, vocabulary, 2.0, None, 0.0, None, True)
    assert torch.equal(actual, torch.zeros(vocabulary, 4).index_add(0, ids, 2.0 * grad))


def check_table(length: int, d: int, ops: SimpleNamespace) -> None:
    with poisoned_memory():
        table = torch.empty(length, d)
        ops.fill_positional_table(table)
    assert (table - reference.positional_table(length, d)).abs().max() <= 2.0**-23
