"""``tfast.layer_norm`` as users call it: every backend of this machine against the fp64 oracle, and the op itself."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager, fixed_seed

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.reference.norm import layer_norm as reference

CENTRED = ["layer", "std"]
KINDS = [*CENTRED, "rms"]
SIXTEEN_AND_32 = [torch.float32, torch.float16, torch.bfloat16]
FUSED = {"plain": (False, 0.0), "residual": (True, 0.0), "residual and dropout": (True, 0.3)}


def make(rows, d, dtype, residual, *, weights=None, device="cpu", offset=0.0, spread=1.0):
    """x, residual, weight, bias and the gradients of what it returns."""

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64)

    x = (offset + spread * random(rows, d)).to(device, dtype)
    tensors = [x, random(rows, d).to(device, dtype) if residual else None]
    tensors += [random(d).to(device, weights or dtype) for _ in range(2)]
    grads = [random(rows, d).to(device, dtype) for _ in range(1 + residual)]
    return tensors, grads


def taken(kind, tensors):
    """x, residual, weight and bias as a kind takes them: "rms" has no bias."""
    return [*tensors[:3], None if kind == "rms" else tensors[3]]


def outcome(call, tensors, grads):
    """Everything a call gives: its outputs, then the gradient of each tensor that is there."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    present = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(outputs, present, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *gradients]


def names(tensors):
    leaves = [name for name, t in zip(("x", "residual", "weight", "bias"), tensors, strict=True) if t is not None]
    outputs = ["out"] if tensors[1] is None else ["out", "summed"]
    return [*outputs, *(f"grad_{name}" for name in leaves)]


def oracle(kind, eps, dropout_p, seed):
    def call(x, residual, weight, bias):
        return reference(x, weight, bias, eps, kind=kind, residual=residual, dropout_p=dropout_p, seed=seed)

    return call


def norm_of(kind, eps, dropout_p):
    def call(x, residual, weight, bias):
        return tfast.layer_norm(x, weight, bias, eps, kind=kind, residual=residual, dropout_p=dropout_p)

    return call


def compare(tensors, grads, kind, dropout_p=0.0, eps=1e-5):
    """Hold it to the gate: outputs and every gradient, with poisoned memory."""
    tensors = taken(kind, tensors)
    with fixed_seed(-987654321987654321) as seed:
        actual = outcome(norm_of(kind, eps, dropout_p), tensors, grads)
    check = oracle(kind, eps, dropout_p, seed.to(tensors[0].device))
    eager = outcome(check, tensors, grads)
    exact = outcome(check, [None if t is None else t.double() for t in tensors], grads)
    sums = 4 * max(1, tensors[0].shape[0]) ** 0.5
    for name, a, e, x in zip(names(tensors), actual, eager, exact, strict=True):
        ulps = sums if name in ("grad_weight", "grad_bias") else 8
        assert_as_exact_as_eager(a, e, x, ulps=ulps, what=name)
    return actual


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SIXTEEN_AND_32)
@pytest.mark.parametrize(("rows", "d"), [(1, 17), (17, 8), (15, 96), (97, 129), (257, 512), (1025, 20), (3, 5001)])
def test_matches_the_oracle(rows, d, dtype, kind, fused, device):
    residual, dropout_p = FUSED[fused]
    compare(*make(rows, d, dtype, residual, device=device), kind, dropout_p)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_oracle_in_double(kind, fused):
    residual, dropout_p = FUSED[fused]
    compare(*make(37, 131, torch.float64, residual), kind, dropout_p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_32_bit_weights_with_16_bit_rows(dtype, kind, device):
    tensors, grads = make(97, 257, dtype, True, weights=torch.float32, device=device)
    actual = compare(tensors, grads, kind, 0.1)
    assert [t.dtype for t in actual] == [dtype] * 4 + [torch.float32] * (1 if kind == "rms" else 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absent", [(2,), (3,), (2, 3)])
@pytest.mark.parametrize(("rows", "d"), [(33, 40), (7, 3001)])
def test_without_weight_or_bias(rows, d, absent, kind, device):
    tensors, grads = make(rows, d, torch.float32, False, device=device)
    compare([None if i in absent else t for i, t in enumerate(tensors)], grads, kind)


def test_width_one(device):
    tensors, grads = make(5, 1, torch.float32, False, device=device)
    out, grad_x, grad_weight, grad_bias = outcome(norm_of("layer", 1e-5, 0.0), tensors, grads)
    assert torch.equal(out, tensors[3].expand(5, 1))
    assert torch.equal(grad_weight, torch.zeros(1, device=device))
    torch.testing.assert_close(grad_bias, grads[0].sum(0))
    # grad_out * weight minus itself; a fused multiply-add leaves the rounding of the product, times 1 / sqrt(eps).
    assert grad_x.abs().max() <= torch.finfo(torch.float32).eps / 1e-5**0.5 * (grads[0] * tensors[2]).abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SIXTEEN_AND_32)
@pytest.mark.parametrize("rows", [3, 14])
def test_the_widest_rows(rows, dtype, kind, device):
    compare(*make(rows, 65_536, dtype, True, device=device), kind, 0.1)


@pytest.mark.parametrize(("kind", "dtype"), [("layer", torch.float32), ("std", torch.bfloat16), ("rms", torch.float32)])
def test_millions_of_rows(kind, dtype, device):
    compare(*make(2**20 + 3, 3, dtype, True, device=device), kind, eps=1e-3)


@pytest.mark.parametrize("kind", CENTRED)
@pytest.mark.parametrize("dtype", SIXTEEN_AND_32)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.3e4])
def test_a_constant_row_gives_the_bias_exactly(value, dtype, kind, device):
    (x, _, weight, bias), (grad_out, *_) = make(6, 333, dtype, False, device=device)
    x.fill_(value)
    eps = 1e-3 if dtype == torch.float16 else 1e-6  # the gradient is as large as 1 / eps, and float16 ends at 65504
    out, *gradients = outcome(norm_of(kind, eps, 0.0), (x, None, weight, bias), [grad_out])
    assert torch.equal(out, bias.expand_as(out))
    assert all(g.isfinite().all() for g in gradients)
    assert torch.equal(gradients[1], torch.zeros_like(weight))


def test_gradients_of_constant_rows_are_those_of_the_oracle(device):
    tensors, grads = make(9, 64, torch.float32, False, device=device)
    tensors[0][::2] = 2.5
    compare(tensors, grads, "std", eps=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_offset_costs_no_accuracy(kind, device):
    tensors, grads = make(65, 512, torch.float32, False, device=device, offset=1e4)
    out, *_ = compare(tensors, grads, kind)
    exact = oracle(kind, 1e-5, 0.0, None)(*(None if t is None else t.double() for t in taken(kind, tensors)))
    # A mean near 1e4 rounded to fp32 is off by up to half an ulp, 4.9e-4; nothing else may go wrong.
    assert (out.double() - exact).abs().max() < 5.5e-4 * tensors[2].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_deviations_far_below_eps(kind, device):
    compare(*make(33, 64, torch.float32, False, device=device, spread=1e-9), kind, eps=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind, device):
    wide = torch.randn(7, 5, 96, device=device)
    views = {
        "sliced": wide[..., 8:72],
        "every other column": wide[..., ::2],
        "permuted": wide.permute(1, 2, 0),
        "rows permuted": wide.transpose(0, 1),
        "expanded": wide[:1, :, :40].expand(7, 5, 40),
    }
    for name, x in views.items():
        weight, bias = torch.randn(2, x.shape[-1], device=device)
        grad_out = torch.randn(x.shape[::-1], device=device).permute(2, 1, 0)
        for residual in (None, torch.randn_like(x)):
            tensors = taken(kind, (x, residual, weight, bias))
            grads = [grad_out] * (1 if residual is None else 2)
            actual = outcome(norm_of(kind, 1e-5, 0.0), tensors, grads)
            dense = outcome(norm_of(kind, 1e-5, 0.0), [t if t is None else t.contiguous() for t in tensors], grads)
            assert all(torch.equal(a, b) for a, b in zip(actual, dense, strict=True)), name


@pytest.mark.parametrize("shape", [(0, 16), (4, 0, 16)])
@pytest.mark.parametrize("fused", FUSED)
def test_no_rows(shape, fused, device):
    residual, dropout_p = FUSED[fused]
    tensors, grads = make(0, 16, torch.float32, residual, device=device)
    tensors = [t.reshape(shape) if t is not None and t.dim() == 2 else t for t in tensors]
    out, *rest = outcome(norm_of("std", 1e-5, dropout_p), tensors, [g.reshape(shape) for g in grads])
    assert out.shape == shape
    assert torch.equal(rest[-1], torch.zeros(16, device=device)) and torch.equal(rest[-2], rest[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(1025, 257), (14, 20_003)])
def test_two_runs_agree_bit_for_bit_on_any_number_of_threads(rows, d, kind, device):
    tensors, grads = make(rows, d, torch.float32, True, device=device)
    tensors = taken(kind, tensors)
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            with fixed_seed(11):
                outcomes.append(outcome(norm_of(kind, 1e-5, 0.2), tensors, grads))
    finally:
        torch.set_num_threads(threads)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_manual_seed_governs_the_dropout(device):
    x, residual = torch.randn(2, 40, 64, device=device)

    def draw():
        return tfast.layer_norm(x, None, None, residual=residual, dropout_p=0.5)[1]

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(first, draw()) and not torch.equal(first, second)
    dropped = (first == residual).double().mean().item()
    assert abs(dropped - 0.5) < 5 * (0.25 / x.numel()) ** 0.5


def test_everything_dropped_leaves_the_residual(device):
    x, residual = torch.randn(2, 9, 32, device=device)
    x[3] = float("nan")
    out, summed = tfast.layer_norm(x, None, None, residual=residual, dropout_p=1.0)
    assert torch.equal(summed, residual) and out.isfinite().all()


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_outputs_used_alone(used, device):
    tensors, grads = make(17, 24, torch.float32, True, device=device)
    with fixed_seed(3) as seed:
        leaves = [t.clone().requires_grad_() for t in tensors]
        actual = torch.autograd.grad(norm_of("layer", 1e-5, 0.3)(*leaves)[used], leaves[:2], grads[0])
        expected = torch.autograd.grad(oracle("layer", 1e-5, 0.3, seed.to(device))(*leaves)[used], leaves[:2], grads[0])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_inputs_leave_the_other_gradients_as_they_are(kind, fused, frozen, device):
    residual, dropout_p = FUSED[fused]
    tensors, grads = make(65, 37, torch.float32, residual, device=device)
    tensors = taken(kind, tensors)
    with fixed_seed(5):
        _, *expected = outcome(norm_of(kind, 1e-5, dropout_p), tensors, grads)[residual:]
        leaves = [t if t is None else t.clone().requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
        outputs = norm_of(kind, 1e-5, dropout_p)(*leaves)
    torch.autograd.backward(outputs if residual else [outputs], grads)
    for leaf, gradient in zip((t for t in leaves if t is not None), expected, strict=True):
        assert torch.equal(leaf.grad, gradient) if leaf.requires_grad else leaf.grad is None


def test_layer_is_what_torch_computes(device):
    x, weight, bias = torch.randn(8, 9, 48, device=device), *torch.randn(2, 48, device=device)
    torch.testing.assert_close(tfast.layer_norm(x, weight, bias), F.layer_norm(x, (48,), weight, bias))


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, *SIXTEEN_AND_32])
def test_rms_is_what_torch_computes(dtype, eps, device):
    x, weight = 1e-3 * torch.randn(8, 9, 48, device=device), torch.randn(48, device=device)
    for scale in (weight.to(dtype), None):
        ours = tfast.layer_norm(x.to(dtype), scale, None, eps, kind="rms")
        torch.testing.assert_close(ours, F.rms_norm(x.to(dtype), (48,), scale, eps))


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_is_at_least_as_exact_as_models_write_it(dtype, written, device):
    x, weight = torch.randn(129, 512, device=device).to(dtype), torch.rand(512, device=device).add(0.5).to(dtype)
    exact = F.rms_norm(x.double(), (512,), weight.double(), 1e-6)
    ours, theirs = tfast.layer_norm(x, weight, None, 1e-6, kind="rms"), written(x, weight, 1e-6)
    assert (ours - exact).norm() < 0.9 * (theirs - exact).norm()
    # Theirs is rounded twice: the first time may move the product by a unit in the last place, the second by another.
    assert (ours - theirs).abs().float().div(theirs.abs()).max() <= 2 * torch.finfo(dtype).eps


def test_a_narrower_x_is_added_in_the_dtype_of_the_residual(device):
    x, residual = torch.randn(5, 16, device=device).bfloat16(), torch.randn(5, 16, device=device)
    out, summed = tfast.layer_norm(x, None, None, residual=residual)
    assert out.dtype == summed.dtype == torch.float32
    assert torch.equal(summed, residual + x)


def test_autocast_keeps_the_dtype_of_the_rows(device):
    x, weight, bias = torch.randn(4, 32, device=device).bfloat16(), *torch.randn(2, 32, device=device)
    plain = tfast.layer_norm(x, weight, bias)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(tfast.layer_norm(x, weight, bias), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", FUSED)
def test_gradcheck_in_double(fused, kind):
    residual, dropout_p = FUSED[fused]
    tensors, _ = make(3, 11, torch.float64, residual)
    leaves = [None if t is None else t.requires_grad_() for t in taken(kind, tensors)]
    with fixed_seed(7):
        assert torch.autograd.gradcheck(norm_of(kind, 1e-5, dropout_p), leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", FUSED)
def test_opcheck(fused, kind, device):
    residual, dropout_p = FUSED[fused]
    tensors, grads = make(5, 24, torch.float32, residual, device=device)
    x, added, weight, bias = taken(kind, tensors)
    seed = torch.tensor([3], device=device) if dropout_p else None
    backend = backends.resolve("norm", device, x.dtype)
    leaves = [None if t is None else t.requires_grad_() for t in (x, added, weight, bias)]
    op = torch.ops.transformer_fast.layer_norm.default
    torch.library.opcheck(op, (*leaves, 1e-5, kind, dropout_p, seed, backend))
    x, added, weight, bias = (None if t is None else t.detach() for t in leaves)
    _, summed, mean, rstd = op(x, added, weight, bias, 1e-5, kind, dropout_p, seed, backend)
    assert rstd.shape == (5,) and mean.shape == ((0,) if kind == "rms" else (5,))
    rows = summed if residual else x
    tail = weight, mean, rstd, kind, dropout_p, seed, bias is not None, backend
    backward = torch.ops.transformer_fast.layer_norm_backward.default
    torch.library.opcheck(backward, (grads[0], grads[1] if residual else None, rows, *tail))


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_compiles(kind, device):
    tensors, _ = make(6, 32, torch.float32, True, device=device)
    tensors = taken(kind, tensors)
    call = norm_of(kind, 1e-6, 0.0)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(*tensors), call(*tensors), strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused_by_the_kernels_and_given_by_the_reference(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(tfast.layer_norm(x, None, None).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_backward cannot be differentiated again"):
        grad.sum().backward()
    with tfast.backend("reference"):
        (grad,) = torch.autograd.grad(tfast.layer_norm(x, None, None).pow(2).sum(), x, create_graph=True)
        grad.sum().backward()


X, V = torch.zeros(2, 8), torch.zeros(8)
WRONG = {
    "a list": (TypeError, r"x must be a tensor, got list", lambda: tfast.layer_norm([1.0], V, V)),
    "integers": (TypeError, r"x must be a float tensor, got torch.int64", lambda: tfast.layer_norm(X.long(), V, V)),
    "no dimension": (ValueError, r"x must be \(\.\.\., d\)", lambda: tfast.layer_norm(torch.tensor(1.0), None, None)),
    "no column": (ValueError, r"d of at least 1, got shape \(2, 0\)", lambda: tfast.layer_norm(X[:, :0], None, None)),
    "kind": (
        ValueError, r'kind must be "layer", "std" or "rms", got \'batch\'',
        lambda: tfast.layer_norm(X, V, V, kind="batch"),
    ),
    "bias of rms": (
        ValueError, r'kind="rms" has no bias: give None, got a bias \(8,\)',
        lambda: tfast.layer_norm(X, V, V, kind="rms"),
    ),
    "weight": (ValueError, r"weight .* \(8,\) for x \(2, 8\), got \(7,\)", lambda: tfast.layer_norm(X, V[:7], V)),
    "bias": (ValueError, r"bias .* \(8,\) for x \(2, 8\), got \(1, 8\)", lambda: tfast.layer_norm(X, V, V[None])),
    "one column": (
        ValueError, r'kind="std" needs d of at least 2 .* got x \(2, 1\)',
        lambda: tfast.layer_norm(X[:, :1], None, None, kind="std"),
    ),
    "residual": (
        ValueError, r"residual \(1, 8\) and x \(2, 8\)", lambda: tfast.layer_norm(X, V, V, residual=X[:1])
    ),
    "p": (
        ValueError, r"dropout_p must lie in \[0, 1\], got 1.5",
        lambda: tfast.layer_norm(X, V, V, residual=X, dropout_p=1.5),
    ),
    "nothing to add to": (
        ValueError, r"dropout_p = 0.1 needs a residual", lambda: tfast.layer_norm(X, V, V, dropout_p=0.1)
    ),
    "devices": (
        ValueError, r"x is on cpu but weight on meta", lambda: tfast.layer_norm(X, V.to("meta"), V)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_named(what):
    error, message, call = WRONG[what]
    with pytest.raises(error, match=message):
        call()
