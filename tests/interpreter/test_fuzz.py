"""A fixed share of the random calls of tests/fuzz.py, on the Triton kernels."""

import fuzz
import pytest

from transformer_fast import configs

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")


@pytest.mark.parametrize("number", range(75))
def test_a_random_call(number, device, monkeypatch):
    if device.type == "cpu":
        for key, tile in fuzz.small_tiles().items():
            monkeypatch.setitem(configs.ATTENTION, key, tile)
    fuzz.check(fuzz.config(2, number, "triton"), "triton")
