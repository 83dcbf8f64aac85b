"""Random calls of attention, as in tests/fuzz/test_fuzz.py, on the Triton kernels."""

import random

import pytest
from hypothesis import given

from examples import examples
from tests.fuzz import fuzz

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered"),
    pytest.mark.usefixtures("small_tiles"),
]


@given(fuzz.configs("triton"))
@examples(12, 75)
def test_a_random_call(c):
    fuzz.check(c, "triton")


@pytest.mark.cover(1)
@pytest.mark.parametrize("share", range(8))
def test_every_combination_of_mask_parts(share):
    """Each combination has one of the four ways to drop and to fill empty rows, in turn; on C++ it has all."""
    combinations = fuzz.combinations()
    numbers = list(range(len(combinations) // 4))
    random.Random(0).shuffle(numbers)
    for number in numbers[share::8]:
        fuzz.check(combinations[4 * number + (number // 2 + number) % 4], "triton")


def test_a_logsumexp_between_8_and_16():
    """Found by fuzzing: weights computed from such a logsumexp missed a sum of 1 by more than eager's."""
    shape = {"kind": "packed", "B": 1, "H": 2, "Hkv": 2, "Lq": 2, "Lk": 65, "D": 20, "Dv": 12, "dtype": "fp32"}
    looks = {"layout": "contiguous", "dialect": "blocked", "parts": (), "causal": 0, "bias": "none", "outputs": "out"}
    options = {"dropout_p": 0.3, "empty_rows": "zero", "scale": 1.0, "window": (None, None, 0)}
    fuzz.check(fuzz.Config(number=64, **(shape | looks | options)), "triton")
