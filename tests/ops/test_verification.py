"""The parity table passes here and fails for a wrong kernel; the speed table times both sides."""

import math
import sys

import pytest
import torch

from transformer_fast import backends, ops
from transformer_fast.cli import speed, verification
from transformer_fast.cli.verification import Parity, parity, print_parity
from transformer_fast.ops import registry
from transformer_fast.testing import errors


@pytest.fixture(scope="module")
def rows():
    return list(parity("cpu"))


def test_every_op_passes_here(rows):
    assert all(row.passed for row in rows), "\n".join(str(row) for row in rows if not row.passed)


def test_the_table_has_every_op_in_every_dtype_forward_and_backward(rows):
    covered = {(row.op, row.dtype, row.tensor == "output") for row in rows}
    # Every op but a library's product, one without gradients, and one that is another op under torch's name.
    without = {"linear", "attention_decode", "scaled_dot_product_attention", "decompositions", "positional_table"}
    ops_here = {op.removeprefix("linear_") for op in {*ops.__all__} - without} | {"Transformer"}
    assert covered == {
        (op, dtype, output) for op in ops_here for dtype in (torch.float32, torch.bfloat16) for output in (True, False)
    }
    assert all(row.eager_error > 0 for row in rows if row.op == "Transformer")
    # The gate has teeth: in fp32 nothing may be off by more than a few parts in a hundred thousand. The gradient
    # of ALiBi's slopes is a sum of scores times distances, about 150 here, so its last place is larger.
    most = {"grad slopes": 2e-4}
    assert all(row.gate < most.get(row.tensor, 1e-4) for row in rows if row.dtype == torch.float32)


def broken(op, change):
    """Replace the op by one with a wrong result on all backends but the reference."""

    def run(*args, **options):
        result = op(*args, **options)
        if backends.current() == "reference":
            return result
        return tuple(change(r) for r in result) if isinstance(result, tuple) else change(result)

    return run


class Doubled(torch.autograd.Function):
    """Autograd function with a right forward and a wrong backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


CHANGES = {
    "a little off": (lambda y: y * (1 + 1e-5), "output"),
    "a wrong row": (lambda y: y.index_fill(0, torch.tensor(0), 0.5), "output"),
    "an unwritten row": (lambda y: y.index_fill(0, torch.tensor(0), math.nan), "output"),
    "wrong backward": (Doubled.apply, "gradient"),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("op", ["attention", "layer_norm", "embed"])
def test_a_wrong_kernel_fails(op, change, monkeypatch):
    alter, expected = CHANGES[change]
    function = getattr(ops, op)
    monkeypatch.setattr(sys.modules[function.__module__], op, broken(function, alter))
    device = torch.device("cpu")
    cases = [case for case in registry.op_cases(device) if case.op == op]
    with backends.backend("auto"):
        rows = [row for case in cases for row in verification.check_case(case, device, torch.float32)]
    failed = [row for row in rows if not row.passed]
    assert {row.case for row in failed} == {case.name for case in cases}
    assert expected in {"output" if row.tensor == "output" else "gradient" for row in failed}


def test_a_kernel_that_raises_is_a_line_of_the_table(capsys):
    label = ("attention", "no mask", torch.float32)
    value = torch.ones(2), {"q": torch.ones(2)}

    def fast():
        raise RuntimeError("no kernel image is available\nsecond line")

    [row] = verification._compare(label, torch.device("cpu"), exact=value, eager=value, fast=fast)
    assert not row.passed and row.note == "RuntimeError: no kernel image is available"
    print_parity([row])
    out = capsys.readouterr().out
    assert "FAIL RuntimeError: no kernel image is available" in out and "0 of 1 passed, 1 FAILED" in out


@pytest.mark.parametrize(
    "error, passed", [(0.0, True), (2.0, True), (2.1, False), (math.inf, False), (math.nan, False)]
)
def test_the_gate(error, passed):
    row = Parity("op", "case", torch.float32, "output", "native", error, 2.0, 1.0)
    assert row.passed == passed
    assert ("FAIL" in str(row)) != passed


def test_the_gate_is_twice_the_error_of_eager_and_four_ulps():
    exact = torch.tensor([8.0, -1.0, -torch.inf], dtype=torch.float64)
    eager, actual = torch.tensor([8.0, -1.5, 0.0]), torch.tensor([8.25, -1.0, 0.0])
    assert errors(actual, eager, exact) == (0.25, 1.0 + 4 * 8 * 2**-23, 0.5)
    assert math.isnan(errors(torch.tensor([8.0, torch.nan, 0.0]), eager, exact)[0])


def test_speed_times_both_sides(monkeypatch):
    for name, value in (("BATCH", 2), ("LENGTH", 8), ("WIDTH", 16), ("HEADS", 2), ("VOCAB", 30)):
        monkeypatch.setattr(speed, name, value)
    timings = list(speed.speed("cpu", seconds=0.02))
    kinds = "embedding + positions + dropout", "residual + dropout + LayerNorm", "attention with dropout"
    assert [name.split(",")[0] for name, _, _ in timings] == [*kinds, *["training step"] * 3]
    assert all(0 < side.p20 <= side.median <= side.p80 for _, fast, eager in timings for side in (fast, eager))
    row = "x", speed.Timing(0.001, 0.001, 0.001), speed.Timing(0.0025, 0.002, 0.003)
    lines = list(speed.format_speed([row]))
    assert lines[1].split() == ["x", "1.000", "2.500", "2.50x"]
