"""tests/ops/test_attention_kernels.py on the Triton kernels.

A call takes the interpreter a second, so the short list has every value of a parameter in one case.
"""

from __future__ import annotations

import pytest
from test_attention_kernels import *  # noqa: F403

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered"),
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.cover("values"),
]
test_every_pair_of_masks = test_long_on_both_sides = None  # a minute each; pairs are in test_fuzz.py
for test, count in (
    (test_every_part_with_every_mask, 8),  # noqa: F405
    (test_a_bias_of_any_shape_and_dtype, 6),  # noqa: F405
    (test_a_bias_by_distance_of_any_shape, 4),  # noqa: F405
    (test_same_bits_in_every_run_on_any_number_of_threads, 1),  # noqa: F405
):
    pytest.mark.cover(count)(test)
pytest.mark.usefixtures("tiles_of_distances")(test_a_bias_by_distance_of_any_shape)  # noqa: F405
del test


def test_rows_too_far_apart_for_32_bits_are_copied(monkeypatch, kernels):
    """Lower the limit, so that every tensor with gaps between rows is copied."""
    monkeypatch.setattr("transformer_fast.triton.attention.tiles.WIDEST_STRIDE", 60)
    B, H, Lq, Lk, D = 1, 2, 20, 40, 8
    tensors = [kernels.random(B, L, H, 64)[..., :D].transpose(1, 2) for L in (Lq, Lk, Lk, Lq)]
    mask = {"bias": kernels.random(1, 1, Lq, 128)[..., :Lk], "keep": kernels.random(1, 1, Lq, 128)[..., :Lk] > 0}
    kernels.check(tensors, kernels.call(D, mask))
