"""Linear layers of one input under autocast, as one product: against ``F.linear`` under autocast and float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.ops.linear import linear, projections
from transformer_fast.testing.gate import assert_as_exact_as_eager

native = extension.module()
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")
OUTS = ((32,), (32, 32, 32), (24, 40))
TYPES = torch.bfloat16, torch.float16


def layers(device, outs, bias, x_type=torch.float32, shape=(3, 7, 48)):
    """Return x, weights and biases that require gradients."""
    x = torch.randn(shape, device=device, dtype=x_type, requires_grad=True)
    weights = [torch.randn(out, shape[-1], device=device, requires_grad=True) for out in outs]
    return x, weights, [torch.randn(out, device=device, requires_grad=True) for out in outs] if bias else []


def ours(x, weights, biases, dtype):
    with torch.autocast(x.device.type, dtype):
        return native.projections(x, tuple(weights), tuple(biases))


def by_torch(x, weights, biases, dtype):
    with torch.autocast(x.device.type, dtype):
        return [F.linear(x, w, b) for w, b in itertools.zip_longest(weights, biases)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outs", OUTS, ids=str)
@pytest.mark.parametrize("x_type", ["float32", "autocast's"])
def test_results_and_gradients(device, outs, bias, dtype, x_type):
    x, weights, biases = layers(device, outs, bias, dtype if x_type == "autocast's" else torch.float32)
    leaves = [x, *weights, *biases]
    given = [torch.randn(*x.shape[:-1], out, device=device, dtype=dtype) for out in outs]
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in leaves]
    exact = [
        F.linear(rounded[0], *(group[i] for group in (rounded[1:][: len(outs)], rounded[1:][len(outs) :]) if group))
        for i in range(len(outs))
    ]
    found, expected = ours(x, weights, biases, dtype), by_torch(x, weights, biases, dtype)
    for out, eager, oracle in zip(found, expected, exact, strict=True):
        assert out.dtype == dtype and out.shape == eager.shape
        assert_as_exact_as_eager(out, eager, oracle)
    gradients = (
        torch.autograd.grad(found, leaves, given),
        torch.autograd.grad(expected, leaves, given),
        torch.autograd.grad(exact, rounded, [g.double() for g in given]),
    )
    for leaf, grad, eager, oracle in zip(leaves, *gradients, strict=True):
        assert grad.dtype == leaf.dtype and grad.is_contiguous()
        assert_as_exact_as_eager(grad, eager, oracle, ulps=4 * 21**0.5)


def test_gradients_of_parameters_are_not_rounded_to_16_bits(device):
    x, weights, biases = layers(device, (32, 32), bias=True)
    x = x.detach().to(torch.bfloat16).requires_grad_()
    found = ours(x, weights, biases, torch.bfloat16)
    given = [torch.randn_like(out) for out in found]
    grads = torch.autograd.grad(found, weights, given)
    for grad, of_out in zip(grads, given, strict=True):
        exact = of_out.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
        error = float((grad.double() - exact).abs().amax() / exact.abs().amax())
        assert error < (1e-6 if device.type == "cuda" else 2**-8)  # on a CPU the product itself has 16 bits


def test_an_output_without_a_gradient(device):
    x, weights, biases = layers(device, (16, 24, 8), bias=True)
    outputs = ours(x, weights, biases, torch.bfloat16)
    grad = torch.randn_like(outputs[1])
    grads = torch.autograd.grad(outputs[1], [x, *weights, *biases], grad, allow_unused=True)
    alone = ours(x, weights[1:2], biases[1:2], torch.bfloat16)
    expected = torch.autograd.grad(alone, [x, weights[1], biases[1]], grad)
    for found, wanted in zip((grads[0], grads[2], grads[5]), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert all(grads[place] is None for place in (1, 3, 4, 6))


def test_only_what_requires_a_gradient_gets_one(device):
    x, weights, biases = layers(device, (16, 24), bias=True)
    outputs = ours(x.detach(), weights, [b.detach() for b in biases], torch.bfloat16)
    sum(out.float().sum() for out in outputs).backward()
    assert all(weight.grad is not None for weight in weights) and x.grad is None and biases[0].grad is None


@pytest.mark.parametrize("x_type", ["float32", "autocast's"])
@pytest.mark.parametrize("score", ["sum", "square"])
def test_there_is_no_second_derivative(device, score, x_type):
    """Not even of a sum, whose gradient is a constant: with a penalty on a gradient, it would be missing."""
    x_type = torch.bfloat16 if x_type == "autocast's" else torch.float32
    x, weights, biases = layers(device, (16, 24), bias=True, x_type=x_type)
    out = ours(x, weights, biases, torch.bfloat16)[0].float()
    (grad,) = torch.autograd.grad((out if score == "sum" else out.pow(2)).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_a_write_to_what_is_saved_is_noticed(device):
    x, weights, biases = layers(device, (16, 24), bias=True)
    x = x.detach().to(torch.bfloat16)
    outputs = ours(x, weights, biases, torch.bfloat16)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].float().sum().backward()


def test_gradients_of_layers_count_their_writes_separately(device):
    x, weights, biases = layers(device, (16, 16), bias=True)
    sum(out.float().sum() for out in ours(x, weights, biases, torch.bfloat16)).backward()
    factor = torch.ones_like(weights[0], requires_grad=True)
    product = (weights[0].grad * factor).sum()
    weights[1].grad.zero_()
    product.backward()
    assert torch.equal(factor.grad, weights[0].grad) and weights[0].grad.any()


REFUSED = (
    "no autocast", "no gradients", "inference mode", "frozen weight", "float64", "16-bit weights", "one bias missing",
    "another width", "no rows", "a vector", "a transform", "strided weight",
)  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_calls_return_none(device, what):
    """Refused calls go to F.linear, with its results and its errors."""
    x, weights, biases = layers(device, (16, 24), bias=True)
    changes = {
        "frozen weight": lambda: (x, [weights[0].detach(), weights[1]], biases),
        "float64": lambda: (x.double(), [w.double() for w in weights], [b.double() for b in biases]),
        "16-bit weights": lambda: (x, [w.bfloat16() for w in weights], [b.bfloat16() for b in biases]),
        "one bias missing": lambda: (x, weights, biases[:1]),
        "another width": lambda: (x[..., :-1], weights, biases),
        "no rows": lambda: (x[:0], weights, biases),
        "a vector": lambda: (x[0, 0], weights, biases),
        "strided weight": lambda: (x, [w.t().contiguous().t() for w in weights], biases),
    }
    given = changes[what]() if what in changes else (x, weights, biases)
    if what == "no autocast":
        assert native.projections(x, tuple(weights), tuple(biases)) is None
    elif what == "no gradients":
        with torch.no_grad():
            assert ours(*given, torch.bfloat16) is None
    elif what == "inference mode":
        with torch.inference_mode():
            assert ours(*given, torch.bfloat16) is None
    elif what == "a transform":
        seen = []
        torch.func.vmap(lambda rows: seen.append(ours(rows, weights, biases, torch.bfloat16)) or rows)(x)
        assert seen == [None]
    else:
        assert ours(*given, torch.bfloat16) is None


def test_the_public_function_is_linear(device):
    """On a CPU it is F.linear, on a GPU in training under autocast one product."""
    x, weights, biases = layers(device, (16, 24), bias=True)
    for enabled in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            found = projections(x, weights, biases)
            expected = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
            single = linear(x, weights[0], biases[0])
        for out, eager in zip((*found, single), (*expected, expected[0]), strict=True):
            assert out.dtype == eager.dtype
            torch.testing.assert_close(out, eager)
    mixed = projections(x, weights, [biases[0], None])
    torch.testing.assert_close(mixed[1], F.linear(x, weights[1]))


@pytest.mark.parametrize("name", ["multi-head attention", "encoder layer", "feed-forward", "norm of a wider residual"])
def test_layers_in_training_under_autocast(device, name):
    """Layers under autocast compute what the reference computes: within twice its distance from float64."""
    torch.manual_seed(1)
    d, shape = 64, (2, 24, 64)
    made = {
        "multi-head attention": lambda: tfast.layers.MultiHeadAttention(4, d, 0.0),
        "encoder layer": lambda: tfast.layers.EncoderLayer(d, 4, 0.0, d_ff=128, norm="layer"),
        "feed-forward": lambda: tfast.layers.FeedForward(d, 128, 0.0),
        "norm of a wider residual": lambda: tfast.layers.LayerNorm(d),
    }
    module = made[name]().to(device)
    x, grad = torch.randn(shape, device=device), torch.randn(shape, device=device)

    def run(module, x, autocast, backend="auto"):
        x = x.detach().requires_grad_()
        with tfast.backend(backend), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            if name == "multi-head attention":
                out = module(x, x, x, tfast.AttentionMask.lengths(torch.tensor([24, 9], device=device)))
            elif name == "encoder layer":
                out = module(x, tfast.AttentionMask.causal())
            elif name == "feed-forward":
                out = module(x)
            else:
                out = module((x * 2).bfloat16() if autocast else x * 2, residual=x)[0]
        module.zero_grad()
        out.backward(grad.to(out.dtype))
        return [out.detach(), x.grad, *(p.grad for p in module.parameters())]

    found, eager = run(module, x, True), run(module, x, True, "reference")
    exact = run(copy.deepcopy(module).double(), x.double(), False, "reference")
    for actual, plain, oracle in zip(found, eager, exact, strict=True):
        assert actual.dtype == plain.dtype
        error = (actual.double() - oracle).norm() / oracle.norm()
        assert error <= 2 * (plain.double() - oracle).norm() / oracle.norm() + 2**-9
