"""A fixed share of the random calls of tests/fuzz.py, on the C++ kernels; on Triton's in tests/interpreter."""

import fuzz
import pytest


@pytest.mark.parametrize("number", range(75))
def test_a_random_call(number):
    backend = "native" if fuzz.DEVICE.type == "cpu" else "triton"
    fuzz.check(fuzz.config(1, number, backend), backend)


def test_a_configuration_is_a_function_of_seed_and_number():
    assert fuzz.config(3, 17) == fuzz.config(3, 17) != fuzz.config(4, 17)
    kinds = {fuzz.config(1, number).kind for number in range(75)}
    assert kinds == {"padded", "packed", "decode"}
