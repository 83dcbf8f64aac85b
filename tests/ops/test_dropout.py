"""Dropout: every backend of this machine draws exactly the mask of the contract, and the op itself."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager, fixed_seed

import transformer_fast as tfast
from transformer_fast import backends, reference
from transformer_fast.ops import dropout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 7), (5, 8), (17, 63), (2, 3, 64), (97, 129), (3, 1024), (2, 2500)]
SEED = -6_543_210_987_654_321


def keep_mask(p, shape):
    return reference.dropout.elementwise_keep(torch.tensor([SEED]), p, shape[:-1].numel(), shape[-1]).view(shape)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1e-9])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_mask_of_the_contract(dtype, shape, p, device):
    x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    with fixed_seed(SEED):
        y = dropout(x, p)
        (grad_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
    keep = keep_mask(p, x.shape).to(device)
    expected = torch.where(keep, reference.dropout.rescale(p), 0.0).to(dtype)
    assert torch.equal(y, expected) and torch.equal(grad_x, expected)


def test_the_mask_in_double():
    with fixed_seed(SEED):
        y = dropout(torch.ones(9, 77, dtype=torch.float64), 0.3)
    assert torch.equal(y != 0, keep_mask(0.3, y.shape))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", ["", "residual", "bias", "bias and residual"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle(dtype, p, added, relu, device):
    compare((6, 11, 52), dtype, p, added.split(" and "), relu, device)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2500), (3, 7), (17, 63), (129, 8), (257, 520), (5000, 3), (2, 65_536)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_bias_at_any_size(dtype, shape, relu, device):
    compare(shape, dtype, 0.2, ["bias"], relu, device)


def test_millions_of_rows(device):
    compare((2**20 + 3, 2), torch.bfloat16, 0.0, ["bias"], True, device)


def test_a_32_bit_bias_with_16_bit_rows(device):
    grad_bias = compare((97, 40), torch.bfloat16, 0.1, ["bias"], True, device, bias_dtype=torch.float32)["grad_bias"]
    assert grad_bias.dtype == torch.float32


def compare(shape, dtype, p, added, relu, device, bias_dtype=None):
    """Hold it to the gate: the output and every gradient, with poisoned memory."""
    tensors = {"x": torch.randn(shape), "residual": torch.randn(shape), "bias": torch.randn(shape[-1])}
    tensors = {name: t.to(device, dtype) for name, t in tensors.items() if name == "x" or name in added}
    if bias_dtype is not None:
        tensors["bias"] = tensors["bias"].to(bias_dtype)
    grad_out = torch.randn(shape, device=device).to(dtype)

    def outcome(call, dtype=None):
        leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in tensors.items()}
        out = call(**leaves)
        grads = torch.autograd.grad(out, leaves.values(), grad_out.to(out.dtype))
        return {"out": out.detach(), **{f"grad_{name}": g for name, g in zip(leaves, grads)}}

    def oracle(x, **rest):
        return reference.dropout.dropout(x, p, seed.to(device), relu=relu, **rest)

    with fixed_seed(SEED) as seed:
        actual = outcome(lambda x, **rest: dropout(x, p, relu=relu, **rest))
    eager, exact = outcome(oracle), outcome(oracle, torch.float64)
    rows = tensors["x"].numel() / shape[-1]
    for name in exact:
        ulps = 4 * rows**0.5 if name == "grad_bias" else 8
        assert_as_exact_as_eager(actual[name], eager[name], exact[name], ulps=ulps, what=name)
    return actual


def test_nothing_to_do_returns_x_itself():
    x = torch.randn(3, 4)
    assert dropout(x, 0.0) is x


def test_non_finite_values_where_dropped_do_not_show(device):
    x = torch.full((40, 40), float("nan"), device=device)
    with fixed_seed(SEED):
        y = dropout(x, 0.5)
    assert torch.equal(y.isnan(), keep_mask(0.5, x.shape).to(device))
    assert y.nan_to_num(0.0).abs().max() == 0


def test_any_strides(device):
    x = torch.randn(6, 20, 30, device=device)
    for view in (x.permute(2, 0, 1), x[..., ::2], x[:1].expand(6, 20, 30)):
        grad_out = torch.randn(view.shape[::-1], device=device).permute(2, 1, 0)
        results = []
        for t in (view, view.contiguous()):
            leaf = t.detach().requires_grad_()
            with fixed_seed(SEED):
                out = dropout(leaf, 0.4, residual=view)
            results.append((out, *torch.autograd.grad(out, leaf, grad_out)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_elements(shape, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    y = dropout(x, 0.5, relu=True)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_the_same_on_any_number_of_threads():
    x = torch.randn(300, 257)
    leaves = torch.randn(300, 257, requires_grad=True), torch.randn(257, requires_grad=True)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with fixed_seed(SEED):
                out = dropout(leaves[0], 0.2, bias=leaves[1], relu=True)
                results.append([out, *torch.autograd.grad(out, leaves, x)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_manual_seed_governs_it_and_the_share_is_right(device):
    x = torch.ones(1000, 1000, device=device)
    torch.manual_seed(4)
    first, second = dropout(x, 0.1), dropout(x, 0.1)
    torch.manual_seed(4)
    assert torch.equal(first, dropout(x, 0.1)) and not torch.equal(first, second)
    share = (first == 0).double().mean().item()
    assert abs(share - round(0.1 * 65536) / 65536) < 5 * (0.1 * 0.9 / x.numel()) ** 0.5


def test_gradcheck_in_double():
    x, residual = (torch.randn(4, 13, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True)
    for relu in (False, True):
        with fixed_seed(SEED):
            assert torch.autograd.gradcheck(
                lambda x, b, r, relu=relu: dropout(x, 0.3, bias=b, residual=r, relu=relu), (x, bias, residual)
            )


@pytest.mark.parametrize("relu", [False, True])
def test_opcheck(relu, device):
    x, residual = (torch.randn(3, 20, device=device, requires_grad=True) for _ in range(2))
    seed = torch.tensor([SEED], device=device)
    backend = backends.resolve("dropout", device, x.dtype)
    bias = torch.randn(20, device=device, requires_grad=True)
    op = torch.ops.transformer_fast.dropout.default
    torch.library.opcheck(op, (x, None, None if relu else residual, relu, 0.3, seed, backend))
    torch.library.opcheck(op, (x, bias, None, relu, 0.3, seed, backend))
    y = op(x.detach(), None, None, relu, 0.3, seed, backend) if relu else None
    backward = torch.ops.transformer_fast.dropout_backward.default
    for has_bias in (False, True):
        torch.library.opcheck(backward, (residual.detach(), y, relu, 0.3, seed, has_bias, backend))


def test_compiles(device):
    x = torch.randn(6, 32, device=device)
    compiled = torch.compile(lambda x: dropout(x, 1.0, residual=x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x)


def test_a_second_derivative_is_refused_by_the_kernels_and_given_by_the_reference(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(dropout(x, 0.5).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="dropout_backward cannot be differentiated again"):
        grad.sum().backward()
    with tfast.backend("reference"):
        (grad,) = torch.autograd.grad(dropout(x, 0.5).pow(2).sum(), x, create_graph=True)
        grad.sum().backward()


def test_relu_alone_is_relu(device):
    x = torch.randn(5, 9, device=device)
    assert torch.equal(dropout(x, 0.0, relu=True), F.relu(x))


X = torch.zeros(2, 8)
WRONG = {
    "a number": (TypeError, r"x must be a tensor, got float", lambda: dropout(1.0, 0.1)),
    "integers": (TypeError, r"x must be a float tensor, got torch.int64", lambda: dropout(X.long(), 0.1)),
    "no dimension": (ValueError, r"x must be \(\.\.\., d\)", lambda: dropout(torch.tensor(1.0), 0.1)),
    "p": (ValueError, r"p must lie in \[0, 1\], got -0.1", lambda: dropout(X, -0.1)),
    "p is nan": (ValueError, r"p must lie in \[0, 1\], got nan", lambda: dropout(X, float("nan"))),
    "residual": (ValueError, r"residual \(2, 7\) and x \(2, 8\)", lambda: dropout(X, 0.1, residual=X[:, :7])),
    "residual type": (TypeError, r"residual must be a float tensor", lambda: dropout(X, 0.1, residual=X.bool())),
    "bias": (ValueError, r"bias must be .* \(8,\) for x \(2, 8\), got \(7,\)", lambda: dropout(X, 0.1, bias=X[0, :7])),
    "bias type": (TypeError, r"bias must be a float tensor", lambda: dropout(X, 0.1, bias=X[0].long())),
    "bias device": (ValueError, r"x is on cpu but bias on meta", lambda: dropout(X, 0.1, bias=X[0].to("meta"))),
    "devices": (ValueError, r"x is on cpu but residual on meta", lambda: dropout(X, 0.1, residual=X.to("meta"))),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_named(what):
    error, message, call = WRONG[what]
    with pytest.raises(error, match=message):
        call()
