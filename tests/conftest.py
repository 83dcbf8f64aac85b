"""Shared fixtures. Tests run on CPU; those that take the ``device`` fixture run on CUDA too where there is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before PyTorch is imported: the processes of a run share the cores, and small tensors gain nothing from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]

pytest_plugins = [
    "short_list",  # chooses the cases that run without --all
    "triton_compile",  # says at the end how many Triton kernels were compiled, and what they need
    "small_training",  # fixtures of the tests of training
]


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """CPU, and CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20260101)
