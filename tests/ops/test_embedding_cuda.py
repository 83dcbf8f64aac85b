"""CUDA kernels of the embedding without a GPU: run on the CPU, and compiled by nvcc."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cuda_sources
import pytest
import torch

from transformer_fast import extension, reference

pytestmark = pytest.mark.slow("a compiler needs up to a minute for the sources")
SEED = torch.tensor([-0x123456789ABCDEF])


@pytest.fixture(scope="session")
def cuda() -> SimpleNamespace:
    """Operators of csrc/cuda, running on the CPU."""
    torch.ops.load_library(str(cuda_sources.build_for_cpu()))
    return getattr(torch.ops, cuda_sources.LIBRARY)


native = torch.ops.transformer_fast if extension.load() else None


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=4 * eps * max(expected.abs().max().item(), 1.0))


@pytest.mark.parametrize("d", [1, 4, 8, 20, 33, 64, 264, 1100, 2056])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward(cuda: SimpleNamespace, dtype: torch.dtype, d: int) -> None:
    ids, weight = torch.randint(0, 9, (3, 5)), torch.randn(9, d).to(dtype)
    for table in (None, torch.randn(8, d), torch.randn(8, d).to(dtype), torch.randn(d, 8).t()):
        for p in (0.0, 0.3):
            out = cuda.embed(ids, weight, table, 3.0, 2, None, None, p, SEED, True)
            narrow = cuda.embed(ids.int(), weight.t().contiguous().t(), table, 3.0, 2, None, None, p, SEED, True)
            expected = native.embed(ids, weight, table, 3.0, 2, None, None, p, SEED, True)
            close(out, expected)
            assert torch.equal(out == 0, expected == 0)
            assert torch.equal(out, narrow)
    x = torch.randn(2, 6, d).to(dtype)
    close(cuda.add_positional(x, None, 0, None, 0.5, SEED), native.add_positional(x, None, 0, None, 0.5, SEED))
    shifted = torch.randn(13 * d + 1).to(dtype)[1:].view(13, d)  # not 16-byte aligned
    assert torch.equal(cuda.embed(ids, shifted, None, 1.0, 0, None, None, 0.0, None, True), shifted[ids])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_an_offset_for_each_sequence(cuda: SimpleNamespace, dtype: torch.dtype) -> None:
    ids, weight, table = torch.randint(0, 9, (5, 3)), torch.randn(9, 24), torch.randn(8, 24)
    offsets = torch.tensor([0, 5, 2, 2, 4], dtype=dtype)
    out = cuda.embed(ids, weight, table, 3.0, 0, offsets, None, 0.3, SEED, True)
    close(out, native.embed(ids, weight, table, 3.0, 0, offsets, None, 0.3, SEED, True))
    added = cuda.add_positional(out, table, 0, offsets, 0.3, SEED)
    close(added, native.add_positional(out, table, 0, offsets, 0.3, SEED))
    out = cuda.embed(ids, weight, table, 3.0, 0, offsets + 2, None, 0.0, None, True)  # positions 5 to 9 in a table of 8
    outside = (offsets[:, None] + torch.arange(2, 5) >= 8)[..., None].expand_as(out)
    assert torch.equal(out.isnan(), outside)
    assert cuda.embed(ids, weight, table, 3.0, 0, offsets - 1, None, 0.0, None, True).isnan().all(-1).sum() == 1


@pytest.mark.parametrize("kind", ["distinct", "hot", "skewed", "long runs", "one", "padding only"])
@pytest.mark.parametrize("d", [3, 40, 72])
def test_gradients(cuda: SimpleNamespace, d: int, kind: str) -> None:
    ids = {
        "distinct": torch.randperm(200).view(4, 50),
        "hot": torch.full((5, 150), 7),
        "skewed": (torch.rand(6, 100) ** 4 * 200).long(),
        "long runs": torch.arange(4).repeat_interleave(75).view(3, 100) * 5,
        "one": torch.tensor([[3]]),
        "padding only": torch.full((2, 70), 4),
    }[kind]
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.randn(*ids.shape, d).to(dtype)
        expected = native.embed_backward(grad, ids, 200, 1.5, 4, 0.2, SEED, True)
        for deterministic in (True, False):
            actual = cuda.embed_backward(grad, ids, 200, 1.5, 4, 0.2, SEED, deterministic)
            rows = ids.numel() ** 0.5
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=1e-7 * rows * expected.abs().max().item())


@pytest.mark.parametrize("vocabulary", [2**15 - 1, 2**15, 2**17], ids=["int16", "int32", "int32 above 2^16"])
def test_ids_are_sorted_as_narrow_integers(cuda: SimpleNamespace, vocabulary: int) -> None:
    last = vocabulary - 1
    ids = torch.tensor([last, 0, 2**15 - 2, last, 5, 0, 5, 2**15 - 3] * 6)
    grad = torch.randint(-8, 9, (48, 4)).float()
    expected = native.embed_backward(grad, ids, vocabulary, 2.0, 5, 0.0, None, True)
    assert torch.equal(cuda.embed_backward(grad, ids, vocabulary, 2.0, 5, 0.0, None, True), expected)
    for outside in (vocabulary, vocabulary + 2**16, -1, 2**32 + 5):  # none of which may alias an id when narrowed
        bad = torch.cat((ids, torch.full((9,), outside)))
        more = torch.cat((grad, torch.ones(9, 4)))
        assert torch.equal(cuda.embed_backward(more, bad, vocabulary, 2.0, 5, 0.0, None, True), expected)


def hot_among_others() -> torch.Tensor:
    """Return ids of which half are equal and the rest distributed as in text: the join adds many chunks, in tiles of
    256 columns."""
    return torch.cat((torch.full((700,), 3), (1000 ** torch.rand(700)).long()))[torch.randperm(1400)]


def long_batch() -> torch.Tensor:
    """Return a longer batch, with longer chunks."""
    return (torch.rand(40_000) ** 3 * 60).long()


@pytest.mark.parametrize(
    ("make", "d"), [(hot_among_others, 8), (hot_among_others, 200), (hot_among_others, 264), (long_batch, 4)]
)
def test_sums_of_many_rows(cuda: SimpleNamespace, make: Callable[[], torch.Tensor], d: int) -> None:
    ids = make()
    grad = torch.randint(-8, 9, (len(ids), d)).float()  # sums of small integers are exact in any order
    expected = native.embed_backward(grad, ids, 1000, 0.5, 0, 0.0, None, True)
    for deterministic in (True, False):
        assert torch.equal(cuda.embed_backward(grad, ids, 1000, 0.5, 0, 0.0, None, deterministic), expected)


def test_ids_outside_the_vocabulary_are_never_followed(cuda: SimpleNamespace) -> None:
    ids = torch.tensor([[0, -1, 2], [3, 2**40, 1]])
    out = cuda.embed(ids, torch.ones(3, 20), torch.ones(3, 20), 1.0, 0, None, None, 0.5, SEED, True)
    bad = torch.tensor([[False, True, False], [True, True, False]])
    assert out[bad].isnan().all() and not out[~bad].isnan().any()
    for deterministic in (True, False):
        grad = cuda.embed_backward(torch.ones(2, 3, 20), ids, 3, 1.0, None, 0.0, None, deterministic)
        assert torch.equal(grad, torch.ones(3, 20))


@pytest.mark.parametrize("length,d", [(1, 1), (40, 7), (33, 64)])
def test_positional_table(cuda: SimpleNamespace, length: int, d: int) -> None:
    table = torch.empty(length, d)
    cuda.fill_positional_table(table)
    assert (table - reference.embedding.positional_table(length, d)).abs().max() <= 2.0**-23


def test_philox_of_rows_beyond_32_bits() -> None:
    library = ctypes.CDLL(str(cuda_sources.build_for_cpu()))
    words = (ctypes.c_uint32 * 4)()
    for seed, row, chunk in ((0, 0, 0), (2**63 + 5, 2**32 + 3, 7), (123, 2**40 - 1, 2**31)):
        library.philox_words(ctypes.c_uint64(seed), ctypes.c_int64(row), ctypes.c_int64(chunk), words)
        counter = (chunk, row & 0xFFFFFFFF, row >> 32, 0)
        expected = reference.dropout.philox(tuple(torch.tensor(c) for c in counter), seed)
        assert list(words) == [int(word) for word in expected]


@pytest.mark.skipif(cuda_sources.nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("source", cuda_sources.SOURCES, ids=lambda path: path.stem)
def test_nvcc_compiles_without_spills(source: Path, tmp_path: Path) -> None:
    kernels = cuda_sources.compile_with_nvcc(source, "sm_90", tmp_path)
    assert kernels
    for name, used in kernels.items():
        assert used["spilled"] == 0, f"{name} spills: {used}"
        # sincos in fp64 keeps a table on its stack for huge angles; it runs once for a model.
        assert used["stack"] == 0 or "positional_kernel" in name, f"{name} uses local memory: {used}"
        if "encode_kernelILb1" in name:
            assert used["registers"] <= 48, f"{name}: 1280 threads must fit a multiprocessor: {used}"
        assert used["registers"] <= 128, f"{name}: two blocks of 256 threads must fit a multiprocessor: {used}"
