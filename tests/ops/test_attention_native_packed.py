"""The C++ kernels of packed batches and of decoding by themselves: against the fp64 oracle, and at their edges."""

import itertools
import math

import pytest
import torch
from helpers import assert_as_exact_as_eager

from transformer_fast import extension
from transformer_fast.reference.attention import attention_decode, attention_packed

SEED = torch.tensor([77_000_111_222_333], dtype=torch.int64)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LENGTHS_Q, LENGTHS_K = [70, 0, 1, 129, 5, 2], [70, 9, 0, 140, 200, 1]


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed_inputs(lengths_q, lengths_k, dtype, H=4, Hkv=2, D=24):
    """q, k, v and grad_out, each (tokens, heads, D): slices of wider tensors."""
    Tq, Tk = sum(lengths_q), sum(lengths_k)
    shapes = (Tq, H, D), (Tk, Hkv, D), (Tk, Hkv, D), (Tq, H, D)
    return [torch.randn(T, 2 * heads, D + 8, dtype=torch.float64).to(dtype)[:, ::2, :D] for T, heads, D in shapes]


def options(lengths_q, lengths_k, D, causal=False, dropout_p=0.0):
    sequences = starts(lengths_q), starts(lengths_k), max(lengths_q, default=0), max(lengths_k, default=0)
    diagonals, seed = (0 if causal else None, None), SEED if dropout_p else None
    return *sequences, *diagonals, 1 / math.sqrt(D), dropout_p, seed, False, "native"


def native_packed(tensors, arguments, grad_logsumexp=None):
    q, k, v, grad_out = tensors
    ops = torch.ops.transformer_fast
    out, logsumexp = ops.attention_packed(q, k, v, *arguments)
    grads = ops.attention_packed_backward(grad_out, q, k, v, out, logsumexp, grad_logsumexp, *arguments)
    return out, logsumexp, *grads


@pytest.mark.parametrize("causal, dropout_p", [(False, 0.0), (True, 0.2)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cross", [False, True])
def test_packed_is_the_reference(cross, dtype, causal, dropout_p):
    lengths_k = LENGTHS_K if cross else LENGTHS_Q
    tensors = packed_inputs(LENGTHS_Q, lengths_k, dtype)
    arguments = options(LENGTHS_Q, lengths_k, 24, causal, dropout_p)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_q", "max_k", "scale", "dropout_p", "seed")
    grad_logsumexp = torch.randn(4, sum(LENGTHS_Q), dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def oracle(wide):
        leaves = [t.to(wide).requires_grad_() for t in tensors[:3]]
        out, logsumexp = attention_packed(
            *leaves, causal=0 if causal else None, **dict(zip(names, (*arguments[:4], *arguments[6:9]), strict=True))
        )
        received = tensors[3].to(wide), grad_logsumexp.to(logsumexp.dtype)
        return out.detach(), logsumexp.detach(), *torch.autograd.grad((out, logsumexp), leaves, received)

    ulps = 8.0 if dtype != torch.float64 else 8.0 * 200**0.5
    for name, a, e, x in zip(
        ("out", "logsumexp", "grad_q", "grad_k", "grad_v"),
        native_packed(tensors, arguments, grad_logsumexp),
        oracle(dtype),
        oracle(torch.float64),
    ):
        eager = a if name == "logsumexp" and dtype in (torch.float16, torch.bfloat16) else e
        assert_as_exact_as_eager(a, eager, x, what=name, ulps=ulps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_has_the_bits_of_each_sequence_alone(dtype):
    # Enough heads that the keys of no sequence are split, as they are not where it stands alone.
    lengths = [66, 3, 128, 17]
    q, k, v, grad_out = packed_inputs(lengths, lengths, dtype, H=16, Hkv=16)
    arguments = options(lengths, lengths, 24, causal=True)
    out, logsumexp, *grads = native_packed((q, k, v, grad_out), arguments)
    ops = torch.ops.transformer_fast
    tail = *(None,) * 4, 0, None, arguments[6], 0.0, None, False, "native"
    for start, length in zip(starts(lengths).tolist(), lengths):
        q1, k1, v1, grad1 = (t[start : start + length].transpose(0, 1).unsqueeze(0) for t in (q, k, v, grad_out))
        alone, logsumexp1 = ops.attention(q1, k1, v1, *tail)
        grads1 = ops.attention_backward(grad1, q1, k1, v1, alone, logsumexp1, None, *tail)
        for a, b in zip((out, *grads), (alone, *grads1)):
            assert torch.equal(a[start : start + length], b[0].transpose(0, 1))
        assert torch.equal(logsumexp[:, start : start + length], logsumexp1[0])


@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [0, 3]), ([2, 5], [0, 0]), ([3, 0], [4, 0])])
def test_packed_batches_of_nothing(lengths_q, lengths_k):
    tensors = packed_inputs(lengths_q, lengths_k, torch.float32)
    out, logsumexp, *grads = native_packed(tensors, options(lengths_q, lengths_k, 24))
    assert out.shape == tensors[0].shape and logsumexp.shape == (4, sum(lengths_q))
    assert all(g.isfinite().all() for g in (out, *grads))
    if sum(lengths_k) == 0:
        assert out.eq(0).all() and logsumexp.eq(-math.inf).all() and grads[0].eq(0).all()


def test_packed_gives_the_same_bits_with_any_number_of_threads():
    tensors = packed_inputs(LENGTHS_Q, LENGTHS_K, torch.float32, H=2, Hkv=1)
    arguments = options(LENGTHS_Q, LENGTHS_K, 24, dropout_p=0.1)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            runs.append(native_packed(tensors, arguments))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


def paged(cache, page_size, pages, table):
    """A cache (B, Hkv, S, D) laid out in pages by ``table``, NaN wherever nothing was stored."""
    B, Hkv, S, D = cache.shape
    result = torch.full((pages, page_size, Hkv, D), math.nan, dtype=cache.dtype)
    for b, j in itertools.product(range(B), range(S)):
        result[table[b, j // page_size], j % page_size] = cache[b, :, j]
    return result


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "H, Hkv, Lq, page_size", [(4, 4, 1, 0), (4, 1, 2, 0), (6, 2, 5, 0), (4, 2, 1, 16), (4, 2, 3, 5)]
)
def test_decode_is_the_reference(H, Hkv, Lq, page_size, causal, dtype):
    S, D = 300, 40
    lengths = torch.tensor([300, 1, 0, 131], dtype=torch.int32)
    q = torch.randn(4, H, Lq, D, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(4, Hkv, S, D, dtype=torch.float64).to(dtype) for _ in range(2))
    unused = torch.arange(S) >= lengths.view(4, 1, 1)
    k, v = (t.masked_fill(unused.unsqueeze(-1), math.nan) for t in (k, v))
    table = None
    if page_size:
        pages = 4 * -(-S // page_size)
        table = torch.randperm(pages).view(4, -1).to(torch.int32)
        k, v = (paged(t, page_size, pages, table) for t in (k, v))
        used = torch.arange(table.shape[1]) * page_size < lengths.view(4, 1)
        table = table.where(used, -12345)
    diagonals = (0 if causal else None, None)
    out, logsumexp = torch.ops.transformer_fast.attention_decode(q, k, v, lengths, table, *diagonals, D**-0.5, "native")
    same = {"lengths": lengths, "page_table": table, "causal": 0 if causal else None, "scale": D**-0.5}
    eager = attention_decode(q, k, v, **same)
    exact = attention_decode(q.double(), k.double(), v.double(), **same)
    ulps = 8.0 if dtype != torch.float64 else 8.0 * S**0.5
    assert_as_exact_as_eager(out, eager[0], exact[0], what="out", ulps=ulps)
    wide = dtype in (torch.float32, torch.float64)
    assert torch.equal(logsumexp == -math.inf, exact[1] == -math.inf) and out[2].eq(0).all()
    assert_as_exact_as_eager(logsumexp, eager[1] if wide else logsumexp, exact[1], what="logsumexp", ulps=ulps)


def test_decode_gives_the_same_bits_with_any_number_of_threads_and_from_pages():
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 2000, 64), torch.randn(1, 2, 2000, 64)
    lengths, table = torch.tensor([1999], dtype=torch.int32), torch.randperm(16).view(1, 16).to(torch.int32)
    decode = torch.ops.transformer_fast.attention_decode
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            runs.append(decode(q, k, v, lengths, None, 0, None, 0.125, "native"))
        runs.append(decode(q, *(paged(t, 128, 16, table) for t in (k, v)), lengths, table, 0, None, 0.125, "native"))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


def test_decode_of_an_empty_batch():
    out, logsumexp = torch.ops.transformer_fast.attention_decode(
        torch.empty(0, 2, 1, 8), torch.empty(0, 2, 9, 8), torch.empty(0, 2, 9, 8), torch.empty(0, dtype=torch.int32),
        None, 0, None, 1.0, "native",
    )  # fmt: skip
    assert out.shape == (0, 2, 1, 8) and logsumexp.shape == (0, 2, 1)
