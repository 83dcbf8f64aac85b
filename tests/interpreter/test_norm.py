"""The Triton norm kernels against the fp64 oracle: on CPU under TRITON_INTERPRET=1, or on a GPU.

Shapes are tiny on CPU, where a program takes milliseconds; the interpreter cannot compute in bfloat16.
"""

import pytest
import torch

from transformer_fast.reference.norm import layer_norm as reference
from transformer_fast.testing import assert_as_exact_as_eager
from transformer_fast.triton.configs import NORM, NormConfig
from transformer_fast.triton.norm import norm_forward
from transformer_fast.triton.norm_backward import norm_backward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
KINDS = ["layer", "std", "rms"]
FUSED = {"plain": (False, 0.0), "residual": (True, 0.0), "residual and dropout": (True, 0.3)}
SEED = torch.tensor([-987654321987654321], device=DEVICE)


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows wider than 64 take the kernels for any width, so that a small matrix reaches every loop of them."""
    for kernel in ("forward", "backward"):
        monkeypatch.setitem(NORM, (kernel, 0), NormConfig(1, 32, 4, 1, 2, 3))
        for width in (128, 256):
            monkeypatch.delitem(NORM, (kernel, width))


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def make(rows, d, dtype, residual, weights=None):
    tensors = [random(rows, d, dtype=dtype), random(rows, d, dtype=dtype) if residual else None]
    tensors += [random(d, dtype=weights or dtype) for _ in range(2)]
    return tensors, [random(rows, d, dtype=dtype) for _ in range(1 + residual)]


def taken(kind, tensors):
    """x, residual, weight and bias as a kind takes them: "rms" has no bias."""
    return [*tensors[:3], None if kind == "rms" else tensors[3]]


def kernel(tensors, grads, eps, kind, p):
    """Outputs and gradients by the launchers, in the order of :func:`eager`."""
    x, residual, weight, bias = tensors
    seed = SEED if p > 0.0 else None
    out, summed, mean, rstd = norm_forward(x, residual, weight, bias, eps, kind, p, seed)
    rows = x if residual is None else summed
    grad_summed = None if residual is None else grads[1]
    gradients = norm_backward(grads[0], grad_summed, rows, weight, mean, rstd, kind, p, seed, bias is not None)
    grad_x, grad_residual, grad_weight, grad_bias = gradients
    results = {"out": out, "grad_x": grad_x}
    if residual is not None:
        results |= {"summed": summed, "grad_residual": grad_residual if p > 0.0 else grad_x}
    if weight is not None:
        results["grad_weight"] = grad_weight
    if bias is not None:
        results["grad_bias"] = grad_bias
    return results


def eager(tensors, grads, eps, kind, p, dtype=None):
    leaves = {
        name: t.to(dtype or t.dtype).requires_grad_()
        for name, t in zip(("x", "residual", "weight", "bias"), tensors, strict=True)
        if t is not None
    }
    x, residual, weight, bias = (leaves.get(name) for name in ("x", "residual", "weight", "bias"))
    outputs = reference(x, weight, bias, eps, kind=kind, residual=residual, dropout_p=p, seed=SEED)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(outputs, leaves.values(), [g.to(dtype or g.dtype) for g in grads])
    results = dict(zip(("out", "summed"), (o.detach() for o in outputs), strict=False))
    return results | {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def compare(tensors, grads, kind, p=0.0, eps=1e-5):
    tensors = taken(kind, tensors)
    actual = kernel(tensors, grads, eps, kind, p)
    narrow, exact = eager(tensors, grads, eps, kind, p), eager(tensors, grads, eps, kind, p, torch.float64)
    assert actual.keys() == exact.keys()
    sums = 4 * max(1, tensors[0].shape[0]) ** 0.5
    for name in exact:
        ulps = sums if name in ("grad_weight", "grad_bias") else 8
        assert_as_exact_as_eager(actual[name], narrow[name], exact[name], ulps=ulps, what=name)
    return actual


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (37, 20), (9, 97), (3, 513)])
def test_matches_the_oracle(rows, d, dtype, kind, fused):
    residual, p = FUSED[fused]
    compare(*make(rows, d, dtype, residual), kind, p)


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(1, 65), (3, 128), (5, 150)])
def test_rows_wider_than_a_tile_match_the_oracle(rows, d, kind, fused, small_tiles):
    residual, p = FUSED[fused]
    compare(*make(rows, d, torch.float32, residual), kind, p)


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_rows(dtype, kind, monkeypatch):
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 4096, 4))  # fewer programs: they run one after the other
    compare(*make(2, 65_536, dtype, True), kind, 0.3)


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_more_rows_than_programs(kind, monkeypatch):
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 16, 4))  # of which their partial sums take two steps
    compare(*make(16 * 2 * 8 + 21, 33, torch.float32, False), kind)


def test_32_bit_weights_with_16_bit_rows():
    actual = compare(*make(9, 40, torch.float16, True, weights=torch.float32), "layer", 0.2)
    assert actual["grad_weight"].dtype == actual["grad_bias"].dtype == torch.float32
    assert actual["out"].dtype == actual["grad_x"].dtype == torch.float16


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("absent", [(2,), (3,), (2, 3)])
@pytest.mark.parametrize("d", [24, 100])
def test_without_weight_or_bias(absent, d, kind, small_tiles):
    tensors, grads = make(5, d, torch.float32, False)
    compare([None if i in absent else t for i, t in enumerate(tensors)], grads, kind)


@pytest.mark.parametrize("kind", ["layer", "std"])
@pytest.mark.parametrize("d", [20, 100])
@pytest.mark.parametrize("value", [0.1, -3.3e4])
def test_a_constant_row_gives_the_bias_exactly(value, d, kind, small_tiles):
    tensors, grads = make(3, d, torch.float32, False)
    tensors[0].fill_(value)
    actual = kernel(tensors, grads, 1e-6, kind, 0.0)
    assert torch.equal(actual["out"], tensors[3].expand(3, d))
    assert all(t.isfinite().all() for t in actual.values())
    assert torch.equal(actual["grad_weight"], torch.zeros(d, device=DEVICE))


@pytest.mark.parametrize("d", [60, 100])
def test_a_large_offset_costs_no_accuracy(d, small_tiles):
    tensors, grads = make(5, d, torch.float32, False)
    tensors[0] += 1e4
    compare(tensors, grads, "std")


@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize("d", [48, 72])
def test_any_strides(d, kind, small_tiles):
    wide = random(3, 2 * d)
    weight, bias, grad_out = random(d), random(d), random(d, 3).t()
    for x in (wide[:, :d], wide[:, ::2], wide[:1, :d].expand(3, d)):
        tensors = taken(kind, (x, random(d, 3).t(), weight, bias))
        strided = kernel(tensors, [grad_out, grad_out], 1e-5, kind, 0.1)
        dense = kernel(
            [t if t is None else t.contiguous() for t in tensors], [grad_out.contiguous()] * 2, 1e-5, kind, 0.1
        )
        assert all(torch.equal(strided[name], dense[name]) for name in dense)


@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize(("rows", "d"), [(70, 33), (5, 100)])
def test_two_runs_agree_bit_for_bit(rows, d, kind, small_tiles):
    tensors, grads = make(rows, d, torch.float32, True)
    first, second = (kernel(taken(kind, tensors), grads, 1e-5, kind, 0.3) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_no_rows(kind):
    tensors, grads = make(0, 16, torch.float32, True)
    actual = kernel(taken(kind, tensors), grads, 1e-5, kind, 0.3)
    assert actual["out"].shape == (0, 16)
    assert torch.equal(actual["grad_weight"], torch.zeros(16, device=DEVICE))
