"""A fixed share of the random calls of tests/fuzz.py, on the Triton kernels."""

import fuzz
import pytest

from transformer_fast.triton import configs

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")


@pytest.fixture(autouse=True)
def _small_tiles(device, monkeypatch):
    if device.type == "cpu":
        for key, tile in fuzz.small_tiles().items():
            monkeypatch.setitem(configs.ATTENTION, key, tile)


@pytest.mark.parametrize("number", range(75))
def test_a_random_call(number):
    fuzz.check(fuzz.config(2, number, "triton"), "triton")


@pytest.mark.parametrize("share", range(4))
def test_every_combination_of_mask_parts(share):
    """Each with one of the four ways to drop and to fill empty rows, in turn; the C++ kernels get them all."""
    combinations = fuzz.combinations()
    for number in range(share, len(combinations) // 4, 4):
        fuzz.check(combinations[4 * number + (number // 2 + number) % 4], "triton")
