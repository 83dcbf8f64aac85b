"""These tests run Triton kernels: on CPU in Triton's interpreter, or on a CUDA device.

    TRITON_INTERPRET=1 pytest tests/interpreter

The variable is read when Triton is imported, so it must be set before the program starts.
"""

from __future__ import annotations

import os

import numpy
import pytest
import quick_interpreter
import torch
import triton
from helpers import poisoned  # noqa: F401
from interpreted import dtype, kernels, loads, on_triton, small_tiles, tiles_of_distances  # noqa: F401

if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.install()


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """Return CUDA if there is a GPU, the CPU under the interpreter; else skip the test."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        if reason := quick_interpreter.obstacle(triton.__version__, numpy.__version__):
            pytest.skip(reason)
        return torch.device("cpu")
    pytest.skip("Triton kernels need a CUDA device, or TRITON_INTERPRET=1 set before the program starts")
