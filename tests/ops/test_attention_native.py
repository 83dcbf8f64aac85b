"""The C++ attention kernels by themselves (backend "native" of the ops): against the fp64 oracle, and at the
edges where such kernels break. What the public function adds is tested in test_attention.py."""

import itertools
import math

import pytest
import torch
from helpers import assert_as_exact_as_eager, mask_parts
from torch import Tensor

from transformer_fast import extension
from transformer_fast.reference.attention import attention as reference
from transformer_fast.reference.dropout import attention_keep

SEED = torch.tensor([0x1234_5678_9ABC_DEF], dtype=torch.int64)
MASKS = list(mask_parts(1, 1, 1, 1, torch.Generator()))
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RESULTS = ("out", "grad_q", "grad_k", "grad_v")


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


def tail(parts: dict, scale: float, dropout_p: float, empty_rows: str) -> tuple:
    named = (parts.get(name) for name in ("keep", "key_keep", "lengths", "bias", "causal", "window"))
    return *named, scale, dropout_p, SEED if dropout_p else None, empty_rows == "zero", "native"


def native(
    q, k, v, grad_out, parts: dict, *, dropout_p: float = 0.0, empty_rows: str = "uniform"
) -> tuple[Tensor, ...]:
    """out, logsumexp and the gradients of q, k, v by the C++ kernels, every byte of them NaN beforehand."""
    options = tail(parts, 1 / math.sqrt(q.shape[-1]), dropout_p, empty_rows)
    ops = torch.ops.transformer_fast
    out, logsumexp = ops.attention(q, k, v, *options)
    grads = ops.attention_backward(grad_out, q, k, v, out, logsumexp, None, *options)
    return out, logsumexp, *grads


def oracle(q, k, v, grad_out, parts: dict, *, dropout_p: float = 0.0, empty_rows: str = "uniform", dtype=None):
    dtype = dtype or q.dtype
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    if parts.get("bias") is not None:
        parts = {**parts, "bias": parts["bias"].to(dtype)}
    scale = 1 / math.sqrt(q.shape[-1])
    options = {"scale": scale, "dropout_p": dropout_p, "seed": SEED, "empty_rows": empty_rows}
    out, _, logsumexp = reference(*leaves, **parts, **options)
    return out.detach(), logsumexp.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))


def inputs(B, H, Hkv, Lq, Lk, D, dtype=torch.float32) -> list[Tensor]:
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def check(tensors, parts: dict, *, ulps: float = 8.0, **options) -> tuple[Tensor, ...]:
    """Holds forward and every gradient to the gate; returns what the kernels computed."""
    actual = native(*tensors, parts, **options)
    eager = oracle(*tensors, parts, **options)
    exact = oracle(*tensors, parts, **options, dtype=torch.float64)
    if tensors[0].dtype == torch.float64:  # no wider truth here: the oracle is as far from it as the kernel
        ulps *= max(tensors[0].shape[2], tensors[1].shape[2]) ** 0.5
    for name, a, e, x in zip(("out", "logsumexp", *RESULTS[1:]), actual, eager, exact):
        if name == "logsumexp":
            # Always computed in fp32 (fp64): a unit of the last place of one term is the natural error.
            assert a.dtype == (torch.float64 if tensors[0].dtype == torch.float64 else torch.float32)
            wide = tensors[0].dtype in (torch.float32, torch.float64)
            assert torch.equal(a == -math.inf, x == -math.inf)
            assert_as_exact_as_eager(a, e if wide else a, x, what=name, ulps=ulps)
        else:
            assert a.dtype == tensors[0].dtype
            assert_as_exact_as_eager(a, e, x, what=name, ulps=ulps)
    return actual


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, dtype, dropout_p):
    parts = mask_parts(2, 4, 70, 150, torch.Generator().manual_seed(3))[mask]
    for empty_rows in ("uniform", "zero"):
        check(inputs(2, 4, 2, 70, 150, 24, dtype), parts, dropout_p=dropout_p, empty_rows=empty_rows)


TILE_BREAKERS = [(1, 1), (1, 5), (15, 17), (17, 15), (97, 64), (64, 97), (127, 129), (129, 127), (3, 257), (257, 3)]


@pytest.mark.parametrize("Lq, Lk", [*TILE_BREAKERS, (1, 1025), (1025, 66)])
def test_lengths_that_break_tiles(Lq, Lk):
    check(inputs(1, 2, 1, Lq, Lk, 16), {"causal": Lk - Lq}, dropout_p=0.1)


@pytest.mark.parametrize("D", [1, 3, 8, 16, 20, 40, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(D, dtype):
    for Lq in (2, 35):  # few queries take another product
        check(inputs(1, 2, 1, Lq, 50, D, dtype), {"lengths": torch.tensor([41], dtype=torch.int32)}, dropout_p=0.2)


@pytest.mark.parametrize(
    "B, H, Hkv, Lq, Lk", [(0, 2, 2, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0), (1, 6, 2, 5, 5), (1, 5, 1, 5, 5)]
)
def test_empty_and_grouped(B, H, Hkv, Lq, Lk):
    tensors = inputs(B, H, Hkv, Lq, Lk, 8)
    out, logsumexp, *grads = native(*tensors, {}) if 0 in (B, Lq, Lk) else check(tensors, {})
    assert out.shape == (B, H, Lq, 8) and [g.shape for g in grads] == [t.shape for t in tensors[:3]]
    if Lk == 0:
        assert out.eq(0).all() and logsumexp.eq(-math.inf).all() and grads[0].eq(0).all()
    if Lq == 0:
        assert grads[1].eq(0).all() and grads[2].eq(0).all()


def test_strided_inputs_and_masks():
    B, H, L, D = 2, 3, 70, 16
    fused = torch.randn(B, L, 3, H, D)  # one projection for q, k and v, heads not yet moved forward
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    sliced = torch.randn(B, H, L, 2 * D)[..., 3 : 3 + D]
    one_head = torch.randn(B, 1, L, D).expand(B, H, L, D)
    parts = {
        "keep": (torch.rand(L, L, B) > 0.3).permute(2, 0, 1).unsqueeze(1).expand(B, H, L, L),
        "key_keep": (torch.rand(B, 2 * L) > 0.2)[:, ::2].view(B, 1, 1, L),
        "lengths": torch.tensor([60], dtype=torch.int32).expand(B),
        "bias": torch.randn(H, L, L).transpose(1, 2).unsqueeze(0).expand(B, H, L, L),
        "causal": 5,
    }
    check([q, k, v, sliced], parts, dropout_p=0.1)
    check([sliced, one_head, one_head, torch.randn(B, L, H, D).transpose(1, 2)], parts)
    transposed = native(q.contiguous().transpose(1, 2).contiguous().transpose(1, 2), k, v, sliced, {})
    assert transposed[0].transpose(1, 2).is_contiguous(), (
        "a dense q gives its layout to out: merging heads is then a view"
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2, 40, 50), (1, 2, 1, 50), (2, 1, 40, 1), (1, 1, 40, 50)])
def test_bias_of_any_shape_and_dtype(shape, bias_dtype, dtype):
    bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -math.inf).to(bias_dtype)
    check(inputs(2, 2, 2, 40, 50, 16, dtype), {"bias": bias, "lengths": torch.tensor([50, 0], dtype=torch.int32)})


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
def test_rows_without_keys(dropout_p):
    q, k, v, grad_out = inputs(2, 2, 2, 6, 150, 8)
    parts = {"lengths": torch.tensor([0, 9], dtype=torch.int32)}
    out, logsumexp, grad_q, grad_k, grad_v = check((q, k, v, grad_out), parts, dropout_p=dropout_p)
    assert logsumexp[0].eq(-math.inf).all()
    assert grad_q[0].eq(0).all() and grad_k[0].eq(0).all()
    if dropout_p == 0:
        assert torch.allclose(out[0], v[0].mean(1, keepdim=True).expand_as(out[0]), atol=1e-6)
        assert torch.allclose(grad_v[0], (grad_out[0].sum(1, keepdim=True) / 150).expand_as(grad_v[0]), atol=1e-6)
    zeros = check((q, k, v, grad_out), parts, dropout_p=dropout_p, empty_rows="zero")
    assert all(zeros[i][0].eq(0).all() for i in (0, 2, 3, 4))


def test_dropout_drops_exactly_what_the_contract_says():
    # One-hot values and a constant row of scores read the dropped weights off the output.
    B, H, Lq, Lk, p = 2, 3, 37, 70, 0.3
    q, k = torch.zeros(B, H, Lq, Lk), torch.zeros(B, H, Lk, Lk)
    v = torch.eye(Lk).expand(B, H, Lk, Lk)
    out = torch.ops.transformer_fast.attention(q, k, v, *tail({}, 1.0, p, "uniform"))[0]
    assert torch.equal(out != 0, attention_keep(SEED, p, B, H, Lq, Lk))
    assert torch.allclose(out[out != 0], torch.tensor(1 / Lk / (1 - p)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["lengths", "key_keep", "keep", "bias"])
def test_what_is_stored_at_blocked_keys_never_shows(bad, how):
    B, H, Lq, Lk, D = 2, 2, 20, 140, 8
    q, k, v, grad_out = inputs(B, H, H, Lq, Lk, D)
    kept = torch.arange(Lk) < 133
    if how in ("key_keep", "keep"):
        kept = kept & (torch.rand(Lk) > 0.5)
    parts = {
        "lengths": {"lengths": torch.tensor([133, 133], dtype=torch.int32)},
        "key_keep": {"key_keep": kept.view(1, 1, 1, Lk)},
        "keep": {"keep": kept.expand(1, 1, Lq, Lk)},
        "bias": {"bias": torch.zeros(Lq, Lk).masked_fill(~kept, -math.inf).view(1, 1, Lq, Lk)},
    }[how]
    blocked = ~kept.view(1, 1, Lk, 1)
    for dropout_p in (0.0, 0.3):
        clean = native(q, k, v, grad_out, parts, dropout_p=dropout_p)
        stained = native(
            q, k.masked_fill(blocked, bad), v.masked_fill(blocked, bad), grad_out, parts, dropout_p=dropout_p
        )
        for name, a, b in zip(("out", "logsumexp", *RESULTS[1:]), clean, stained):
            assert torch.allclose(a, b, atol=2e-6) and b.isfinite().all(), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_future_key_shows_to_nobody_before_it(bad):
    L, where = 80, 50
    q, k, v, grad_out = inputs(1, 2, 2, L, L, 8)
    clean = native(q, k, v, grad_out, {"causal": 0})
    stained_k, stained_v = k.clone(), v.clone()
    stained_k[:, :, where], stained_v[:, :, where] = bad, bad
    stained = native(q, stained_k, stained_v, grad_out, {"causal": 0})
    for a, b in ((clean[0], stained[0]), (clean[2], stained[2])):  # out, grad_q
        assert torch.allclose(a[:, :, :where], b[:, :, :where], atol=1e-6)
        assert not b[:, :, where:].isfinite().all()


def test_a_blocked_nan_shows_in_no_uniform_row():
    q, k, v, grad_out = inputs(1, 1, 1, 4, 6, 8)
    v[:, :, 5], k[:, :, 5] = math.nan, math.nan
    parts = {"lengths": torch.tensor([[0, 3, 5, 0]], dtype=torch.int32)}
    actual = native(q, k, v, grad_out, parts)
    exact = oracle(q, k, v, grad_out, parts, dtype=torch.float64)
    for a, x in zip(actual[:4], exact[:4]):
        assert torch.allclose(a.double(), x, atol=1e-6)
    assert actual[4].isfinite().all()


def test_scores_far_below_zero():
    # L % 128 == 64 and a row logsumexp below -88, where exp(score) alone is 0 in fp32.
    q, k, v, grad_out = inputs(1, 1, 1, 192, 192, 16)
    q, k = q.abs() + 4, -(k.abs() + 6)
    logsumexp = check((q, k, v, grad_out), {})[1]
    assert logsumexp.max() < -88


def test_large_and_equal_scores():
    q, k, v, grad_out = inputs(1, 1, 1, 20, 40, 16)
    check((q * 100, k * 100, v, grad_out), {})
    check((q * 0, k, v, grad_out), {"causal": 0})


@pytest.mark.parametrize("B, H, Hkv, Lq, Lk", [(3, 4, 2, 70, 90), (1, 1, 1, 300, 700), (1, 2, 1, 2, 900)])
def test_same_bits_whatever_the_run_and_the_threads(B, H, Hkv, Lq, Lk):
    tensors = inputs(B, H, Hkv, Lq, Lk, 20)
    parts = {"causal": Lk - Lq}
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            runs.append(native(*tensors, parts, dropout_p=0.1))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


def test_a_query_has_the_same_output_in_any_company():
    # Its row of the score tile depends on neither the other queries nor the batch.
    q, k, v, _ = inputs(3, 2, 2, 70, 60, 16)
    options = tail({}, 0.25, 0.0, "uniform")
    op = torch.ops.transformer_fast.attention
    whole = op(q, k, v, *options)[0]
    assert torch.equal(whole[1:2, :, 16:48], op(q[1:2, :, 16:48], k[1:2], v[1:2], *options)[0])


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradcheck_in_double(empty_rows):
    q, k, v, _ = inputs(2, 2, 1, 4, 5, 3, torch.float64)
    parts = {"lengths": torch.tensor([0, 4], dtype=torch.int32), "causal": 1, "bias": torch.randn(1, 2, 4, 5).double()}
    options = tail(parts, 0.7, 0.2, empty_rows)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *t: torch.ops.transformer_fast.attention(*t, *options)[0], leaves)


def test_every_pair_of_masks():
    every = mask_parts(1, 2, 20, 40, torch.Generator().manual_seed(8))
    single = {name: parts for name, parts in every.items() if len(parts) == 1}
    tensors = inputs(1, 2, 2, 20, 40, 8)
    for (_, one), (_, other) in itertools.combinations(single.items(), 2):
        check(tensors, {**one, **other})
