"""``flash_attn_func`` and its packed forms against a plain computation of flash-attention's documentation."""

from __future__ import annotations

import inspect

import pytest
import torch
from attention_kernels import assert_same_bits
from peers import assert_alike, plain_attention, seen

from transformer_fast import compat
from transformer_fast.compat import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from transformer_fast.testing import assert_as_exact_as_eager

B, H, D = 2, 4, 8
WINDOWS = [(-1, -1), (2, 1), (-1, 2), (4, -1)]


def inputs(Lq: int, Lk: int, Hkv: int, dtype=torch.float64):
    shapes = (B, Lq, H, D), (B, Lk, Hkv, D), (B, Lk, Hkv, D)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def plain(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """Return out (B, Lq, H, D), logsumexp (B, H, Lq) and weights (B, H, Lq, Lk), computed per batch entry."""
    allowed, results = seen(q.shape[1], k.shape[1], causal, window), []
    for b in range(q.shape[0]):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        results.append(plain_attention(q[b], k[b], v[b], allowed, softcap=softcap, slopes=own, scale=scale))
    return tuple(torch.stack(t) for t in zip(*results))


@pytest.mark.parametrize(("Lq", "Lk"), [(9, 9), (3, 11), (11, 3), (1, 7), (1, 1)])
@pytest.mark.parametrize("Hkv", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("alibi", [None, (H,), (B, H)])
def test_every_option(Lq, Lk, Hkv, causal, window, softcap, alibi, backend):
    q, k, v = leaves = inputs(Lq, Lk, Hkv)
    slopes = None if alibi is None else torch.rand(alibi, dtype=torch.float64).requires_grad_()
    leaves += [] if slopes is None else [slopes]
    options = {"causal": causal, "softcap": softcap, "softmax_scale": 0.3}
    given = {"window_size": window, "alibi_slopes": slopes}
    out, logsumexp, none = flash_attn_func(q, k, v, **options, **given, return_attn_probs=True)
    options["scale"] = options.pop("softmax_scale")
    expected, rows, _ = plain(q, k, v, window=window, slopes=slopes, **options)
    assert_alike((out, logsumexp), (expected, rows))
    assert out.is_contiguous() and none.shape == (0,)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(t, leaves, grad, allow_unused=True) for t in (out, expected))
    assert_alike(ours, [torch.zeros_like(x) if t is None else t for t, x in zip(theirs, leaves)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("Lq", "Lk"), [(129, 97), (15, 257)])
def test_as_exact_as_eager(Lq, Lk, dtype):
    q, k, v = inputs(Lq, Lk, 2, dtype)
    out = flash_attn_func(q, k, v, causal=True, window_size=(90, 0))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    results = []
    for kind in (dtype, torch.float64):
        leaves = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
        expected = plain(*leaves, causal=True, window=(90, 0))[0]
        results.append([expected, *torch.autograd.grad(expected, leaves, torch.ones_like(expected))])
    for ours, eager, exact in zip([out, *grads], *results):
        assert_as_exact_as_eager(ours, eager, exact, ulps=4 * (2 * Lq) ** 0.5)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (2, -1), "softcap": 2.0}])
def test_packed_forms(options):
    qkv = torch.randn(B, 5, 3, H, D)
    expected = flash_attn_func(*qkv.unbind(2), **options)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **options), expected)
    assert torch.equal(flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_say_what_dropout_drops(causal, backend):
    q, k, v = inputs(6, 9, 2)
    torch.manual_seed(5)
    out, logsumexp, signed = flash_attn_func(q, k, v, 0.4, causal=causal, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(flash_attn_func(q, k, v, 0.4, causal=causal), out)
    _, rows, weights = plain(q, k, v, causal)
    assert_alike((signed.abs(), logsumexp), (weights, rows))
    assert 0 < (signed < 0).sum() < (signed > 0).sum()
    kept = torch.where(signed > 0, signed, 0.0) / 0.6
    assert_alike((out,), (torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2)),), atol=1e-4)


def test_the_same_bits_in_every_run():
    q, k, v = inputs(33, 70, 2, torch.float32)
    slopes = torch.rand(H).requires_grad_()

    def run():
        out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, deterministic=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v, slopes))

    assert_same_bits(run, (1, 2, 3))


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 3), (3, 0)])
def test_no_queries_or_no_keys(Lq, Lk, backend):
    out, logsumexp, _ = flash_attn_func(*inputs(Lq, Lk, 2), causal=True, return_attn_probs=True)
    assert out.shape == (B, Lq, H, D) and not out.any() and torch.all(logsumexp == -torch.inf)


Q = torch.randn(2, 3, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flash_attn_func(Q[0], Q, Q), ValueError, r"q must be \(B, Lq, H, D\), got shape \(3, 4, 8\)"),
        (lambda: flash_attn_func([1], Q, Q), TypeError, "q must be a tensor"),
        (lambda: flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "heads that are a multiple of those of k"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=(-2, 0)), ValueError, "at least 0, or -1 for none"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=3), ValueError, r"must be \(left, right\), got 3"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=(1.0, 0)), TypeError, "two ints"),
        (lambda: flash_attn_func(Q, Q, Q, alibi_slopes=torch.rand(3)), ValueError, r"alibi must be \(H,\) or \(B, H\)"),
        (lambda: flash_attn_func(Q, Q, Q, dropout_p=2.0), ValueError, "dropout_p must lie in"),
        (lambda: flash_attn_qkvpacked_func(Q), ValueError, r"qkv must be \(B, L, 3, H, D\)"),
        (lambda: flash_attn_kvpacked_func(Q, torch.randn(2, 3, 3, 4, 8)), ValueError, r"kv must be \(B, Lk, 2, Hkv, D"),
    ],
)
def test_wrong_calls_say_what_is_expected(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("name", [name for name in compat.__all__ if name.startswith("flash_attn")])
def test_names_and_order_of_the_arguments(name):
    """Callers of flash-attention pass options by position, so the order must be the same."""
    order = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
    names = list(inspect.signature(getattr(compat, name)).parameters)
    if name == "flash_attn_with_kvcache":
        order = ["block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved"]
    first = names.index(order[0])
    assert names[first : first + len(order)] == order
