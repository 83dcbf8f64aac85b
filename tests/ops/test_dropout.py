"""Dropout: every backend of this machine draws exactly the documented mask and passes the gate.

test_every_op.py has what it shares with other ops: strides, threads, seeds, derivatives.
tests/interpreter/test_dropout.py runs the same on Triton.
"""

import pytest
import torch
import torch.nn.functional as F
from op_calls import SEED, Call, hold
from torch.overrides import TorchFunctionMode

from transformer_fast import reference
from transformer_fast.ops import dropout

HALVES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 7), (5, 8), (17, 63), (2, 3, 64), (97, 129), (3, 1024), (2, 2500)]


def keep_mask(p, shape):
    return reference.dropout.elementwise_keep(torch.tensor([SEED]), p, shape[:-1].numel(), shape[-1]).view(shape)


def dropped(x, p, **options):
    return Call("dropout", lambda x: dropout(x, p, **options), {"x": x})


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1e-9])
@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_the_mask_of_the_contract(dtype, shape, p, device):
    x = torch.ones(shape, dtype=dtype, device=device)
    keep = keep_mask(p, x.shape).to(device)
    expected = (keep.double() * reference.dropout.rescale(p)).to(dtype)
    for found in dropped(x, p).trained(grads=[x]):
        assert torch.equal(found, expected)


def test_the_rate_is_rounded_to_the_nearest(device):
    x, p = torch.ones(512, 1024, device=device), 0.7 / 65536
    keep = keep_mask(p, x.shape).to(device)
    (found,) = dropped(x, p).outputs()
    assert torch.equal(found != 0, keep) and not keep.all()


def compare(shape, dtype, p, added, relu, device, bias_dtype=None):
    """Compare a call with these added tensors with the oracle."""
    tensors = {"x": torch.randn(shape), "residual": torch.randn(shape), "bias": torch.randn(shape[-1])}
    tensors = {name: t.to(device, dtype) for name, t in tensors.items() if name == "x" or name in added}
    if bias_dtype is not None:
        tensors["bias"] = tensors["bias"].to(bias_dtype)
    call = Call("dropout", lambda **given: dropout(**given, p=p, relu=relu), tensors)
    rows = tensors["x"].numel() // shape[-1]
    return hold(call, lambda **given: reference.dropout.dropout(**given, p=p, relu=relu), rows=rows, sums=("bias",))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", ["", "residual", "bias", "bias and residual"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_matches_the_oracle(dtype, p, added, relu, device):
    compare((6, 11, 52), dtype, p, added.split(" and "), relu, device)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2500), (3, 7), (17, 63), (129, 8), (257, 520), (5000, 3), (2, 65_536)])
def test_the_gradient_of_the_bias_at_any_size(dtype, shape, relu, device):
    compare(shape, dtype, 0.2, ["bias"], relu, device)


def test_millions_of_rows(device):
    compare((2**20 + 3, 2), torch.bfloat16, 0.0, ["bias"], True, device)


def test_a_32_bit_bias_with_16_bit_rows(device):
    for dtype in HALVES:
        found = compare((97, 40), dtype, 0.1, ["bias"], True, device, bias_dtype=torch.float32)
        assert found["grad_bias"].dtype == torch.float32


def test_nothing_to_do(device):
    x = torch.randn(5, 9, device=device)
    assert dropout(x, 0.0) is x
    assert torch.equal(dropout(x, 0.0, relu=True), F.relu(x))
    assert dropout(x[:, :0], 0.5, relu=True).shape == (5, 0)


def test_non_finite_values_where_dropped_do_not_show(device):
    x = torch.full((40, 40), float("nan"), device=device)
    (y,) = dropped(x, 0.5).outputs()
    assert torch.equal(y.isnan(), keep_mask(0.5, x.shape).to(device))
    assert y.nan_to_num(0.0).abs().max() == 0


def test_everything_dropped_compiles(device):
    x = torch.randn(6, 32, device=device)
    compiled = torch.compile(lambda x: dropout(x, 1.0, residual=x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x)


def test_a_mode_sees_the_draw_of_a_seed():
    seen = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        dropout(torch.ones(8), 0.5)
    assert torch.randint in seen
