"""tests/ops/test_norm.py on the Triton kernels, by the table of tiles and with small ones."""

import pytest
import test_norm
import torch
from interpreted import dtype_of_rows as dtype  # noqa: F401
from op_calls import assert_equal
from test_norm import *  # noqa: F403
from test_norm import FUSED, KINDS, compare, norm

import transformer_fast as tfast
from transformer_fast.testing import fixed_dropout_seed
from transformer_fast.triton.configs import NORM, NormConfig

pytestmark = [pytest.mark.usefixtures("on_triton"), pytest.mark.cover("values")]
ALL = "residual and dropout"
test_millions_of_rows = None  # a program each, which takes the interpreter milliseconds


@pytest.fixture(autouse=True)
def halves(monkeypatch, device):
    """Leave bfloat16 to a GPU."""
    if device.type == "cpu":
        monkeypatch.setattr(test_norm, "HALVES", [torch.float16])


@pytest.fixture(params=["table", "small"])
def tiles(request, monkeypatch):
    """Parametrize with the kernels for any width used from 64 columns on: a small matrix reaches every loop."""
    if request.param == "small":
        for kernel in ("forward", "backward"):
            monkeypatch.setitem(NORM, (kernel, 0), NormConfig(1, 32, 4, 1, 2, 3))
            for width in (128, 256, 512, 1024):
                monkeypatch.delitem(NORM, (kernel, width))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (37, 20), (9, 97), (3, 513), (1, 65), (3, 128), (5, 150)])
def test_matches_the_oracle(rows, d, dtype, kind, fused, device):  # noqa: F811
    compare(*norm(rows, d, kind, dtype, fused=fused, device=device))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("d", [24, 100])
def test_without_weight_or_bias(absent, d, kind, device):
    compare(*norm(5, d, kind, absent=absent, device=device))


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_the_widest_rows(dtype, kind, monkeypatch, device):  # noqa: F811
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 4096, 4))  # fewer programs: they run one after the other
    compare(*norm(2, 65_536, kind, dtype, fused=ALL, device=device))


@pytest.mark.parametrize("kind", ["std", "rms"])
def test_more_rows_than_programs(kind, monkeypatch, device):
    monkeypatch.setitem(NORM, ("sum", 64), NormConfig(8, 16, 4))  # with this config the partial sums take two steps
    compare(*norm(16 * 2 * 8 + 21, 33, kind, device=device))


@pytest.mark.parametrize("kind", ["std", "rms"])
@pytest.mark.parametrize(("rows", "d"), [(70, 33), (5, 100)])
def test_two_runs_agree_bit_for_bit(rows, d, kind, tiles, device):
    call, _ = norm(rows, d, kind, fused=ALL, device=device)
    assert_equal(call.trained(), call.trained())


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
