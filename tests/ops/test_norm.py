"""``tfast.layer_norm`` against the fp64 oracle, on every backend of this machine.

test_every_op.py has what norms share with other ops: strides, threads, seeds, derivatives.
tests/interpreter/test_norm.py runs the same on Triton.
"""

import pytest
import torch
import torch.nn.functional as F
from op_calls import Call, hold

import transformer_fast as tfast
from transformer_fast.reference.norm import layer_norm as reference

CENTRED = ["layer", "std"]
KINDS = [*CENTRED, "rms"]
HALVES = [torch.float16, torch.bfloat16]
FUSED = {"plain": (False, 0.0), "residual": (True, 0.0), "residual and dropout": (True, 0.3)}


def norm(
    rows, d, kind="layer", dtype=torch.float32, *, fused="plain", eps=1e-5, weights=None, absent=(), offset=0.0,
    spread=1.0, device="cpu"
):  # fmt: skip
    """Return a call on x, residual, weight and bias, and its oracle. "rms" has no bias."""
    residual, dropout_p = FUSED[fused]
    shapes = {"x": (rows, d), "residual": (rows, d), "weight": (d,), "bias": (d,)}
    left_out = {*absent, *(() if residual else ["residual"]), *(["bias"] if kind == "rms" else [])}
    tensors = {}
    for name, shape in shapes.items():
        if name not in left_out:
            values = torch.randn(shape, dtype=torch.float64)
            values = offset + spread * values if name == "x" else values
            tensors[name] = values.to(device, weights or dtype if len(shape) == 1 else dtype)
    options = {"eps": eps, "kind": kind, "dropout_p": dropout_p}

    def called(function):
        def call(x, weight=None, bias=None, residual=None, **seed):
            return function(x, weight, bias, residual=residual, **options, **seed)

        return call

    return Call("layer_norm", called(tfast.layer_norm), tensors), called(reference)


def compare(call, oracle):
    rows = call.tensors["x"].shape[0]
    return hold(call, oracle, rows=rows, sums=("weight", "bias"))


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(1, 17), (17, 8), (15, 96), (97, 129), (257, 512), (1025, 20), (3, 5001)])
def test_matches_the_oracle(rows, d, dtype, kind, fused, device):
    compare(*norm(rows, d, kind, dtype, fused=fused, device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_32_bit_weights_with_16_bit_rows(kind, device):
    for dtype in HALVES:
        call, oracle = norm(97, 257, kind, dtype, fused="residual and dropout", weights=torch.float32, device=device)
        found = compare(call, oracle)
        assert [t.dtype for t in found.values()] == [dtype] * 4 + [torch.float32] * (1 if kind == "rms" else 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize(("rows", "d"), [(33, 40), (7, 3001)])
def test_without_weight_or_bias(rows, d, absent, kind, device):
    compare(*norm(rows, d, kind, absent=absent, device=device))


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 14])
def test_the_widest_rows(rows, dtype, kind, device):
    d = 3_001 if dtype == torch.float64 else 65_536  # in wide rows of fp64 the oracle rounds more than the kernel
    compare(*norm(rows, d, kind, dtype, fused="residual and dropout", device=device))


@pytest.mark.cover(1)
@pytest.mark.parametrize(("kind", "dtype"), [("layer", torch.float32), ("std", torch.bfloat16), ("rms", torch.float32)])
def test_millions_of_rows(kind, dtype, device):
    compare(*norm(2**20 + 3, 3, kind, dtype, fused="residual", eps=1e-3, device=device))


def test_width_one(device):
    call, _ = norm(5, 1, device=device)
    grad = torch.randn(5, 1, device=device)
    out, grad_x, grad_weight, grad_bias = call.trained(grads=[grad])
    assert torch.equal(out, call.tensors["bias"].expand(5, 1))
    assert torch.equal(grad_weight, torch.zeros(1, device=device))
    torch.testing.assert_close(grad_bias, grad.sum(0))
    # grad_out * weight minus itself; a fused multiply-add leaves the rounding of the product, times 1 / sqrt(eps).
    rounding = torch.finfo(torch.float32).eps / 1e-5**0.5
    assert grad_x.abs().max() <= rounding * (grad * call.tensors["weight"]).abs().max()


@pytest.mark.parametrize("kind", CENTRED)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.3e4])
def test_a_constant_row_gives_the_bias_exactly(value, dtype, kind, device):
    eps = 1e-3 if dtype == torch.float16 else 1e-6  # the gradient is as large as 1 / eps, and float16 ends at 65504
    call, _ = norm(6, 333, kind, dtype, eps=eps, device=device)
    out, *gradients = call.trained(x=torch.full_like(call.tensors["x"], value))
    assert torch.equal(out, call.tensors["bias"].expand_as(out))
    assert all(g.isfinite().all() for g in gradients)
    assert torch.equal(gradients[1], torch.zeros_like(call.tensors["weight"]))


def test_gradients_of_constant_rows_are_those_of_the_oracle(device):
    call, oracle = norm(9, 64, "std", eps=1e-3, device=device)
    call.tensors["x"][::2] = 2.5
    compare(call, oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_offset_costs_no_accuracy(kind, device):
    call, oracle = norm(65, 512, kind, offset=1e4, device=device)
    out = compare(call, oracle)["output 0"]
    exact = oracle(**{name: t.double() for name, t in call.tensors.items()})
    # A mean near 1e4 rounded to fp32 is off by up to half an ulp, 4.9e-4; nothing else may go wrong.
    assert (out.double() - exact).abs().max() < 5.5e-4 * call.tensors["weight"].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_deviations_far_below_eps(kind, device):
    compare(*norm(33, 64, kind, spread=1e-9, eps=1e-6, device=device))


def test_everything_dropped_leaves_the_residual(device):
    x, residual = torch.randn(2, 9, 32, device=device)
    x[3] = float("nan")
    out, summed = tfast.layer_norm(x, None, None, residual=residual, dropout_p=1.0)
    assert torch.equal(summed, residual) and out.isfinite().all()


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_outputs_used_alone(used, device):
    call, oracle = norm(17, 24, fused="residual and dropout", device=device)
    only = [
        call._replace(function=lambda f=f, **t: f(**t)[used], constant=("weight", "bias"))
        for f in (call.function, oracle)
    ]
    hold(only[0], only[1].function)


def test_rms_of_rows_whose_squares_float16_cannot_hold(device):
    x = torch.full((3, 64), 3e4, device=device).half().requires_grad_()
    out = tfast.layer_norm(x, None, None, kind="rms")
    assert torch.equal(out, torch.ones_like(x))
    out.sum().backward()
    assert x.grad.abs().max() < 1e-7


def llama_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def t5_norm(x, weight, eps):
    normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype)


@pytest.mark.parametrize("written", [llama_norm, t5_norm])
def test_rms_is_at_least_as_exact_as_models_write_it(written, device):
    for dtype in HALVES:
        x, weight = torch.randn(129, 512, device=device).to(dtype), torch.rand(512, device=device).add(0.5).to(dtype)
        exact = F.rms_norm(x.double(), (512,), weight.double(), 1e-6)
        ours, theirs = tfast.layer_norm(x, weight, None, 1e-6, kind="rms"), written(x, weight, 1e-6)
        assert (ours - exact).norm() < 0.9 * (theirs - exact).norm()
        # PyTorch rounds twice, up to one ulp each time.
        assert (ours - theirs).abs().float().div(theirs.abs()).max() <= 2 * torch.finfo(dtype).eps


def test_a_narrower_x_is_added_in_the_dtype_of_the_residual(device):
    for dtype in HALVES:
        x, residual = torch.randn(5, 16, device=device).to(dtype), torch.randn(5, 16, device=device)
        out, summed = tfast.layer_norm(x, None, None, residual=residual)
        assert out.dtype == summed.dtype == torch.float32
        assert torch.equal(summed, residual + x)


@pytest.mark.parametrize("d", [40, 333])
def test_the_sum_is_normed_as_it_is_stored(d, device):
    for dtype in HALVES:
        x, residual = torch.randn(2, 9, d, device=device).to(dtype)
        out, summed = tfast.layer_norm(x, None, None, residual=residual)
        assert torch.equal(out, tfast.layer_norm(summed, None, None))
