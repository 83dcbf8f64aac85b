"""tests/test_cross_entropy.py on the Triton kernel, through the same door."""

import pytest
from test_cross_entropy import *  # noqa: F403
from test_cross_entropy import inputs, linear_cross_entropy

import transformer_fast as tfast

test_opcheck = None  # of the native op


@pytest.fixture(autouse=True)
def _on_triton():
    with tfast.backend("triton"):
        yield


def test_a_wrong_target_is_nan(device):
    leaves, target = inputs(device, rows=6)
    target[0, 0] = 37
    assert linear_cross_entropy(*leaves, target).isnan()
