"""Calls of tests/ops/test_norm.py on the Triton norm kernels: on CPU under TRITON_INTERPRET=1, or on a GPU.

Shapes are tiny on CPU, where a program takes milliseconds; the interpreter cannot compute in bfloat16.
"""

import pytest
import torch
from op_calls import assert_equal
from test_norm import CENTRED, FUSED, KINDS, compare, norm

import transformer_fast as tfast
from transformer_fast.testing import fixed_dropout_seed
from transformer_fast.triton.configs import NORM, NormConfig

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
ALL = "residual and dropout"


@pytest.fixture(autouse=True)
def _on_triton():
    with tfast.backend("triton"):
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Use the kernels for any width from 64 columns on, so that a small matrix reaches every loop."""
    for kernel in ("forward", "backward"):
        monkeypatch.setitem(NORM, (kernel, 0), NormConfig(1, 32, 4, 1, 2, 3))
        for width in (128, 256):
            monkeypatch.delitem(NORM, (kernel, width))


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (37, 20), (9, 97), (3, 513)])
def test_matches_the_oracle(rows, d, dtype, kind, fused, device):
    compare(*norm(rows, d, kind, dtype, fused=fused, device=device))


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(1, 65), (3, 128), (5, 150)])
def test_rows_wider_than_a_tile_match_the_oracle(rows, d, kind, fused, small_tiles, device):
    compare(*norm(rows, d, kind, fused=fused, device=device))


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_rows(dtype, kind, monkeypatch, device):
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 4096, 4))  # fewer programs: they run one after the other
    compare(*norm(2, 65_536, kind, dtype, fused=ALL, device=device))


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_more_rows_than_programs(kind, monkeypatch, device):
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 16, 4))  # with this config the partial sums take two steps
    compare(*norm(16 * 2 * 8 + 21, 33, kind, device=device))


def test_32_bit_weights_with_16_bit_rows(device):
    found = compare(*norm(9, 40, dtype=torch.float16, fused=ALL, weights=torch.float32, device=device))
    assert [t.dtype for t in found.values()] == [torch.float16] * 4 + [torch.float32] * 2


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("d", [24, 100])
def test_without_weight_or_bias(absent, d, kind, small_tiles, device):
    compare(*norm(5, d, kind, absent=absent, device=device))


@pytest.mark.parametrize("kind", CENTRED)
@pytest.mark.parametrize("d", [20, 100])
@pytest.mark.parametrize("value", [0.1, -3.3e4])
def test_a_constant_row_gives_the_bias_exactly(value, d, kind, small_tiles, device):
    call, _ = norm(3, d, kind, eps=1e-6, device=device)
    out, *gradients = call.trained(x=torch.full_like(call.tensors["x"], value))
    assert torch.equal(out, call.tensors["bias"].expand(3, d))
    assert all(t.isfinite().all() for t in gradients)
    assert torch.equal(gradients[1], torch.zeros(d, device=device))


@pytest.mark.parametrize("d", [60, 100])
def test_a_large_offset_costs_no_accuracy(d, small_tiles, device):
    compare(*norm(5, d, "std", offset=1e4, device=device))


@pytest.mark.parametrize("d", [40, 100])
def test_the_sum_is_normed_as_it_is_stored(d, small_tiles, device):
    x, residual = torch.randn(2, 9, d, device=device).half()
    out, summed = tfast.layer_norm(x, None, None, residual=residual)
    assert torch.equal(out, tfast.layer_norm(summed, None, None))


@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize("d", [48, 72])
def test_any_strides(d, kind, small_tiles, device):
    call, _ = norm(3, d, kind, fused=ALL, device=device)
    wide, turned = torch.randn(3, 2 * d, device=device), torch.randn(d, 3, device=device).t()
    for x in (wide[:, :d], wide[:, ::2], wide[:1, :d].expand(3, d)):
        strided = call.trained(x=x, residual=turned, grads=[turned, turned])
        dense = [t.contiguous() for t in (x, turned)]
        assert_equal(strided, call.trained(x=dense[0], residual=dense[1], grads=[dense[1]] * 2))


@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize(("rows", "d"), [(70, 33), (5, 100)])
def test_two_runs_agree_bit_for_bit(rows, d, kind, small_tiles, device):
    call, _ = norm(rows, d, kind, fused=ALL, device=device)
    assert_equal(call.trained(), call.trained())


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_no_rows(kind, device):
    call, _ = norm(0, 16, kind, fused=ALL, device=device)
    out, _, *gradients = call.trained()
    assert out.shape == (0, 16)
    assert torch.equal(gradients[call.leaves.index("weight")], torch.zeros(16, device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_x_of_a_narrower_type_than_the_residual(kind, device):
    """Autocast gives such an x, which is read as it is and computes what its float32 copy computes, bit for bit."""
    x, residual, weight = torch.randn(9, 40, device=device).half(), torch.randn(9, 40, device=device), torch.rand(40)
    bias = None if kind == "rms" else torch.rand(40, device=device)
    results = []
    for given in (x, x.float()):
        leaves = [t.detach().requires_grad_() for t in (given, residual, weight.to(device))]
        with fixed_dropout_seed(2**40):
            normed, summed = tfast.layer_norm(leaves[0], leaves[2], bias, kind=kind, residual=leaves[1], dropout_p=0.25)
        grads = torch.autograd.grad((normed, summed), leaves, (residual, x.float()))
        results.append([normed.detach(), summed.detach(), *grads])
    assert results[0][2].dtype == torch.float16 and all(t.dtype == torch.float32 for t in results[0][:2])
    results[1][2] = results[1][2].half()
    for found, expected in zip(*results, strict=True):
        assert_equal(found, expected)


def test_x_of_another_type_is_not_widened_in_the_kernel_unless_it_has_16_bits(device):
    """A float64 residual has no kernel, and a narrower residual rounds x first, as on a CPU."""
    x, weight = torch.randn(3, 40, device=device), torch.ones(40, device=device)
    with pytest.raises(tfast.BackendError):
        tfast.layer_norm(x, weight, weight, residual=x.double(), dropout_p=0.1)
    found = []
    for given in (x, x.half()):
        with fixed_dropout_seed(2**40):
            found.append(tfast.layer_norm(given, weight, weight, residual=x.half(), dropout_p=0.1))
    assert_equal(*found)
