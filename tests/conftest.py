"""Shared fixtures. Tests run on CPU; those that take the ``device`` fixture run on CUDA too where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = [
    "triton_compile",  # says at the end how many Triton kernels were compiled, and what they need
    "small_training",  # fixtures of the tests of training
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The wheel's test first: it takes minutes, in which the other workers have enough to do."""
    items.sort(key=lambda item: item.name != "test_a_stranger_can_use_the_wheel")


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """CPU, and CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20260101)
