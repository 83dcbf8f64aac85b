"""The Triton dropout kernels: exactly the mask of the contract, on CPU under TRITON_INTERPRET=1, or on a GPU."""

import pytest
import torch
from helpers import assert_as_exact_as_eager, poisoned_memory

from transformer_fast import reference
from transformer_fast.kernels.dropout import dropout_backward, dropout_forward

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
    with poisoned_memory():
        y = dropout_forward(ones, None, False, p, SEED)
        grad_x = dropout_backward(ones, None, False, p, SEED)
    expected = torch.where(expected_mask(ones.shape, p), reference.dropout.rescale(p), 0.0).to(dtype)
    assert torch.equal(y, expected) and torch.equal(grad_x, expected)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle(dtype, added, relu):
    x, residual = torch.randn(2, 3, 20, 17, device=DEVICE).to(dtype).unbind()
    residual = residual if added else None
    y = dropout_forward(x, residual, relu, 0.25, SEED)
    wide = [None if t is None else t.double() for t in (x, residual)]
    eager = reference.dropout.dropout(x, 0.25, SEED, residual=residual, relu=relu)
    exact = reference.dropout.dropout(wide[0], 0.25, SEED, residual=wide[1], relu=relu)
    assert_as_exact_as_eager(y, eager, exact)


def test_the_gradient_through_the_relu():
    x, grad_out = torch.randn(2, 30, 40, device=DEVICE).unbind()
    y = dropout_forward(x, None, True, 0.5, SEED)
    passed = expected_mask(x.shape, 0.5) & (x > 0)
    assert torch.equal(dropout_backward(grad_out, y, True, 0.5, SEED), torch.where(passed, grad_out * 2, 0.0))


def test_non_finite_values_where_dropped_do_not_show():
    y = dropout_forward(torch.full((12, 40), float("nan"), device=DEVICE), None, False, 0.5, SEED)
    keep = expected_mask(y.shape, 0.5)
    assert torch.equal(y.isnan(), keep) and torch.equal(y[~keep], torch.zeros_like(y[~keep]))


def test_any_strides():
    x, grad_out = torch.randn(2, 20, 30, device=DEVICE).unbind()
    for a, b in ((x.t(), grad_out.t()), (x[:, ::2], grad_out[:, ::2]), (x[:1].expand(20, 30), grad_out)):
        dense = dropout_forward(a.contiguous(), b.contiguous(), False, 0.3, SEED)
        assert torch.equal(dropout_forward(a, b, False, 0.3, SEED), dense)
        assert torch.equal(
            dropout_backward(b, None, False, 0.3, SEED), dropout_backward(b.contiguous(), None, False, 0.3, SEED)
        )


def test_no_elements():
    for shape in ((0, 8), (3, 0)):
        x = torch.zeros(shape, device=DEVICE)
        assert dropout_forward(x, None, False, 0.5, SEED).shape == shape
        assert dropout_backward(x, None, False, 0.5, SEED).shape == shape
