"""The Triton attention kernels against the fp64 oracle: on CPU under TRITON_INTERPRET=1, or on a GPU.

Shapes are tiny on CPU, where a program takes milliseconds. The interpreter cannot compute in bfloat16: there the
launchers read it as fp32, and only rounding is left to test.
"""

from __future__ import annotations

import pytest
import torch
from attention_calls import DTYPES, WINDOWS, call_of, inputs, random, reference_call, window_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.reference.attention import attention as reference
from transformer_fast.triton import configs
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

DIALECTS = list(mask_parts(1, 1, 1, 1, torch.Generator()))
NAMES = ("out", "grad_q", "grad_k", "grad_v")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 32 x 32, so that small shapes have whole tiles, edges and more than one of each."""
    if device.type == "cpu":
        for key in configs.ATTENTION:
            monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 32, 4, 1))


def kernel(q, k, v, grad, call):
    """Output, its logsumexp, and the three gradients, in memory that starts as NaN."""
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    return out, logsumexp, *attention_backward(grad, q, k, v, out, logsumexp, call)


def oracle(q, k, v, grad, call, dtype):
    """The same five by the reference, in `dtype`, on CPU."""
    q, k, v = (t.detach().cpu().to(dtype).requires_grad_() for t in (q, k, v))
    out, _, logsumexp = reference(q, k, v, **reference_call(call))
    return out.detach(), logsumexp.detach(), *torch.autograd.grad(out, (q, k, v), grad.cpu().to(dtype))


def check(q, k, v, grad, call):
    """Hold one call to the gate: output, logsumexp and gradients."""
    out, logsumexp, *grads = (t.cpu() for t in kernel(q, k, v, grad, call))
    eager_out, eager_logsumexp, *eager_grads = oracle(q, k, v, grad, call, q.dtype)
    exact_out, exact_logsumexp, *exact_grads = oracle(q, k, v, grad, call, torch.float64)
    assert torch.equal(logsumexp == -torch.inf, exact_logsumexp == -torch.inf)
    assert_as_exact_as_eager(logsumexp, eager_logsumexp, exact_logsumexp, what="logsumexp")
    for name, ours, eager, exact in zip(
        NAMES, (out, *grads), (eager_out, *eager_grads), (exact_out, *exact_grads), strict=True
    ):
        assert ours.dtype == q.dtype
        if name in ("grad_q", "grad_k") and not exact.any():
            # One visible key a row: gradients of scores are differences of equal numbers, one of them (through
            # `out`) rounded to the type. Eager never rounds it, so it is no measure; what cancels is.
            cancelling = grad.abs().max() * v.abs().max() * q.shape[-1] * call.scale * max(q.abs().max(), k.abs().max())
            assert ours.abs().max() <= torch.finfo(q.dtype).eps * cancelling, name
            continue
        # The gradients of k and v are sums over all queries of all heads of their group.
        rows = q.shape[1] // k.shape[1] * q.shape[2] if name in ("grad_k", "grad_v") else 1
        assert_as_exact_as_eager(ours, eager, exact, ulps=4.0 * rows**0.5, what=name)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_mask(dialect, zero_empty_rows):
    B, H, Lq, Lk, D = 2, 2, 37, 70, 20
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(1))[dialect]
    check(*inputs(B, H, 1, Lq, Lk, D, torch.float32), call_of(mask, D, zero_empty_rows=zero_empty_rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dialect", ["none", "causal, first rows empty", "lengths", "all"])
def test_dropout_draws_the_same_bits(dialect, dtype):
    B, H, Lq, Lk, D = 2, 2, 34, 66, 16
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(2))[dialect]
    check(*inputs(B, H, H, Lq, Lk, D, dtype), call_of(mask, D, dropout_p=0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("Lq", "Lk", "D"),
    [
        (1, 1, 1),
        (1, 129, 8),
        (15, 17, 20),
        (17, 97, 40),
        (97, 15, 64),
        (33, 64, 80),
        (64, 32, 96),
        (5, 9, 128),
        (3, 40, 256),
    ],
)
def test_shapes_that_break_kernels(Lq, Lk, D, dtype):
    check(*inputs(1, 2, 2, Lq, Lk, D, dtype), call_of({"causal": Lk - Lq}, D))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16], ids=str)
def test_bias(bias_dtype):
    B, H, Lq, Lk, D = 2, 2, 33, 40, 16
    bias = random(1, H, Lq, Lk, dtype=bias_dtype, seed=9)
    bias[:, :, :, 3] = -torch.inf
    bias[:, 0, 5] = -torch.inf
    bias[:, 1, 6] = torch.finfo(bias_dtype).min
    check(*inputs(B, H, H, Lq, Lk, D, torch.float16), call_of({"bias": bias, "causal": 7}, D))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale(scale):
    check(*inputs(1, 2, 1, 20, 40, 16, torch.float32), call_of({"causal": 20}, 16, scale=scale))


def test_strided_and_expanded():
    B, H, Lq, Lk, D = 2, 2, 20, 40, 24
    q = random(B, Lq, H, D).transpose(1, 2)
    k = random(B, H, 2 * Lk, D + 3, seed=1)[:, :, ::2, 3:]
    v = random(1, 1, Lk, D, seed=2).expand(B, H, Lk, D)
    grad = random(1, 1, 1, 1, seed=3).expand(B, H, Lq, D)
    keep = (random(Lk, Lq, seed=4) > 0).t().expand(B, 1, Lq, Lk)
    check(q, k, v, grad, call_of({"keep": keep}, D))
    out, _, grad_q, *_ = kernel(q, k, v, grad, call_of({"keep": keep}, D))
    assert out.stride() == q.stride() and grad_q.stride() == q.stride()


@pytest.mark.parametrize("dialect", ["none", "all"])
@pytest.mark.parametrize("magnitude", [1.0, 60.0])
def test_gradient_of_the_logsumexp(dialect, magnitude):
    """Added to that of the output; the large scores take the way on which fp32 rows are summed again."""
    B, H, Lq, Lk, D = 2, 4, 37, 70, 16
    q, k, v, grad = inputs(B, H, 2, Lq, Lk, D, torch.float32)
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(4))[dialect]
    call, q = call_of(mask, D), q * magnitude
    out, logsumexp = attention_forward(q, k, v, call)[:2]
    grad_logsumexp = random(B, H, 1, seed=5).expand(B, H, Lq).where(logsumexp > -torch.inf, torch.nan)
    ours = attention_backward(grad, q, k, v, out, logsumexp, call, grad_logsumexp)

    def by_the_reference(dtype):
        leaves = [t.cpu().to(dtype).requires_grad_() for t in (q, k, v)]
        out, _, logsumexp = reference(*leaves, **reference_call(call))
        given = grad_logsumexp.cpu().to(dtype).nan_to_num(0.0)
        loss = (out * grad.cpu().to(dtype)).sum() + (logsumexp.masked_fill(logsumexp == -torch.inf, 0.0) * given).sum()
        return torch.autograd.grad(loss, leaves)

    eager, exact = by_the_reference(torch.float32), by_the_reference(torch.float64)
    for name, *values in zip(NAMES[1:], ours, eager, exact, strict=True):
        rows = 1 if name == "grad_q" else H // 2 * Lq
        assert_as_exact_as_eager(values[0].cpu(), *values[1:], ulps=4.0 * rows**0.5, what=name)


def test_rows_too_far_apart_for_32_bits_are_copied(monkeypatch):
    """As if they were: every tensor whose rows are not neighbours."""
    monkeypatch.setattr("transformer_fast.triton.attention.tiles.WIDEST_STRIDE", 60)
    B, H, Lq, Lk, D = 1, 2, 20, 40, 8
    q, k, v, grad = (random(B, L, H, 64, seed=i)[..., :D].transpose(1, 2) for i, L in enumerate((Lq, Lk, Lk, Lq)))
    mask = {"bias": random(1, 1, Lq, 128, seed=5)[..., :Lk], "keep": random(1, 1, Lq, 128, seed=6)[..., :Lk] > 0}
    check(q, k, v, grad, call_of(mask, D))


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_do(B, Lq, Lk):
    q, k, v, grad = inputs(B, 2, 1, Lq, Lk, 8, torch.float32)
    out, logsumexp, *grads = kernel(q, k, v, grad, call_of({}, 8))
    assert out.shape == q.shape and logsumexp.shape == (B, 2, Lq)
    assert (out == 0).all() and (logsumexp == -torch.inf).all()
    for gradient, like in zip(grads, (q, k, v), strict=True):
        assert gradient.shape == like.shape and (gradient == 0).all()


def test_very_negative_rows_past_a_half_tile():
    """L % 128 == 64 and a logsumexp below -88, where exp(-logsumexp) overflows, gave others NaN in grad_q."""
    q, k, v, grad = inputs(1, 1, 1, 192, 192, 16, torch.float32)
    call = call_of({}, 16, scale=1.0)
    q, k = q.abs() + 2, -k.abs() - 2
    assert attention_forward(q, k, v, call)[1].max() < -88
    check(q, k, v, grad, call)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["padding", "lengths", "causal", "dense"])
def test_blocked_keys_do_not_leak(where, value):
    """A NaN or Inf in k and v at key 35 reaches the queries that may see it, and no other number."""
    B, H, Lq, Lk, D = 1, 2, 40, 50, 16
    keep = torch.ones(1, 1, Lq, Lk, dtype=torch.bool)
    keep[..., 35] = False
    mask = {
        "padding": {"key_keep": keep[:, :, :1]},
        "lengths": {"lengths": torch.tensor([35], dtype=torch.int32)},
        "causal": {"causal": 0},
        "dense": {"keep": keep},
    }[where]
    clean = inputs(B, H, 1, Lq, Lk, D, torch.float32)
    dirty = [t.clone() for t in clean]
    dirty[1][:, :, 35] = value
    dirty[2][:, :, 35, 3] = value
    call = call_of(mask, D)
    seeing = torch.arange(Lq) >= (35 if where == "causal" else Lq)
    dirty[3][:, :, seeing] = 0.0
    clean[3][:, :, seeing] = 0.0

    results = [t.cpu() for t in kernel(*dirty, call)[:3]]
    eager, exact = oracle(*clean, call, torch.float32), oracle(*clean, call, torch.float64)
    for name, ours, unharmed, truth in zip(("out", "logsumexp", "grad_q"), results, eager, exact, strict=False):
        blocking = [t[:, :, ~seeing] for t in (ours, unharmed, truth)]
        assert_as_exact_as_eager(*blocking, what=f"{name} of the queries that block the key")
        if value != value:
            assert ours[:, :, seeing].isnan().reshape(H, -1).any(-1).all() or not seeing.any(), f"{name} hides a NaN"
    if where != "causal":
        assert all(g.isfinite().all() for g in kernel(*dirty, call))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_two_runs_agree_bit_for_bit(dropout_p):
    B, H, Lq, Lk, D = 2, 4, 40, 70, 32
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(3))["all"]
    tensors, call = inputs(B, H, 2, Lq, Lk, D, torch.float16), call_of(mask, D, dropout_p=dropout_p)
    for first, second in zip(kernel(*tensors, call), kernel(*tensors, call), strict=True):
        assert torch.equal(first, second)


def test_everything_dropped():
    tensors = inputs(1, 1, 1, 9, 11, 8, torch.float32)
    out, _, *grads = kernel(*tensors, call_of({}, 8, dropout_p=1.0))
    assert (out == 0).all() and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, zero_empty_rows):
    B, H, Lq, Lk, D = 2, 2, 70, 100, 16
    tensors = inputs(B, H, 1, Lq, Lk, D, torch.float32)
    check(*tensors, window_call(name, D, zero_empty_rows=zero_empty_rows))


@pytest.mark.parametrize("name", ["causal", "ahead", "behind, first rows empty"])
def test_windows_in_half_precision_with_dropout(name):
    D = 16
    tensors = inputs(2, 4, 2, 70, 100, D, torch.float16)
    check(*tensors, window_call(name, D, dropout_p=0.3))


@pytest.mark.parametrize("dialect", ["dense", "rows", "padding", "lengths", "lengths per query", "all"])
def test_window_with_every_part_of_a_mask(dialect):
    B, H, Lq, Lk, D = 2, 2, 70, 100, 16
    mask = mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(1))[dialect]
    mask = {"causal": 20} | mask | {"window": -15}
    tensors = inputs(B, H, 1, Lq, Lk, D, torch.float32)
    check(*tensors, call_of(mask, D, dropout_p=0.2))


def test_keys_before_the_window_do_not_leak():
    """NaN in keys that only the first queries see reaches those, and what lies before every window is not read."""
    H, D = 2, 16
    q, k, v, grad = inputs(1, H, 1, 40, 110, D, torch.float32)
    call = call_of({"causal": 70, "window": 64}, D, zero_empty_rows=True)
    clean_out, _, clean_grad_q, *_ = kernel(q, k, v, grad, call)
    for t in (k, v):
        t[:, :, :66] = torch.nan
    out, _, grad_q, *_ = kernel(q, k, v, grad, call)
    seeing = torch.arange(40, device=out.device) < 2
    for ours, expected in ((out, clean_out), (grad_q, clean_grad_q)):
        assert ours[:, :, seeing].isnan().all()
        torch.testing.assert_close(ours[:, :, ~seeing], expected[:, :, ~seeing])
