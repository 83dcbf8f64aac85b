"""A fixed part of the wrong calls of tests/fuzz/fuzz_arguments.py, and faults that they must show."""

import pytest
import torch

from tests.fuzz import fuzz_arguments as fuzz
from tests.support.op_arguments import Recorded, problem_of, recorded


@pytest.mark.cover(1)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_hundred_and_fifty_wrong_calls(part):
    for number in range(250 * part, 250 * part + 250):
        call, said = fuzz.wrong_call(1, number)
        assert not problem_of(call), f"{number}: {call.name}, {said}"


def test_the_share_has_every_operator_in_it():
    assert {fuzz.wrong_call(1, number)[0].name for number in range(1000)} == set(recorded())


class Fault:
    """An operator with the schema of ``dropout`` that computes something else."""

    _schema = torch.ops.transformer_fast.dropout.default._schema

    def __init__(self, function):
        self.function = function

    def __call__(self, x, **rest):
        return self.function(x)


def unnamed(x):
    raise ValueError("something is wrong")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.as_strided((x.numel() + 1,), (1,)).sum()[None], "memory outside"),
        (lambda x: torch.empty_like(x), "memory outside"),
        (lambda x: x.mT, "promised"),
        (lambda x: x + 1, "plain operators"),
        (unnamed, "names no argument"),
    ],
)
def test_a_fault_is_found(function, says):
    arguments = recorded()["dropout"][0].arguments | {"x": torch.randn(3, 5, 7), "p": 0.0, "relu": False}
    arguments |= {"bias": None, "residual": None}
    assert not problem_of(Recorded(torch.ops.transformer_fast.dropout.default, arguments))

    def on_meta_too(x):
        return torch.empty_like(x) if x.is_meta else function(x)

    assert says in problem_of(Recorded(Fault(on_meta_too), arguments))
