"""Set-up of every test: the plugins, a device and a seed."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = [
    "short_list",  # chooses the cases that run without --all
    "failures",  # says how to run a failed test again
    "triton_compile",  # says at the end how many Triton kernels were compiled, and what they need
]


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """CPU, and CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20260101)
