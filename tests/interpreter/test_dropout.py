"""Triton dropout kernels draw exactly the documented mask, on CPU under TRITON_INTERPRET=1 or on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.layers import FeedForward, feed_forward
from transformer_fast.testing import assert_as_exact_as_eager
from transformer_fast.triton.configs import DROPOUT, DropoutConfig
from transformer_fast.triton.dropout import dropout_backward, dropout_forward
from transformer_fast.triton.philox import elementwise_keep_tile, load_seed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
SEED = torch.tensor([-6_543_210_987_654_321], device=DEVICE)


def expected_mask(shape, p):
    return reference.dropout.elementwise_keep(SEED, p, shape[:-1].numel(), shape[-1]).view(shape)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (5, 64), (2, 3, 129), (3, 512), (2, 2500)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_mask_of_the_contract(dtype, shape, p):
    ones = torch.ones(shape, dtype=dtype, device=DEVICE)
    y = dropout_forward(ones, None, None, False, p, SEED)
    grad_x, _ = dropout_backward(ones, None, False, p, SEED, False)
    expected = torch.where(expected_mask(ones.shape, p), reference.dropout.rescale(p), 0.0).to(dtype)
    assert torch.equal(y, expected) and torch.equal(grad_x, expected)


@triton.jit
def _keep_kernel(keep, seed, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    key_low, key_high = load_seed(seed)
    tile = elementwise_keep_tile(key_low, key_high, 32768, first_row + tl.arange(0, ROWS), 0, ROWS, COLUMNS)
    tl.store(keep + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], tile)


def test_rows_beyond_32_bits_have_bits_of_their_own():
    first, far = (torch.empty(4, 16, dtype=torch.bool, device=DEVICE) for _ in range(2))
    _keep_kernel[(1,)](first, SEED, 3, 4, 16)
    _keep_kernel[(1,)](far, SEED, 2**32 + 3, 4, 16)
    assert torch.equal(first, expected_mask(torch.Size([7, 16]), 0.5)[3:]) and not torch.equal(far, first)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle(dtype, biased, added, relu):
    x, residual = torch.randn(2, 3, 20, 17, device=DEVICE).to(dtype).unbind()
    given = {"bias": torch.randn(17, device=DEVICE) if biased else None, "residual": residual if added else None}
    y = dropout_forward(x, *given.values(), relu, 0.25, SEED)
    wide = {name: None if t is None else t.double() for name, t in given.items()}
    eager = reference.dropout.dropout(x, 0.25, SEED, **given, relu=relu)
    exact = reference.dropout.dropout(x.double(), 0.25, SEED, **wide, relu=relu)
    assert_as_exact_as_eager(y, eager, exact)


@pytest.fixture
def few_programs(monkeypatch):
    """Use fewer programs than tiles of rows, so that each takes several tiles."""
    monkeypatch.setitem(DROPOUT, 64, DropoutConfig(8, 64, programs_per_multiprocessor=1))


# rows < programs; one tile; ragged last tiles; stripes of columns; widths that nothing divides
@pytest.mark.cover("values")
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (129, 33), (57, 64), (9, 600), (2, 3, 2100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_bias(dtype, shape, relu, p, few_programs):
    x, grad_out = torch.randn(2, *shape, device=DEVICE).to(dtype).unbind()
    bias, seed = torch.randn(shape[-1], device=DEVICE), SEED if p > 0.0 else None
    y = dropout_forward(x, bias, None, relu, p, seed)
    grad_x, grad_bias = dropout_backward(grad_out, y if relu else None, relu, p, seed, True)
    again = dropout_backward(grad_out, y if relu else None, relu, p, seed, True)
    assert torch.equal(grad_x, again[0]) and torch.equal(grad_bias, again[1])
    keep = expected_mask(x.shape, p) if p > 0.0 else torch.ones_like(x, dtype=torch.bool)
    keep = keep & (y > 0) if relu else keep
    exact = torch.where(keep, grad_out.double() * reference.dropout.rescale(p), 0.0)
    assert torch.equal(grad_x, exact.to(dtype))
    rows = x.numel() / shape[-1]
    total = exact.flatten(0, -2).sum(0)
    assert grad_bias.dtype == torch.float32
    assert_as_exact_as_eager(grad_bias, exact.float().flatten(0, -2).sum(0), total, ulps=4 * rows**0.5)


def test_the_gradient_through_the_relu():
    x, grad_out = torch.randn(2, 30, 40, device=DEVICE).unbind()
    y = dropout_forward(x, None, None, True, 0.5, SEED)
    passed = expected_mask(x.shape, 0.5) & (x > 0)
    grad_x, grad_bias = dropout_backward(grad_out, y, True, 0.5, SEED, False)
    assert torch.equal(grad_x, torch.where(passed, grad_out * 2, 0.0)) and grad_bias is None


def test_non_finite_values_where_dropped_do_not_show():
    y = dropout_forward(torch.full((12, 40), float("nan"), device=DEVICE), None, None, False, 0.5, SEED)
    keep = expected_mask(y.shape, 0.5)
    assert torch.equal(y.isnan(), keep) and torch.equal(y[~keep], torch.zeros_like(y[~keep]))


def test_any_strides():
    x, grad_out = torch.randn(2, 20, 30, device=DEVICE).unbind()
    for a, b in ((x.t(), grad_out.t()), (x[:, ::2], grad_out[:, ::2]), (x[:1].expand(20, 30), grad_out)):
        dense = dropout_forward(a.contiguous(), None, b.contiguous(), False, 0.3, SEED)
        assert torch.equal(dropout_forward(a, None, b, False, 0.3, SEED), dense)
        gradients = [dropout_backward(t, None, False, 0.3, SEED, True) for t in (b, b.contiguous())]
        assert all(torch.equal(*pair) for pair in zip(*gradients))


def test_no_elements():
    for shape in ((0, 8), (3, 0)):
        x = torch.zeros(shape, device=DEVICE)
        assert dropout_forward(x, None, None, False, 0.5, SEED).shape == shape
        grad_x, grad_bias = dropout_backward(x, None, False, 0.5, SEED, True)
        assert grad_x.shape == shape and torch.equal(grad_bias, torch.zeros(shape[-1], device=DEVICE))


def test_the_feed_forward_network_leaves_its_bias_to_it(monkeypatch):
    ff, x, biases = FeedForward(16, 24, 0.3), torch.randn(3, 5, 16), []
    fused = feed_forward.fused_dropout

    def seen(x, p, *, bias=None, **options):
        biases.append(bias is not None)
        return fused(x, p, bias=bias, **options)

    def run(backend):
        torch.manual_seed(1)
        with tfast.backend(backend):
            out = ff(x)
            return out, *torch.autograd.grad(out.square().sum(), list(ff.parameters()))

    monkeypatch.setattr(feed_forward, "fused_dropout", seen)
    torch.testing.assert_close(run("triton"), run("reference"))
    assert biases == [True, False]
