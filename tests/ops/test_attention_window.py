"""The window - query i sees keys from i + window to i + causal - in the C++ kernels of every kind of call: against the
oracle, which gets it as a dense keep mask."""

import itertools
import math

import pytest
import torch
from helpers import assert_as_exact_as_eager
from torch import Tensor

from transformer_fast import extension
from transformer_fast.reference.attention import attention as reference

SEED = torch.tensor([0x0BAD_CAFE_1234_567], dtype=torch.int64)
DTYPES = [torch.float32, torch.float64]
RESULTS = "out", "logsumexp", "grad_q", "grad_k", "grad_v", "grad_bias"
MASKS = ["alone", "keep", "key_keep", "lengths", "lengths per query", "bias", "bias of keys", "large bias", "all"]
SIZES = [1, 15, 17, 97, 127, 129, 257]


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


def between(Lq: int, Lk: int, causal: int | None, window: int | None, own: Tensor | int = 0) -> Tensor:
    """The dense keep mask of the two diagonals; ``own`` is the key that query 0 stands at."""
    i, j = torch.arange(Lq).view(-1, 1) + own, torch.arange(Lk)
    keep = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
    if causal is not None:
        keep = keep & (j <= i + causal)
    return keep if window is None else keep & (j >= i + window)


def inputs(B, H, Hkv, Lq, Lk, D, dtype=torch.float32) -> list[Tensor]:
    """q, k, v, and the gradients of out and logsumexp."""
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D), (B, H, Lq)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def tail(parts: dict, D: int, dropout_p: float = 0.0, empty_rows: str = "uniform") -> tuple:
    named = (parts.get(name) for name in ("keep", "key_keep", "lengths", "bias", "causal", "window"))
    return *named, D**-0.5, dropout_p, SEED if dropout_p else None, empty_rows == "zero", "native"


def native(tensors, parts: dict, *options) -> list[Tensor]:
    """What RESULTS says, by the ops, every byte of it NaN beforehand."""
    q, k, v, grad_out, grad_logsumexp = tensors
    arguments, ops = tail(parts, q.shape[-1], *options), torch.ops.transformer_fast
    out, logsumexp = ops.attention(q, k, v, *arguments)
    received = grad_out, q, k, v, out, logsumexp, grad_logsumexp.to(logsumexp.dtype), *arguments
    results = [out, logsumexp, *ops.attention_backward(*received)]
    return [*results, ops.attention_grad_bias(*received)] if "bias" in parts else results


def recorded(tensors, parts: dict, *options) -> list[Tensor]:
    """The same by autograd, which sums the gradient of the bias in another way, and keeps weights where it may."""
    leaves = [t.clone().requires_grad_() for t in (*tensors[:3], *([parts["bias"]] if "bias" in parts else []))]
    given = parts | ({"bias": leaves[3]} if "bias" in parts else {})
    out, logsumexp = torch.ops.transformer_fast.attention(*leaves[:3], *tail(given, leaves[0].shape[-1], *options))
    grads = torch.autograd.grad((out, logsumexp), leaves, (tensors[3], tensors[4].to(logsumexp.dtype)))
    return [out.detach(), logsumexp.detach(), *grads]


def oracle(tensors, parts: dict, dtype, dropout_p: float = 0.0, empty_rows: str = "uniform") -> list[Tensor]:
    q, k, v, bias = (t if t is None else t.to(dtype).requires_grad_() for t in (*tensors[:3], parts.get("bias")))
    dense = between(q.shape[2], k.shape[2], parts.get("causal"), parts.get("window"))
    keep = dense if parts.get("keep") is None else dense & parts["keep"]
    masks = {"keep": keep.expand(1, 1, *dense.shape) if keep.dim() == 2 else keep, "bias": bias}
    masks |= {name: parts[name] for name in ("key_keep", "lengths") if name in parts}
    options = {"scale": q.shape[-1] ** -0.5, "dropout_p": dropout_p, "seed": SEED, "empty_rows": empty_rows}
    out, _, logsumexp = reference(q, k, v, **masks, **options)
    leaves = [t for t in (q, k, v, bias) if t is not None]
    received = tensors[3].to(dtype), tensors[4].to(logsumexp.dtype)
    return [out.detach(), logsumexp.detach(), *torch.autograd.grad((out, logsumexp), leaves, received)]


def hold(actual, eager, exact, dtype, terms: int, names=RESULTS) -> None:
    # fp64 has no wider truth: there the oracle is as far from it as the kernel.
    ulps = 8.0 * (terms**0.5 if dtype == torch.float64 else 1.0)
    for name, a, e, x in zip(names, actual, eager, exact, strict=False):
        assert torch.equal(a == -math.inf, x == -math.inf), name
        assert_as_exact_as_eager(a, e, x, what=name, ulps=ulps)


def check(tensors, parts: dict, *options, kinds=(native, recorded)) -> None:
    dtype, terms = tensors[0].dtype, max(tensors[0].shape[2], tensors[1].shape[2])
    eager, exact = (oracle(tensors, parts, wide, *options) for wide in (dtype, torch.float64))
    for kind in kinds:
        actual = kind(tensors, parts, *options)
        assert len(actual) == len(exact)
        hold(actual, eager, exact, dtype, terms)


def mask_of(name: str, B: int, H: int, Lq: int, Lk: int) -> dict:
    lengths = torch.randint(0, Lk + 1, (B,), dtype=torch.int32)
    return {
        "alone": {},
        "keep": {"keep": torch.rand(B, 1, Lq, Lk) > 0.3},
        "key_keep": {"key_keep": torch.rand(B, 1, 1, Lk) > 0.3},
        "lengths": {"lengths": lengths},
        "lengths per query": {"lengths": torch.randint(0, Lk + 1, (B, Lq), dtype=torch.int32)},
        "bias": {"bias": torch.randn(1, H, Lq, Lk)},
        "bias of keys": {"bias": torch.randn(B, 1, 1, Lk)},
        "large bias": {"bias": torch.randn(1, H, Lq, 1) * 4096},
        "all": {"keep": torch.rand(B, H, Lq, Lk) > 0.2, "lengths": lengths, "bias": torch.randn(1, 1, Lq, Lk)},
    }[name]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    "mask, dtype",
    # Beside a large bias the scores of the fp64 oracle are rounded as far as those of the kernel, so it is no truth.
    [(mask, dtype) for mask in MASKS for dtype in DTYPES if (mask, dtype) != ("large bias", torch.float64)],
)
def test_with_every_other_part_of_the_mask(mask, dtype, dropout_p):
    parts = mask_of(mask, 2, 4, 150, 270)
    if "bias" in parts:
        parts["bias"] = parts["bias"].to(dtype)
    for causal, window in ((70, 20), (None, 60), (100, -200)):
        for empty_rows in ("uniform", "zero"):
            bounds = {"causal": causal, "window": window}
            check(inputs(2, 4, 2, 150, 270, 20, dtype), parts | bounds, dropout_p, empty_rows)


@pytest.mark.parametrize("Lq, Lk", [*itertools.combinations_with_replacement(SIZES, 2), (257, 1), (129, 97), (15, 1)])
def test_sizes_that_break_tiles(Lq, Lk):
    for causal, window in ((Lk - Lq, Lk - Lq - 15), (0, 0), (None, -33)):
        check(inputs(1, 2, 1, Lq, Lk, 16), {"causal": causal, "window": window}, 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("Lq", [1, 2, 97])
def test_half_precision(Lq, dtype):
    tensors = inputs(2, 4, 2, Lq, 257, 24, dtype)
    parts = {"causal": 200, "window": 61, "bias": torch.randn(1, 4, Lq, 257).to(dtype)}
    for name, a, e, x in zip(
        RESULTS,
        native(tensors, parts),
        oracle(tensors, parts, dtype),
        oracle(tensors, parts, torch.float64),
        strict=True,
    ):
        assert_as_exact_as_eager(a, a if name == "logsumexp" else e, x, what=name, ulps=8.0)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("causal, window", [(-100, -130), (-40, -20), (5, 10), (None, 200), (None, 300), (-1, None)])
def test_rows_that_see_nothing(causal, window, empty_rows):
    """At the start, at the end, in between two diagonals that cross, and all of them."""
    for Lq in (1, 2, 257):
        check(inputs(2, 2, 1, Lq, 300, 16), {"causal": causal, "window": window}, 0.1, empty_rows)


@pytest.mark.parametrize("Lq, H, Hkv", [(1, 4, 4), (2, 6, 2), (1, 1, 1)])
@pytest.mark.parametrize("mask", ["alone", "keep", "lengths", "bias"])
def test_few_queries(mask, Lq, H, Hkv):
    parts = mask_of(mask, 2, H, Lq, 2050)
    for causal, window in ((2040, 1900), (1030, 3), (None, 2000), (700, 640)):
        check(inputs(2, H, Hkv, Lq, 2050, 24), parts | {"causal": causal, "window": window}, 0.1)


def test_weights():
    for Lq, Lk, dropout_p, empty_rows in itertools.product((2, 97), (97, 257), (0.0, 0.3), ("uniform", "zero")):
        q, k, *_ = inputs(2, 4, 2, Lq, Lk, 16)
        for parts in ({"causal": 10, "window": -20}, {"window": 150, "bias": torch.randn(1, 4, Lq, Lk)}):
            options = tail(parts, 16, 0.0, empty_rows)
            actual = torch.ops.transformer_fast.attention_weights(q, k, None, *options)
            keep = between(Lq, Lk, parts.get("causal"), parts["window"]).expand(1, 1, Lq, Lk)
            eager, exact = (
                reference(
                    *(t.to(wide) for t in (q, k, k)),
                    keep=keep,
                    bias=parts.get("bias"),
                    scale=0.25,
                    empty_rows=empty_rows,
                )[1]
                for wide in DTYPES
            )
            assert_as_exact_as_eager(actual, eager, exact, what="weights")
            if dropout_p:
                options = tail(parts, 16, dropout_p, empty_rows)
                dropped = torch.ops.transformer_fast.attention_weights(q, k, None, *options)
                kept = dropped != 0
                torch.testing.assert_close(dropped[kept] * (1 - dropout_p), actual[kept], rtol=1e-4, atol=1e-7)


LENGTHS_Q, LENGTHS_K = [97, 0, 1, 129, 2, 17], [97, 9, 0, 257, 200, 3]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(tensors, lengths_q, lengths_k, causal, window, dropout_p=0.0, zero_empty_rows=False) -> list[Tensor]:
    q, k, v, grad_out, grad_logsumexp = tensors
    seed = SEED if dropout_p else None
    sequences = starts(lengths_q), starts(lengths_k), max(lengths_q), max(lengths_k), causal, window
    arguments = *sequences, q.shape[-1] ** -0.5, dropout_p, seed, zero_empty_rows, "native"
    out, logsumexp = torch.ops.transformer_fast.attention_packed(q, k, v, *arguments)
    grads = torch.ops.transformer_fast.attention_packed_backward(
        grad_out, q, k, v, out, logsumexp, grad_logsumexp.to(logsumexp.dtype), *arguments
    )
    return [out, logsumexp, *grads]


def packed_oracle(tensors, lengths_q, lengths_k, causal, window, dtype, empty_rows="uniform") -> list[Tensor]:
    """Each sequence alone."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors[:3]]
    outs, logsumexps = [], []
    begins = zip(starts(lengths_q).tolist(), starts(lengths_k).tolist(), strict=True)
    for (first_q, first_k), Lq, Lk in zip(begins, lengths_q, lengths_k, strict=False):
        q = leaves[0][first_q : first_q + Lq].transpose(0, 1)[None]
        k, v = (t[first_k : first_k + Lk].transpose(0, 1)[None] for t in leaves[1:])
        keep = between(Lq, Lk, causal, window).expand(1, 1, Lq, Lk)
        out, _, logsumexp = reference(q, k, v, keep=keep, scale=q.shape[-1] ** -0.5, empty_rows=empty_rows)
        outs.append(out[0].transpose(0, 1))
        logsumexps.append(logsumexp[0])
    results = torch.cat(outs), torch.cat(logsumexps, 1)
    received = [t.to(r.dtype) for t, r in zip(tensors[3:], results, strict=True)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, received)]


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize(
    "causal, window", [(0, -15), (None, -5), (-3, -40), (3, 2), (None, 100), (0, None), (-2, None)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(dtype, causal, window, empty_rows):
    """Also where a query sees none of its sequence's keys: it takes the mean of those, or nothing."""
    Tq, Tk, H, Hkv, D = sum(LENGTHS_Q), sum(LENGTHS_K), 4, 2, 20
    shapes = (Tq, H, D), (Tk, Hkv, D), (Tk, Hkv, D), (Tq, H, D), (H, Tq)
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    call = tensors, LENGTHS_Q, LENGTHS_K, causal, window
    eager, exact = (packed_oracle(*call, wide, empty_rows) for wide in (dtype, torch.float64))
    hold(packed(*call, 0.0, empty_rows == "zero"), eager, exact, dtype, 257)


def test_packed_with_dropout_is_the_padded_batch():
    lengths, H, D, causal, window = [97, 17, 1, 129], 2, 16, 4, -30
    T, B, L = sum(lengths), len(lengths), max(lengths)
    shapes = (T, H, D), (T, H, D), (T, H, D), (T, H, D), (H, T)
    tensors = [torch.randn(shape) for shape in shapes]
    out, logsumexp, *grads = packed(tensors, lengths, lengths, causal, window, 0.3)
    rows = torch.arange(L) < torch.tensor(lengths).view(B, 1)
    padded = [torch.zeros(B, L, H, D).index_put((rows,), t).transpose(1, 2) for t in tensors[:4]]
    padded.append(torch.zeros(B, L, H).index_put((rows,), tensors[4].t()).transpose(1, 2))
    parts = {"causal": causal, "window": window, "lengths": torch.tensor(lengths, dtype=torch.int32)}
    expected = native(padded, parts, 0.3)
    for name, a, e in zip(RESULTS, (out, logsumexp.t(), *grads), expected, strict=False):
        torch.testing.assert_close(a, e.transpose(1, 2)[rows], msg=name)


def paged(cache: Tensor, page_size: int, pages: int, table: Tensor) -> Tensor:
    """A cache (B, Hkv, S, D) laid out in pages by ``table``, NaN wherever nothing was stored."""
    B, Hkv, S, D = cache.shape
    result = torch.full((pages, page_size, Hkv, D), math.nan, dtype=cache.dtype)
    for b, j in itertools.product(range(B), range(S)):
        result[table[b, j // page_size], j % page_size] = cache[b, :, j]
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal, window", [(0, -63), (None, -200), (0, -5), (-4, -9), (2, 1)])
@pytest.mark.parametrize(
    "H, Hkv, Lq, page_size", [(4, 4, 1, 0), (4, 1, 2, 0), (6, 2, 5, 0), (4, 2, 1, 16), (2, 1, 3, 5)]
)
def test_decode(H, Hkv, Lq, page_size, causal, window, dtype):
    S, D = 700, 24
    lengths = torch.tensor([700, 1, 0, 131], dtype=torch.int32)
    q = torch.randn(4, H, Lq, D, dtype=dtype)
    k, v = (torch.randn(4, Hkv, S, D, dtype=dtype) for _ in range(2))
    keep = between(Lq, S, causal, window, lengths.view(4, 1, 1, 1) - Lq) & (torch.arange(S) < lengths.view(4, 1, 1, 1))
    unseen = ~keep.any(2).squeeze(1)  # no query of the batch entry sees the key
    eager, exact = (
        reference(*(t.to(wide) for t in (q, k, v)), keep=keep, scale=D**-0.5, empty_rows="zero")[::2]
        for wide in (dtype, torch.float64)
    )
    k, v = (t.masked_fill(unseen[:, None, :, None], math.nan) for t in (k, v))
    table = None
    if page_size:
        pages = 4 * -(-S // page_size)
        table = torch.randperm(pages).view(4, -1).to(torch.int32)
        k, v = (paged(t, page_size, pages, table) for t in (k, v))
    actual = torch.ops.transformer_fast.attention_decode(q, k, v, lengths, table, causal, window, D**-0.5, "native")
    hold(actual, eager, exact, dtype, S)


def test_the_eager_fast_paths_take_it():
    direct, options = extension.module(), (None, 0.0, None, "uniform")
    q, k, v, *_ = inputs(1, 4, 2, 40, 70, 16)
    dense = between(40, 70, 20, 5).expand(1, 1, 40, 70)
    out = direct.attention(False, q, k, v, None, None, None, None, 20, 5, *options)
    torch.testing.assert_close(out, reference(q, k, v, keep=dense, scale=0.25)[0])
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    out = direct.attention_packed(False, *tokens, starts([40]), starts([70]), None, None, 20, 5, *options)
    torch.testing.assert_close(out.transpose(0, 1)[None], reference(q, k, v, keep=dense, scale=0.25)[0])
    lengths = torch.tensor([60])
    out = direct.attention_decode(False, q, k, v, lengths, None, 0, -7, None)
    dense = between(40, 70, 0, -7, 20).expand(1, 1, 40, 70)
    torch.testing.assert_close(out, reference(q, k, v, keep=dense, scale=0.25)[0])
    assert direct.attention(False, q, k, v, None, None, None, None, 20, "5", *options) is None


def test_keys_outside_are_never_read():
    tensors = inputs(1, 2, 1, 200, 1000, 16)
    clean = native(tensors, {"causal": 450, "window": 300})
    seen = torch.zeros(1000, dtype=torch.bool)
    seen[300:650] = True
    q, k, v, *grads = tensors
    k, v = (t.masked_fill(~seen.view(-1, 1), math.nan) for t in (k, v))
    for name, a, b in zip(RESULTS, native((q, k, v, *grads), {"causal": 450, "window": 300}), clean, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("Lq", [2, 70])
def test_a_window_over_all_keys_has_the_bits_of_none(Lq):
    tensors = inputs(2, 2, 1, Lq, 257, 16)
    expected = native(tensors, {"causal": 200})
    for window in (-Lq, -(2**40), -(2**63)):
        assert all(map(torch.equal, native(tensors, {"causal": 200, "window": window}), expected))
    out, *_ = native(tensors, {"window": 2**63 - 1}, 0.0, "zero")
    assert out.eq(0).all()


@pytest.mark.parametrize("Lq", [2, 257])
def test_any_number_of_threads_gives_the_same_bits(Lq):
    tensors, parts = inputs(1, 2, 1, Lq, 2000, 32), {"causal": 1500, "window": 900}
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(native(tensors, parts, 0.1))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradcheck(empty_rows):
    q, k, v, *_ = (t.requires_grad_() for t in inputs(1, 2, 1, 6, 7, 4, torch.float64))
    bias = torch.randn(1, 2, 6, 7, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, bias):
        return torch.ops.transformer_fast.attention(
            q, k, v, None, None, None, bias, 1, -1, 0.5, 0.2, SEED, empty_rows == "zero", "native"
        )[0]

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


def test_opcheck():
    q, k, v, grad_out, grad_logsumexp = inputs(2, 2, 1, 5, 7, 8)
    ops, options = torch.ops.transformer_fast, (1, -2, 0.3, 0.1, SEED, False, "native")
    mask = None, None, None, torch.randn(1, 2, 5, 7)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(ops.attention.default, (*leaves, *mask, *options))
    out, logsumexp = ops.attention(q, k, v, *mask, *options)
    received = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    torch.library.opcheck(ops.attention_backward.default, (*received, *mask, *options))
    torch.library.opcheck(ops.attention_grad_bias.default, (*received, *mask, *options))
    torch.library.opcheck(ops.attention_weights.default, (q, k, logsumexp, *mask, *options))
    sequences = starts([3, 2]), starts([3, 4]), 3, 4
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    leaves = [t.clone().requires_grad_() for t in tokens]
    torch.library.opcheck(ops.attention_packed.default, (*leaves, *sequences, *options))
    out, logsumexp = ops.attention_packed(*tokens, *sequences, *options)
    received = torch.randn_like(out), *tokens, out, logsumexp, None
    torch.library.opcheck(ops.attention_packed_backward.default, (*received, *sequences, *options))
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    torch.library.opcheck(ops.attention_decode.default, (q, k, v, lengths, None, 0, -2, 0.3, "native"))
