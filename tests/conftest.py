"""Shared fixtures. Tests run on CPU; those marked with the ``device`` fixture run on CUDA too where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["triton_compile"]  # says at the end how many Triton kernels were compiled, and what they need


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA is skipped on a machine that has none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20260101)
