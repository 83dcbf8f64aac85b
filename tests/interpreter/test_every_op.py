"""Strides, empty inputs and frozen inputs of tests/ops/test_every_op.py on the Triton kernels."""

import pytest
from test_every_op import (  # noqa: F401
    test_any_strides_give_the_same_bits,
    test_frozen_inputs_leave_the_other_gradients_as_they_are,
    test_gradients_of_any_strides_give_the_same_bits,
    test_no_rows,
)

pytestmark = [pytest.mark.usefixtures("on_triton"), pytest.mark.cover("values")]
